"""Zarr stores."""

import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr

from tests.hostile.corpus.case import ANY, ERROR, RIGHT, Ask, Case, Cases, Expected, Make
from tests.hostile.corpus.mutate import damaged, nonsense, special_files


def sound(folder: Path, version: int = 3, **options: Any) -> Ask:
    """Ten samples of two arrays in three chunks each."""
    path = folder / "a.zarr"
    root: Any = zarr.open_group(str(path), mode="w", zarr_format=version)  # type: ignore[arg-type]
    root.create_array("x", data=np.ones((10, 3)), chunks=(4, 3), **options)
    root.create_array("label", data=np.arange(10), chunks=(4,), **options)
    return Ask("reader", str(path))


def sound2(folder: Path) -> Ask:
    """The same in version 2."""
    return sound(folder, 2)


def _v2(shape: list[int], chunks: list[int], dtype: Any = "<f4", **more: Any) -> Make:
    """An array of version 2, with metadata of any kind; and its first chunk."""
    chunk = more.pop("chunk", None)

    def make(folder: Path) -> Ask:
        path = folder / "a.zarr"
        (path / "label").mkdir(parents=True)
        (path / ".zgroup").write_text('{"zarr_format": 2}')
        meta = {
            "zarr_format": 2,
            "shape": shape,
            "chunks": chunks,
            "dtype": dtype,
            "compressor": None,
            "fill_value": 0,
            "order": "C",
            "filters": None,
            **more,
        }
        (path / "label" / ".zarray").write_text(json.dumps(meta))
        if chunk is not None:
            (path / "label" / ("0" + ".0" * (len(shape) - 1))).write_bytes(chunk())
        return Ask("reader", str(path))

    return make


def _v3(shape: list[int], chunks: list[int], codecs: list[Any], chunk: Any = None) -> Make:
    def make(folder: Path) -> Ask:
        path = folder / "a.zarr"
        (path / "label").mkdir(parents=True)
        group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        (path / "zarr.json").write_text(json.dumps(group))
        meta = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": "int64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": codecs,
            "attributes": {},
        }
        (path / "label" / "zarr.json").write_text(json.dumps(meta))
        if chunk is not None:
            file = path / "label" / "c" / "/".join("0" * len(shape))
            file.parent.mkdir(parents=True)
            file.write_bytes(chunk())
        return Ask("reader", str(path))

    return make


class _Touch:
    """Its pickle makes a file when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _boom, ("unpickled",)


def _boom(text: str) -> None:
    raise AssertionError(text)


def _pickled() -> bytes:
    return pickle.dumps([_Touch()])


def _zstd_bomb() -> bytes:
    return bytes(numcodecs.Zstd(3).encode(bytes(600 << 20)))


def _zstd_claim() -> bytes:
    """A frame that says 2^40 bytes, and has none."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + b"\x01\x00\x00"


def _blosc_claim() -> bytes:
    head = bytearray(bytes(numcodecs.Blosc("lz4").encode(np.zeros(1000))))
    head[4:8] = struct.pack("<I", (2 << 30) - 100)
    return bytes(head)


def _lz4_claim() -> bytes:
    return struct.pack("<I", (2 << 30) - 100) + b"\0" * 50


def _gzip_bomb() -> bytes:
    return gzip.compress(bytes(100 << 20), 1) * 6


def _bz2_bomb() -> bytes:
    import bz2

    return bz2.compress(bytes(100 << 20)) * 6


def _lzma_bomb() -> bytes:
    import lzma

    return lzma.compress(bytes(100 << 20), preset=0) * 6


