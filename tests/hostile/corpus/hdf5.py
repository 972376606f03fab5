"""HDF5 files."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files


def sound(folder: Path) -> Ask:
    """Ten samples: chunked and compressed, contiguous, and of variable length."""
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((10, 3)), chunks=(4, 3), compression="gzip")
        file["label"] = np.arange(10)
        vlen = file.create_dataset("image", (10,), h5py.vlen_dtype(np.uint8))
        for k in range(10):
            vlen[k] = np.arange(k + 1, dtype=np.uint8)
    return Ask("reader", str(folder / "a.h5"))


def _with(change: Callable[[Any], object], suffix: str = "") -> Make:
    def make(folder: Path) -> Ask:
        sound(folder)
        with h5py.File(folder / "a.h5", "a") as file:
            change(file)
        return Ask("reader", str(folder / "a.h5") + suffix)

    return make


def _only(change: Callable[[Any], object], suffix: str = "") -> Make:
    def make(folder: Path) -> Ask:
        with h5py.File(folder / "a.h5", "w") as file:
            change(file)
        return Ask("reader", str(folder / "a.h5") + suffix)

    return make


def _raw_chunk(chunk: tuple[int, ...], data: Callable[[], bytes]) -> Make:
    """A compressed data set whose first chunk holds any bytes."""

    def change(file: Any) -> None:
        made = file.create_dataset("x", chunk, np.uint8, chunks=chunk, compression="gzip")
        made.id.write_direct_chunk((0,) * len(chunk), data())

    return _only(change)


def _twice_deflated(folder: Path) -> Ask:
    """A chunk that becomes 900 KiB when it is inflated once, and 900 MiB when twice."""
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((1000, 8))
    made.set_deflate(1)
    made.set_deflate(1)
    with h5py.File(folder / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((1000, 8))
        id_ = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, made)
        h5py.Dataset(id_).id.write_direct_chunk((0, 0), zlib.compress(_zeros(900 << 20)))
    return Ask("reader", str(folder / "a.h5"))


def _zeros(count: int) -> bytes:
    packer = zlib.compressobj(9)
    zeros = bytes(1 << 20)
    parts = [packer.compress(zeros) for _ in range(count >> 20)]
    return b"".join(parts) + packer.flush()


def _self_links(file: Any) -> None:
    group = file.create_group("g")
    for k in range(20):
        group[f"again{k}"] = group


def _up_links(file: Any) -> None:
    group = file.create_group("g")
    group["root"] = file["/"]


def _deep(file: Any) -> None:
    group = file
    for _ in range(200):
        group = group.create_group("g")
    group["y"] = np.zeros(10)


def _doubling(file: Any) -> None:
    group = file.create_group("end")
    group["y"] = np.zeros(10)
    for k in range(24):
        above = file.create_group(f"level{k}")
        above["one"], above["other"] = group, group
        group = above


def _virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((10,), "f4")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (10,))
    file.create_virtual_dataset("v", layout)


def _external(file: Any) -> None:
    file.create_dataset("e", (10,), "u1", external=[("/etc/passwd", 0, 10)])


def _ends(ends: list[int], size: int = 10) -> Make:
    def change(file: Any) -> None:
        file["image"] = np.arange(size, dtype=np.uint8)
        file["image__ends"] = np.array(ends)

    return _only(change)


def _shapes(shapes: list[list[int]]) -> Make:
    def change(file: Any) -> None:
        file["x"] = np.arange(12, dtype=np.float32)
        file["x__ends"] = np.array([6, 12])
        file["x__shape"] = np.array(shapes)

    return _only(change)


def _attribute(name: str, value: Any) -> Make:
    return _with(lambda file: file.attrs.__setitem__(name, value))


def _classes(value: Any) -> Make:
    return _with(lambda file: file["label"].attrs.__setitem__("classes", value))


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("hdf5/sound", sound, RIGHT, "10 samples")
    yield from special_files("hdf5", sound, "a.h5", but=("outside",))
    yield from damaged("hdf5", sound, "a.h5", 36)
    for name, chunks, dtype in (
        ("chunked", (1000,), "f4"),
        ("chunked-labels", (1000,), "i8"),
        ("large-chunk", (100_000_000,), "f4"),
    ):
        absent = _only(
            lambda file, c=chunks, d=dtype: file.create_dataset(  # type: ignore[misc]
                "label", (10**9,), d, chunks=c
            )
        )
        yield Case(f"hdf5/absent-{name}", absent)
    absent = _only(lambda file: file.create_dataset("x", (10**9,), "f4"))
    yield Case("hdf5/absent-contiguous", absent)
    absent = _only(lambda file: file.create_dataset("x", (10**9, 0), "f4"))
    yield Case("hdf5/absent-empty-rows", absent)
    absent = _only(lambda file: file.create_dataset("x", (10**9,), h5py.vlen_dtype(np.uint8)))
    yield Case("hdf5/absent-variable", absent)
    absent = _only(lambda file: file.create_dataset("x", (2**62, 2**62), "f4", chunks=(1, 1)))
    yield Case("hdf5/absent-overflow", absent)
    few = _only(lambda file: file.create_dataset("x", (100,), "f4", chunks=(10,)))
    yield Case("hdf5/fill-few", few, RIGHT, "100 samples")
    yield Case("hdf5/chunk-bomb", _raw_chunk((1000, 8), lambda: _zeros(300 << 20)))
    yield Case("hdf5/chunk-large-bomb", _raw_chunk((1 << 20, 700), lambda: _zeros(300 << 20)))
    full = _raw_chunk((1 << 10, 1 << 10), lambda: _zeros(900 << 20))
    yield Case("hdf5/chunk-full-bomb", full)
    yield Case("hdf5/chunk-twice-deflated", _twice_deflated)
    yield Case("hdf5/chunk-short", _raw_chunk((1000, 8), lambda: _zeros(0)))
    yield Case("hdf5/chunk-garbage", _raw_chunk((1000, 8), lambda: b"\0" * 100))
    yield Case("hdf5/link-self", _with(_self_links), ANY)
    yield Case("hdf5/link-root", _with(_up_links), ANY)
    yield Case("hdf5/link-doubling", _with(_doubling), ANY)
    yield Case("hdf5/deep", _with(_deep), ANY)
    soft = _with(lambda file: file.__setitem__("s", h5py.SoftLink("/s")), "::s")
    yield Case("hdf5/link-soft", soft)
    soft = _with(lambda file: file.__setitem__("s", h5py.ExternalLink("/etc/x.h5", "x")), "::s")
    yield Case("hdf5/link-external", soft)
    yield Case("hdf5/virtual", _with(_virtual))
    yield Case("hdf5/external", _with(_external))
    null = _with(lambda file: file.__setitem__("n", h5py.Empty("f4")))
    yield Case("hdf5/null", null, ANY)
    null = _only(lambda file: file.__setitem__("n", h5py.Empty("f4")))
    yield Case("hdf5/null-only", null)
    yield Case("hdf5/scalar", _only(lambda file: file.__setitem__("n", 5)))
    yield Case("hdf5/nothing", _only(lambda file: file.create_group("g")))
    records = np.zeros(10, [("a", "f4"), ("b", "i4")])
    yield Case("hdf5/records", _only(lambda file: file.__setitem__("r", records)))
    references = _only(lambda file: file.create_dataset("r", (3,), h5py.ref_dtype))
    yield Case("hdf5/references", references)
    for name, ends in {
        "beyond": [5, 11],
        "falling": [7, 5],
        "negative": [-5, 5],
        "huge": [2**62, 2**63 - 1],
        "none": [],
    }.items():
        yield Case(f"hdf5/ends-{name}", _ends(ends))
    for name, shapes in {
        "large": [[2, 3], [100, 3]],
        "negative": [[2, 3], [-2, -3]],
        "few": [[2, 3]],
        "overflow": [[2, 3], [2**32, 2**32]],
    }.items():
        yield Case(f"hdf5/shapes-{name}", _shapes(shapes))
    for name, text in {
        "number": 5,
        "array": np.arange(3),
        "not-json": "{",
        "null": "null",
        "list": "[]",
        "deep": "[" * 60_000,
        "kinds": '{"schema": [["x", "float128"]], "classes": []}',
        "classes": '{"schema": [["x", "float64[3]"]], "classes": 5}',
        "huge": '{"schema": [["x", "uint8[99999999999999999999]"]], "classes": []}',
        "absent-fields": '{"schema": [["y", "float32"]], "classes": []}',
        "empty": h5py.Empty("S1"),
    }.items():
        yield Case(f"hdf5/schema-{name}", _attribute("dlio_schema", text))
    for name, value in {
        "number": 5,
        "numbers": np.arange(3),
        "not-utf8": [b"\xff\xfe"],
        "empty": h5py.Empty("S1"),
        "escapes": ["\x1b[31m\n"],
        "matrix": np.zeros((2, 2)),
    }.items():
        yield Case(f"hdf5/classes-{name}", _classes(value), ANY)
