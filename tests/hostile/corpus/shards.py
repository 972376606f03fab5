"""Native shards."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dlio.data.schema import IMAGE_LABEL
from dlio.storage.block import encode_block
from dlio.storage.shard_file import ShardIndex, ShardWriter
from tests.hostile.corpus.case import ERROR, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, nonsense, special_files

PRINT = "ab" * 16


def block(number: int, first: int, count: int, compress: bool = True) -> bytes:
    """A block of labelled images."""
    payloads = [
        IMAGE_LABEL.join({"image": bytes([k]) * 100, "label": k})
        for k in range(first, first + count)
    ]
    pieces = encode_block(
        payloads, block=number, fingerprint=PRINT, schema=IMAGE_LABEL, compress=compress
    )
    return b"".join(map(bytes, pieces))


def shard(folder: Path, number: int, shards: int, **changes: Any) -> Path:
    """Write a shard of two blocks of three samples."""
    path = folder / f"{number}.dlio"
    first = 6 * number
    names = [f"n{first + k}".encode() for k in range(6)]
    with ShardWriter(str(path)) as writer:
        for k in range(2):
            writer.write_blocks([[block(2 * number + k, first + 3 * k, 3)]])
        fields: dict[str, Any] = {
            "fingerprint": PRINT,
            "schema": IMAGE_LABEL,
            "classes": ("a", "b"),
            "shard": number,
            "shards": shards,
            "first": first,
            "total": 6 * shards,
            "offsets": np.array(writer.offsets, np.uint64),
            "counts": np.array([3, 3], np.uint32),
            "sizes": np.full(6, 108, np.uint32),
            "labels": np.arange(first, first + 6, dtype=np.int64),
            "names": b"".join(names),
            "name_ends": np.cumsum([len(name) for name in names]).astype(np.uint64),
        }
        writer.finish(ShardIndex(**{**fields, **changes}))
    return path


def sound(folder: Path) -> Ask:
    """Two shards."""
    data = folder / "data"
    data.mkdir()
    for number in range(2):
        shard(data, number, 2)
    return Ask("reader", str(data))


def _changed(**changes: Any) -> Make:
    """One shard whose footer says something else, with the right checksum."""

    def make(folder: Path) -> Ask:
        shard(folder, 0, changes.pop("shards", 1), **changes)
        return Ask("reader", str(folder))

    return make


_TRAILER = struct.Struct("<QQQ8s")


def load(path: Path) -> Any:
    """Return the JSON of a shard's footer."""
    data = path.read_bytes()
    start, _, _, _ = _TRAILER.unpack(data[-32:])
    (length,) = struct.unpack_from("<Q", data, start)
    return json.loads(data[start + 8 : start + 8 + length])


def save(path: Path, value: Any) -> None:
    """Replace the JSON of a shard's footer; its checksum is right."""
    data = path.read_bytes()
    start, _, _, magic = _TRAILER.unpack(data[-32:])
    (length,) = struct.unpack_from("<Q", data, start)
    rest = data[start + 8 + length : -32]
    text = json.dumps(value).encode()
    text += b" " * (-len(text) % 8)
    footer = struct.pack("<Q", len(text)) + text + rest
    trailer = _TRAILER.pack(start, len(footer), xxhash.xxh3_64_intdigest(footer), magic)
    path.write_bytes(data[:start] + footer + trailer)


def _meta(**changes: Any) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        path = folder / "data" / "0.dlio"
        save(path, {**load(path), **changes})
        return ask

    return make


def _trailer(change: Callable[[int, int, int], tuple[int, int, int]]) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        path = folder / "data" / "0.dlio"
        data = path.read_bytes()
        start, length, digest, magic = _TRAILER.unpack(data[-32:])
        path.write_bytes(data[:-32] + _TRAILER.pack(*change(start, length, digest), magic))
        return ask

    return make


def _sparse(folder: Path) -> Ask:
    """A trailer that claims a footer of 2^40 bytes, in a sparse file of that size."""
    path = folder / "0.dlio"
    size = 1 << 40
    with open(path, "wb") as file:
        file.truncate(size - 32)
        file.seek(size - 32)
        file.write(_TRAILER.pack(8, size - 40, 0, b"DLIOSHRD"))
    return Ask("reader", str(folder))


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("shard/sound", sound, RIGHT, "12 samples")
    yield from special_files("shard", sound, "data/0.dlio", but=("sparse",))
    yield from damaged("shard", sound, "data/0.dlio", 36, ERROR)
    yield from nonsense("shard", sound, "data/0.dlio", 70, load=load, save=save)
    yield Case("shard/sparse", _sparse)
    yield Case("shard/shards-2^30", _meta(shards=1 << 30))
    yield Case("shard/shards-2^47", _meta(shards=1 << 47))
    yield Case("shard/total-huge", _meta(total=1 << 47))
    yield Case("shard/blocks-huge", _meta(blocks=1 << 47))
    yield Case("shard/samples-huge", _meta(samples=1 << 47))
    sizes = np.full(6, 2**32 - 1, np.uint32)
    yield Case("shard/sizes-huge", _changed(sizes=sizes))
    yield Case("shard/sizes-small", _changed(sizes=np.zeros(6, np.uint32)))
    yield Case("shard/counts-wrong", _changed(counts=np.array([4, 2], np.uint32)))
    yield Case("shard/counts-zero", _changed(counts=np.array([0, 6], np.uint32)))
    yield Case("shard/offsets-swapped", _changed(offsets=np.array([500, 0, 1000], np.uint64)))
    falling = np.array([6, 5, 4, 3, 2, 12], np.uint64)
    yield Case("shard/names-falling", _changed(name_ends=falling))
    yield Case("shard/names-huge", _changed(name_ends=np.full(6, 2**63, np.uint64)))
    yield Case("shard/classes-few", _changed(labels=np.full(6, 10**12)), RIGHT)
    yield Case(
        "shard/trailer-start", _trailer(lambda start, length, digest: (start - 8, length, digest))
    )
    yield Case(
        "shard/trailer-length", _trailer(lambda start, length, digest: (start, 2**63, digest))
    )
    yield Case(
        "shard/trailer-wraps", _trailer(lambda start, length, digest: (2**64 - 8, length, digest))
    )
