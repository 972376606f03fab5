"""Tars and tables that are compressed as a whole."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow

from tests.hostile.corpus import tars
from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files


def _zstd(data: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


CODECS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zstd,
}
_BOMB: Final = 700 << 20


def _table() -> bytes:
    return b"x,words,label\n" + b"".join(b"%d.5,name %d,%d\n" % (k, k, k % 3) for k in range(10))


def _written(data: bytes, name: str) -> Make:
    def make(folder: Path) -> Ask:
        (folder / name).write_bytes(data)
        return Ask("reader", str(folder / name))

    return make


def _streamed(data: bytes, suffix: str) -> bytes:
    """Data as many streams of a few bytes."""
    return b"".join(CODECS[suffix](data[k : k + 64]) for k in range(0, len(data), 64))


def _bomb(name: str, head: bytes) -> Make:
    def make(folder: Path) -> Ask:
        pack = CODECS[name.rpartition(".")[2]]
        zeros = pack(bytes(1 << 20))
        (folder / name).write_bytes(pack(head) + zeros * (_BOMB >> 20))
        return Ask("reader", str(folder / name))

    return make


def packed_table(folder: Path) -> Ask:
    """A table in gzip."""
    return _written(gzip.compress(_table()), "a.csv.gz")(folder)


def packed_tar(folder: Path) -> Ask:
    """A tar in gzip."""
    return _written(gzip.compress(tars.members()), "a.tar.gz")(folder)


def cases() -> Cases:
    """Return the cases of these formats."""
    for stem, data, count in (("csv", _table(), 12), ("tar", tars.members(), 6)):
        for suffix, pack in CODECS.items():
            name, room = f"a.{stem}.{suffix}", f"{stem}-{suffix}"
            whole = pack(data)
            sound = _written(whole, name)
            yield Case(f"{room}/sound", sound, RIGHT, "10 samples")
            streams = _streamed(data, suffix)
            yield Case(f"{room}/streams", _written(streams, name), RIGHT, "10 samples")
            yield Case(f"{room}/streams-cut", _written(streams[:-9], name))
            empty = pack(b"") * (2000 if suffix == "bz2" else 20_000)
            yield Case(f"{room}/streams-empty", _written(empty, name))
            yield Case(f"{room}/zeros", _written(whole + bytes(1 << 20), name), ANY)
            yield Case(f"{room}/tail", _written(whole + b"tail" * 9, name), ANY)
            yield Case(f"{room}/plain", _written(data, name), ANY)
            yield Case(
                f"{room}/other", _written(CODECS["gz" if suffix == "xz" else "xz"](data), name), ANY
            )
            yield Case(f"{room}/empty", _written(pack(b""), name))
            yield Case(f"{room}/twice", _written(pack(whole), name))
            yield Case(f"{room}/bomb", _bomb(name, data), ANY)
            yield from damaged(room, sound, name, count)
        file = f"a.{stem}.gz"
        yield from special_files(f"{stem}-gz", _written(gzip.compress(data), file), file)
