"""The header of a .npy file is read as numpy writes it, and nothing else is."""

import io

import numpy as np
import pytest

from dlio.data.npy import read_npy_head
from dlio.errors import CorruptBlock


def _file(header: str) -> memoryview:
    text = header.encode("latin-1")
    return memoryview(b"\x93NUMPY\x02\0" + len(text).to_bytes(4, "little") + text + bytes(96))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "?", "u1", "f2"])
def test_what_numpy_writes_is_read(dtype: str, shape: tuple[int, ...], order: str) -> None:
    values = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape, order=order)  # type: ignore[call-overload]
    file = io.BytesIO()
    np.save(file, values)
    head = read_npy_head(memoryview(file.getvalue()))
    assert head.shape == shape
    np.testing.assert_array_equal(head.array(memoryview(file.getvalue())), values)


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (4,), 'fortran_order': False, \"descr\": '<f4'}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4L,), }",  # Python 2's.
    ],
)
def test_other_spellings_are_read(header: str) -> None:
    head = read_npy_head(_file(header))
    assert (head.shape, head.dtype, head.fortran) == ((4,), "float32", False)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{}",
        "(" * 60000,
        "{" + " " * 60000 + "}",
        "{'a': (" + "1," * 30000,
        "{'descr': '<f4' 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4 4)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': 1, 'shape': (4,)}",
        "{'descr': '<f4', 'descr': '<i8', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<f4,<f4', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '(9999999,999)f4', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4,)} + open('/etc/passwd')",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 70 + ")}",
    ],
)
def test_any_other_header_is_damaged(header: str) -> None:
    with pytest.raises(CorruptBlock, match="npy header is damaged"):
        read_npy_head(_file(header))


@pytest.mark.parametrize("dtype", ["S3", "M8[ns]", [("a", "f4"), ("b", "i4")]])
def test_types_that_samples_cannot_have_are_named(dtype: object) -> None:
    file = io.BytesIO()
    np.save(file, np.zeros(3, dtype))  # type: ignore[call-overload]
    with pytest.raises(CorruptBlock, match=r"holds \w+.*, which samples cannot have: convert it"):
        read_npy_head(memoryview(file.getvalue()))


def test_objects_are_refused_by_what_reads_them() -> None:
    file = io.BytesIO()
    np.save(file, np.array(["a", None], object))
    with pytest.raises(CorruptBlock, match="Python objects, which numpy reads with pickle alone"):
        read_npy_head(memoryview(file.getvalue()))


def test_texts_are_read_where_they_are_asked_for() -> None:
    for texts in (np.array(["b", "äöü"]), np.array([b"b", b"xyz"])):
        file = io.BytesIO()
        np.save(file, texts)
        data = memoryview(file.getvalue())
        assert read_npy_head(data, texts=True).array(data).tolist() == texts.tolist()
        with pytest.raises(CorruptBlock, match="samples cannot have"):
            read_npy_head(data)