def _outside(folder: Path) -> Ask:
    ask = sound(folder)
    other = folder / "other"
    (folder / "a.zarr" / "x").rename(other)
    (folder / "a.zarr" / "x").symlink_to(other)
    return ask


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("zarr/sound", sound, RIGHT, "10 samples")
    yield Case("zarr2/sound", sound2, RIGHT, "10 samples")
    victims: list[tuple[str, Make, str]] = [
        ("zarr", sound, "a.zarr/zarr.json"),
        ("zarr", sound, "a.zarr/x/zarr.json"),
    ]
    victims += [("zarr2", sound2, "a.zarr/x/.zarray"), ("zarr2", sound2, "a.zarr/.zgroup")]
    for room, make, victim in victims:
        # A folder without an array is the same store with one array less.
        expected: Expected = ANY if "/x/" in victim or room == "zarr2" else ERROR
        yield from special_files(room, make, victim, expected)
        yield from damaged(room, make, victim, 6)
        yield from nonsense(room, make, victim, 24)
    # A missing chunk is filled, as zarr does.
    yield from special_files("zarr", sound, "a.zarr/x/c/0/0", ANY)
    yield from special_files("zarr2", sound2, "a.zarr/x/0.0", ANY)
    yield from damaged("zarr", sound, "a.zarr/x/c/0/0", 6)
    yield Case("zarr/link-outside", _outside)
    for filter_id in ("pickle", "json2", "msgpack2", "vlen-array", "vlen-utf8", "categorize"):
        filters: list[Any] = [{"id": filter_id, "dtype": "u1", "labels": []}]
        objects = _v2([1], [1], "|O", filters=filters, chunk=_pickled)
        yield Case(f"zarr2/objects-{filter_id}", objects)
        plain = _v2([1], [1], "<i8", filters=filters, chunk=_pickled)
        yield Case(f"zarr2/filter-{filter_id}", plain)
    yield Case(
        "zarr2/compressor-pickle", _v2([1], [1], "<i8", compressor={"id": "pickle"}, chunk=_pickled)
    )
    for kind in ("numcodecs.pickle", "numcodecs.json2", "unknown"):
        yield Case(f"zarr/codec-{kind}", _v3([1], [1], [{"name": kind}], _pickled))
    yield Case("zarr2/absent", _v2([10**9], [1000], "<i8"))
    yield Case("zarr2/absent-one-chunk", _v2([10**9], [10**9], "<i8"))
    yield Case("zarr2/absent-float", _v2([10**9, 3], [1000, 3]))
    yield Case("zarr2/empty-rows", _v2([10**9, 0], [1000, 1]))
    yield Case("zarr2/shape-overflow", _v2([2**62, 2**62], [1, 1]))
    yield Case("zarr2/shape-negative", _v2([-5], [5]))
    yield Case("zarr2/chunks-zero", _v2([10], [0]))
    yield Case("zarr2/chunks-negative", _v2([10], [-1]))
    yield Case("zarr2/chunks-many", _v2([10], [1, 1]))
    yield Case("zarr2/dtype-list", _v2([10], [10], [["a", "<f4"], ["b", "<i4"]]))
    yield Case("zarr2/dtype-wide", _v2([10], [10], "<U100000000"))
    yield Case("zarr2/few-absent", _v2([100], [10], "<i8"), RIGHT, "100 samples")
    yield Case("zarr2/chunk-short", _v2([100], [100], "<i8", chunk=lambda: bytes(10)))
    yield Case("zarr2/chunk-long", _v2([100], [100], "<i8", chunk=lambda: bytes(10_000)))
    bombs = {
        "gzip": ({"id": "gzip", "level": 1}, _gzip_bomb),
        "bz2": ({"id": "bz2", "level": 1}, _bz2_bomb),
        "lzma": (
            {"id": "lzma", "format": 1, "check": -1, "preset": 0, "filters": None},
            _lzma_bomb,
        ),
        "zstd": ({"id": "zstd", "level": 1}, _zstd_bomb),
        "zstd-claim": ({"id": "zstd", "level": 1}, _zstd_claim),
        "blosc-claim": (
            {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
            _blosc_claim,
        ),
        "lz4-claim": ({"id": "lz4", "acceleration": 1}, _lz4_claim),
    }
    for name, (compressor, data) in bombs.items():
        bomb = _v2([100], [100], "<i8", compressor=compressor, chunk=data)
        yield Case(f"zarr2/bomb-{name}", bomb)
    whole: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    bomb3 = [*whole, {"name": "gzip", "configuration": {"level": 1}}]
    yield Case("zarr/bomb-gzip", _v3([100], [100], bomb3, _gzip_bomb))
    bomb3 = [*whole, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    yield Case("zarr/bomb-zstd", _v3([100], [100], bomb3, _zstd_bomb))
    yield Case("zarr/bomb-zstd-claim", _v3([100], [100], bomb3, _zstd_claim))
    nested: Any = whole
    for _ in range(300):
        inner = {"chunk_shape": [1], "codecs": nested, "index_codecs": whole}
        nested = [{"name": "sharding_indexed", "configuration": inner}]
    yield Case("zarr/sharding-nested", _v3([10], [10], nested, lambda: bytes(100)), ANY)
    yield Case("zarr/absent", _v3([10**9], [1000], whole))
    yield Case("zarr/absent-tiny-chunks", _v3([10**9], [1], whole))
