"""MosaicML's MDS."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np

from tests.hostile.corpus.case import RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, nonsense, special_files


def _raw(samples: int = 10) -> bytes:
    bodies = []
    for k in range(samples):
        image = bytes([k]) * (k + 1)
        array = bytes([1 << 2, 1 + k % 3]) + np.arange(1 + k % 3, dtype="<u2").tobytes()
        sizes = np.array([len(image), len(array)], "<u4").tobytes()
        bodies.append(sizes + image + np.int64(k).tobytes() + array)
    ends = np.cumsum([4 * (samples + 2), *map(len, bodies)]).astype("<u4")
    return bytes(np.uint32(samples).tobytes() + ends.tobytes() + b"".join(bodies))


def sound(folder: Path, packed: str = "", change: Callable[[Any], object] | None = None) -> Ask:
    """Ten samples in a shard."""
    raw = _raw()
    entry: dict[str, Any] = {
        "format": "mds",
        "samples": 10,
        "column_names": ["image", "label", "y"],
        "column_encodings": ["jpeg", "int", "ndarray:uint16"],
        "column_sizes": [None, 8, None],
        "raw_data": {"basename": "shard.0.mds", "bytes": len(raw), "hashes": {}},
        "zip_data": None,
        "compression": packed or None,
    }
    data = folder / "data"
    data.mkdir()
    if packed:
        entry["zip_data"] = {"basename": f"shard.0.mds.{packed}", "bytes": 1, "hashes": {}}
        encode = gzip.compress if packed == "gz" else numcodecs.Zstd(3).encode
        (data / f"shard.0.mds.{packed}").write_bytes(bytes(encode(raw)))
    else:
        (data / "shard.0.mds").write_bytes(raw)
    index = {"version": 2, "shards": [entry]}
    if change is not None:
        change(index)
    (data / "index.json").write_text(json.dumps(index))
    return Ask("reader", str(data))


def _gz(folder: Path) -> Ask:
    return sound(folder, "gz")


def _zstd(folder: Path) -> Ask:
    return sound(folder, "zstd")


def _index(change: Callable[[Any], object]) -> Make:
    return lambda folder: sound(folder, change=lambda index: change(index["shards"][0]))


def _bomb(packed: str, declared: int | None) -> Make:
    """A shard of 700 MiB of zeros when decompressed."""

    def make(folder: Path) -> Ask:
        def change(index: Any) -> None:
            if declared is not None:
                index["shards"][0]["raw_data"]["bytes"] = declared

        ask = sound(folder, packed, change)
        encode = gzip.compress if packed == "gz" else numcodecs.Zstd(3).encode
        (folder / "data" / f"shard.0.mds.{packed}").write_bytes(bytes(encode(bytes(100 << 20))) * 7)
        return ask

    return make


def _text(text: str) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        (folder / "data" / "index.json").write_text(text)
        return ask

    return make


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("mds/sound", sound, RIGHT, "10 samples")
    yield Case("mds/sound-gz", _gz, RIGHT, "10 samples")
    yield Case("mds/sound-zstd", _zstd, RIGHT, "10 samples")
    yield from special_files("mds", sound, "data/shard.0.mds")
    yield from special_files("mds", sound, "data/index.json")
    yield from special_files("mds-gz", _gz, "data/shard.0.mds.gz")
    yield from damaged("mds", sound, "data/shard.0.mds", 12)
    yield from damaged("mds-gz", _gz, "data/shard.0.mds.gz", 6)
    yield from damaged("mds-zstd", _zstd, "data/shard.0.mds.zstd", 6)
    yield from damaged("mds", sound, "data/index.json", 6)
    yield from nonsense("mds", sound, "data/index.json", 60)
    for packed in ("gz", "zstd"):
        for declared in (None, 700 << 20, (2 << 30) - 1):
            yield Case(f"mds/bomb-{packed}-{declared}", _bomb(packed, declared))
    large = (2 << 30) - 1
    yield Case("mds/raw-absent", _index(lambda shard: shard["raw_data"].update(bytes=large)))
    yield Case("mds/samples-absent", _index(lambda shard: shard.update(samples=10**9)))

    def both(shard: Any) -> None:
        shard["raw_data"].update(bytes=large)
        shard.update(samples=500_000_000)

    yield Case("mds/both-absent", _index(both))
    for name in ("/etc/passwd", "../x", "..", ".", "", "a\0b", "x" * 5000, "\x1b[31m"):
        shown = repr(name[:8]).strip("'")
        named = _index(lambda shard, name=name: shard["raw_data"].update(basename=name))  # type: ignore[misc]
        yield Case(f"mds/name-{shown}", named)
    for encoding in ("pkl", "pil", "ndarray:float32:99999999,99999999", "ndarray:x", "int:x:y", ""):
        coded = _index(
            lambda shard, e=encoding: shard.update(  # type: ignore[misc]
                column_encodings=["jpeg", "int", e]
            )
        )
        yield Case(f"mds/encoding-{encoding}", coded)
    same = _index(lambda shard: shard.update(column_names=["image"] * 3))
    yield Case("mds/same-names", same)
    yield Case("mds/json-deep", _text('{"shards": ' + "[" * 100_000))
    yield Case("mds/json-list", _text("[]"))
    yield Case("mds/json-digits", _text('{"shards": [{"format": "mds", "samples": ' + "9" * 6000))
