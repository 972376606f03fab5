"""How `dlio run` deals a script's batches to the ranks."""

from collections.abc import Callable
from itertools import chain

import pytest
from torch import nn

from dlio.comm.single import SingleCommunicator
from dlio.integrations.script.pass_use import PassMemory, PassUse
from dlio.integrations.script.script_assigner import ScriptAssigner
from dlio.plan.rank_shares import RankShares


class _Rank(SingleCommunicator):
    """One of several ranks, as far as a deal asks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def _dealt(
    batches: list[list[int]], ranks: int, script: Callable[[], object], begun: bool = True
) -> list[list[int]]:
    """The samples that count of each batch and rank, in a script that makes a model first."""
    dealt: list[list[int]] = []
    for rank in range(ranks):
        assigner = ScriptAssigner(_Rank(rank, ranks))
        script()
        use = PassUse(PassMemory(), (), "")
        use.trains = True
        use.plans.begun = begun
        deal = next(assigner.deals(batches, RankShares.even(1, ranks), use))
        assert all(deal.mine), "a rank has nothing to compute on"
        pairs = zip(deal.mine, deal.weights, strict=True)
        dealt += [mine[: int(weight)] for mine, weight in pairs]
        for mine, weight in zip(deal.mine, deal.weights, strict=True):
            assert len(mine) == weight or not weight
        assigner.close()
    return dealt


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", range(1, 12))
def test_ranks_get_two_samples_or_none_where_there_is_batch_normalisation(
    count: int, ranks: int
) -> None:
    batch = list(range(count))
    for affine in (True, False):
        parts = _dealt([batch], ranks, lambda: nn.BatchNorm1d(3, affine=affine))  # noqa: B023
        assert list(chain(*parts)) == batch
        assert all(len(part) != 1 for part in parts) or count == 1
    parts = _dealt([batch], ranks, lambda: nn.Linear(3, 3))
    assert list(chain(*parts)) == batch
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("size", [4, 6, 8])
def test_even_parts_stay_even_in_the_first_batches(size: int, ranks: int) -> None:
    batches = [list(range(size * ranks * k, size * ranks * (k + 1))) for k in range(3)]
    sizes = [len(part) for part in _dealt(batches, ranks, lambda: None, begun=False)]
    assert all(each % 2 == 0 for each in sizes)
    assert len(set(sizes)) > 1
    assert all(sum(sizes[3 * rank : 3 * rank + 2]) == 2 * size for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_of_a_first_batch_differ_if_they_have_two_samples(size: int, ranks: int) -> None:
    batches = [list(range(size * ranks)) for _ in range(3)]
    parts = _dealt(batches, ranks, lambda: nn.Linear(3, 3), begun=False)
    sizes = [list(map(len, parts[number::3])) for number in range(3)]
    more = size > 1
    assert sizes[0] == [size + more, *[size] * (ranks - 2), size - more]
    assert sizes[1] == [size - more, *[size] * (ranks - 2), size + more]  # Their sums are even.
    assert sizes[2] == [size] * ranks
    assert sorted(chain(*parts[::3])) == batches[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", range(1, 8))
def test_a_last_batch_is_not_dealt_as_single_samples(count: int, ranks: int) -> None:
    whole = list(range(2 * ranks + 2))
    batches = [whole, whole, whole[:count]]
    parts = _dealt(batches, ranks, lambda: nn.Linear(3, 3))[2::3]
    assert list(chain(*parts)) == whole[:count]
    assert all(len(part) != 1 for part in parts) or count == 1
