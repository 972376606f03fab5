"""Axes of meshes, and the slabs of ranks: no communication."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.features.mesh.mesh_axes import parse_axes
from dlio.features.mesh.slab import LayerWindow, Slab, longest_dimension


def test_the_last_axis_is_the_fastest() -> None:
    axes = parse_axes("data=2,space=3", 6)
    assert axes.place(0) == {"data": 0, "space": 0}
    assert axes.place(4) == {"data": 1, "space": 1}
    groups = [axes.group(rank, ("space",)) for rank in range(6)]
    assert groups == [0, 0, 0, 1, 1, 1]
    assert [axes.group(rank, ("data", "space")) for rank in range(6)] == [0] * 6
    assert axes.group(3, ("model",)) == 3  # An axis that the mesh lacks: each rank alone.
    assert str(axes) == "data=2,space=3"


def test_data_takes_the_ranks_that_are_left() -> None:
    assert str(parse_axes("model=2", 6)) == "data=3,model=2"
    assert parse_axes({"space": 1}, 1).sizes == (1, 1)


@pytest.mark.parametrize(
    ("axes", "ranks", "error"),
    [
        ("data=2,space=2", 6, "needs 4 ranks, and there are 6: start 4"),
        ("space=4", 6, "a multiple of 4 ranks"),
        ("space", 2, "give sizes of axes, such as"),
        ("", 2, "give sizes of axes, such as"),
        ("spce=2", 2, "unknown axis 'spce'.*space"),
        ("space=2,space=2", 4, "twice"),
        ("space=0", 2, "1 or more"),
        ("space=two", 2, "1 or more"),
        ({"space": -1}, 2, "1 or more"),
        (7, 2, "give text"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes: str, ranks: int, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        parse_axes(axes, ranks)


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 60),
)
def test_ranks_need_what_their_outputs_use(
    ranks: int, reach: int, stride: int, before: int, after: int, extent: int
) -> None:
    window = LayerWindow(stride, before, after, reach)
    outputs = window.outputs(extent)
    if outputs < ranks or extent < ranks:
        return
    covered: list[int] = []
    for rank in range(ranks):
        slab = Slab(outputs, -1, rank, ranks)
        first, last = slab.own
        covered += range(first, last)
        used = [o * stride - before + k for o in range(first, last) for k in range(reach)]
        assert window.needs(slab.own) == (min(used), max(used) + 1)
        assert max(used) < extent + after
    assert covered == list(range(outputs))


def test_a_slab_selects_its_part_of_a_shape() -> None:
    slab = Slab(10, -3, 1, 3)
    assert slab.own == (3, 6)
    assert slab.select((2, 10, 4, 4)) == (slice(None), slice(3, 6), slice(None), slice(None))
    with pytest.raises(UsageError, match="does not have 10 elements"):
        slab.select((4, 4))
    with pytest.raises(UsageError, match="does not have 3 elements"):
        slab.check_local((1, 2, 10, 4, 4))
    with pytest.raises(UsageError, match="fewer than the 3 ranks"):
        replace(slab, extent=2)
    with pytest.raises(UsageError, match="count it from the last one"):
        Slab(10, 1, 0, 2)


def test_the_longest_dimension_is_counted_from_the_last() -> None:
    assert longest_dimension((2, 8, 8, 4)) == -3
    assert longest_dimension((2, 8, 9)) == -1
    with pytest.raises(UsageError, match="without dimensions"):
        longest_dimension(())
