"""Archives of zip: arrays of NumPy, and Zarr stores."""

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, cast

import numpy as np

from tests.hostile.corpus.case import ANY, ERROR, RIGHT, Ask, Case, Expected

__all__ = ["cases"]

Member = tuple[str, bytes]
_CENTRAL, _LOCAL, _END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
_LARGE: Final = 0xFFFFFFF0
PATCHES: Final[dict[str, tuple[bytes, int, str, int]]] = {
    "size": (_CENTRAL, 24, "<I", _LARGE),
    "stored-size": (_CENTRAL, 20, "<I", _LARGE),
    "offset": (_CENTRAL, 42, "<I", 0x7FFFFFFF),
    "offset-between": (_CENTRAL, 42, "<I", 5),
    "encrypted": (_CENTRAL, 8, "<H", 1),
    "method": (_CENTRAL, 10, "<H", 99),
    "method-lzma": (_CENTRAL, 10, "<H", 14),
    "method-bzip2": (_CENTRAL, 10, "<H", 12),
    "checksum": (_CENTRAL, 16, "<I", 7),
    "local-method": (_LOCAL, 8, "<H", 8),
    "local-size": (_LOCAL, 18, "<I", 0xFFFFFFFF),
    "local-name": (_LOCAL, 26, "<H", 60_000),
    "local-extra": (_LOCAL, 28, "<H", 65_535),
    "count": (_END, 10, "<H", 65_535),
    "directory-size": (_END, 12, "<I", 0x7FFFFFFF),
    "directory-offset": (_END, 16, "<I", 0x7FFFFFFF),
    "comment": (_END, 20, "<H", 65_535),
}
"""Of the last member's or the archive's record: signature, place in it, kind and value."""


NAMES: Final = {
    "absolute": "/etc/",
    "dots": "../../",
    "url": "file:///etc/",
    "escape": "\x1b[2J\n",
    "nul": "a\0b",
    "backslash": "a\\b\\",
    "long": "x" * 60_000,
}
"""What stands before the members' names."""


def _npy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    memory = io.BytesIO()
    np.save(memory, array)
    return memory.getvalue()


def _zip(members: Sequence[Member], deflated: bool = False, mode: int = 0) -> bytes:
    """Return an archive; the last member has an entry of a Unix mode, if one is given."""
    memory = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(memory, "w") as archive:
        warnings.simplefilter("ignore")  # Of names that come twice.
        for number, (name, data) in enumerate(members):
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            if mode and number == len(members) - 1:
                info.create_system, info.external_attr = 3, mode << 16
            archive.writestr(info, data)
    return memory.getvalue()


def _patched(data: bytes, signature: bytes, place: int, kind: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(kind, changed, changed.rindex(signature) + place, value)
    return bytes(changed)


def _arrays() -> list[Member]:
    return [("y.npy", _npy(np.arange(4))), ("x.npy", _npy(np.ones((4, 3), np.float32)))]


def _store() -> list[Member]:
    about = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 3],
        "data_type": "float32",
        "fill_value": 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
        "storage_transformers": [],
    }
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    return [
        ("zarr.json", json.dumps(group).encode()),
        ("x/zarr.json", json.dumps(about).encode()),
        ("x/c/0/0", np.ones((4, 3), np.float32).tobytes()),
    ]


Attack = tuple[str, Callable[[], bytes], Expected]


def _attacks(sound: Sequence[Member]) -> Iterator[Attack]:
    *before, (last, _) = sound
    yield "sound", partial(_zip, sound), RIGHT
    for title, patch in PATCHES.items():
        yield title, partial(_patched, _zip(sound), *patch), ANY
    for title, start in NAMES.items():
        yield f"name-{title}", partial(_zip, [(start + each, data) for each, data in sound]), ANY
    first = (sound[0][0], bytes(200 << 20))
    for title, members, expected in (
        ("folder", [*before, (f"{last}/", b"")], ANY),
        ("duplicate", [*sound, (last, b"x")], ANY),
        ("nested", [*before, (last, _zip(sound))], ERROR),
        ("no-name", [*sound, ("", b"x")], ANY),
        ("many", [*sound, *((f"c/{k}", b"") for k in range(5000))], ANY),
        ("empty", [], ERROR),
    ):
        yield title, partial(_zip, members), cast(Expected, expected)
    yield "symlink", partial(_zip, [*before, (last, b"/etc/passwd")], mode=0o120777), ERROR
    yield "device", partial(_zip, [*before, (last, b"")], mode=0o020666), ANY
    yield "bomb", partial(_zip, [*before, (last, first[1])], deflated=True), ANY
    yield "bomb-first", partial(_zip, [first, *sound[1:]], deflated=True), ERROR
    yield "twice", partial(bytes, _zip(sound) + _zip(sound[:1])), ANY
    yield "prefix", partial(bytes, b"MZ" * 500 + _zip(sound)), ANY
    yield "cut", partial(bytes, _zip(sound)[:-30]), ERROR


def _written(name: str, make: Callable[[], bytes], folder: Path) -> Ask:
    (folder / name).write_bytes(make())
    return Ask("reader", str(folder / name))


def cases() -> Iterator[Case]:
    """Return the cases of these formats."""
    for kind, name, sound in (("npz", "a.npz", _arrays()), ("zarr", "a.zarr.zip", _store())):
        for title, make, expected in _attacks(sound):
            yield Case(f"zip-{kind}/{title}", partial(_written, name, make), expected)
