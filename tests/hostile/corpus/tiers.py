"""Tiers on disk, their records, and the cache of indexes."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dlio.storage.manifest import Manifest
from dlio.util.folders import MARK
from dlio.util.shared_folders import user_folder
from tests.hostile.corpus import folder as folders
from tests.hostile.corpus import shards
from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files

_NODE = "node0"


def sound(folder: Path) -> Ask:
    """A tier of two blocks."""
    place = folder / "tier"
    place.mkdir()
    inside = place
    for name in (user_folder(), shards.PRINT, _NODE):
        inside = inside / name
        inside.mkdir(mode=0o700)
        (inside / MARK).write_text("dlio\n")
    for number in range(2):
        (inside / f"{number:08d}.blk").write_bytes(shards.block(number, 3 * number, 3))
    example = Manifest(
        {"source": "x", "format": "shard"},
        np.arange(2, dtype=np.uint64),
        np.arange(2, dtype=np.uint64),
    )
    (inside / "manifest").write_bytes(example.encode())
    return Ask("tier", str(place), {"names": [shards.PRINT, _NODE]})


def _listed(folder: Path) -> Ask:
    ask = sound(folder)
    return Ask("inventory", ask.path)


def _header(at: int, form: str, value: int) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        path = min(folder.glob("tier/*/*/*/00000000.blk"))
        data = bytearray(path.read_bytes())
        struct.pack_into(form, data, at, value)
        path.write_bytes(data)
        return ask

    return make


def _named(name: str) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        (min(folder.glob("tier/*/*/node0")) / name).write_bytes(b"x")
        return ask

    return make


def cached(folder: Path) -> Ask:
    """Write an index of class folders into the cache by reading them once."""
    from dlio.data.reader import open_reader

    ask = folders.sound(folder)
    for path in (folder / "data").rglob("*"):
        os.utime(path, (1e9, 1e9))
    os.utime(folder / "data", (1e9, 1e9))
    before = os.environ.get("DLIO_CACHE")
    os.environ["DLIO_CACHE"] = str(folder / "cache")
    try:
        open_reader(str(ask.path)).close()
    finally:
        if before is None:
            del os.environ["DLIO_CACHE"]
        else:
            os.environ["DLIO_CACHE"] = before
    return Ask("reader", ask.path, {"cache": str(folder / "cache")})


def _head(value: Any) -> Make:
    def make(folder: Path) -> Ask:
        ask = cached(folder)
        path = min(folder.glob("cache/*/kept/head.json"))
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return ask

    return make


def _arrays() -> Iterator[Case]:
    """Arrays of an index that do not belong together; their checksums are right."""
    import xxhash

    for name, array in {
        "labels-few": ("labels", np.zeros(2, np.int64)),
        "labels-matrix": ("labels", np.zeros((6, 2), np.int64)),
        "labels-float": ("labels", np.zeros(6)),
        "sizes-negative": ("sizes", np.full(6, -5)),
        "sizes-huge": ("sizes", np.full(6, 1 << 40)),
        "ends-huge": ("name_ends", np.full(6, 1 << 40)),
        "ends-negative": ("name_ends", np.full(6, -1)),
        "head-number": ("head", np.frombuffer(b"5", np.uint8)),
        "head-empty": ("head", np.zeros(0, np.uint8)),
        "head-missing": ("head", np.frombuffer(b'{"folders": {}}', np.uint8)),
    }.items():

        def make(folder: Path, name: str = array[0], array: Any = array[1]) -> Ask:
            ask = cached(folder)
            place = min(folder.glob("cache/*/kept"))
            np.save(place / f"{name}.npy", array)
            head = json.loads((place / "head.json").read_text())
            digest = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())
            head[name] = [array.dtype.str, list(array.shape), digest]
            (place / "head.json").write_text(json.dumps(head))
            return ask

        yield Case(f"cache/array-{name}", make, ANY)


def cases() -> Cases:
    """Return the cases of tiers and caches."""
    victim = "tier/*/*/*/00000000.blk"
    yield Case("tier/sound", sound, RIGHT, "0 damaged")
    for case in special_files("tier", sound, victim):
        yield Case(case.name, case.make, RIGHT, "1 damaged")
    yield from damaged("tier", sound, victim, 30)
    for name, (at, form, value) in {
        "count": (12, "<I", 2**32 - 1),
        "bytes": (24, "<Q", 2**63),
        "schema": (48, "<I", 2**31),
        "version": (8, "<H", 9),
    }.items():
        yield Case(f"tier/header-{name}", _header(at, form, value), RIGHT, "1 damaged")
    for name in (
        "99999999999999999999.blk",
        "²²²²²²²².blk",
        "-0000001.blk",
        "x.blk",
        "tmp.x.1.2",
        "tmp.",
        "tmp.99999999999999999999999.1.1",
        "\x1b[31m.blk",
        "00000009.blk",
    ):
        yield Case(f"tier/name-{name.encode('ascii', 'replace')!r}", _named(name), ANY)
    yield from special_files("tier", sound, "tier/*/*/*/manifest", ANY)
    yield from damaged("tier", sound, "tier/*/*/*/manifest", 12)
    yield from special_files("inventory", _listed, "tier/*/*/*/manifest", ANY)
    yield from special_files("inventory", _listed, "tier/*/*/node0", ANY, but=("sparse",))
    yield Case("cache/sound", cached, RIGHT, "6 samples")
    for victim in ("cache/*/kept/head.json", "cache/*/kept/labels.npy", "cache/*/kept/head.npy"):
        for case in special_files("cache", cached, victim):
            yield Case(case.name, case.make, RIGHT, "6 samples")
    yield from damaged("cache", cached, "cache/*/kept/labels.npy", 12)
    yield from damaged("cache", cached, "cache/*/kept/head.json", 6)
    yield from special_files("cache", cached, "cache/*/lock", RIGHT)
    for name, head in {
        "deep": "[" * 100_000,
        "list": [],
        "number": 5,
        "null": None,
        "empty": {},
        "digits": '{"head": ' + "9" * 6000 + "}",
        "shapes": {"head": ["<f4", ["x"], "x"]},
        "outside": {"../../../x": ["<f4", [1], "x"]},
        "nul": {"a\0b": ["<f4", [1], "x"]},
        "types": {"head": [5, 5, 5]},
    }.items():
        yield Case(f"cache/head-{name}", _head(head), RIGHT, "6 samples")
    yield from _arrays()
