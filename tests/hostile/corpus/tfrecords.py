"""TFRecord files."""

import gzip
import struct
from pathlib import Path

import google_crc32c

from tests.hostile.corpus.case import ANY, ERROR, RIGHT, Ask, Case, Cases, Expected, Make
from tests.hostile.corpus.mutate import damaged, special_files


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _framed(data: bytes, size: int | None = None) -> bytes:
    head = struct.pack("<Q", len(data) if size is None else size)
    return head + _masked(head) + data + _masked(data)


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _field(number: int, data: bytes, claimed: int | None = None) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data) if claimed is None else claimed) + data


def _feature(name: bytes, kind: int, values: bytes) -> bytes:
    return _field(1, _field(1, name) + _field(2, _field(kind, values)))


def _example(*features: bytes) -> bytes:
    return _field(1, b"".join(features))


_LABEL = _feature(b"label", 3, _field(1, b"\x01"))
_IMAGE = _feature(b"image", 1, _field(1, b"\xff\xd8\xff" + bytes(300)))


def _file(data: bytes, name: str = "x.tfrecord") -> Make:
    def make(folder: Path) -> Ask:
        (folder / name).write_bytes(data)
        return Ask("reader", str(folder / name))

    return make


def sound(folder: Path) -> Ask:
    """Ten records of an image and a label."""
    return _file(10 * _framed(_example(_IMAGE, _LABEL)))(folder)


def _bomb(folder: Path) -> Ask:
    (folder / "x.tfrecord.gz").write_bytes(gzip.compress(bytes(100 << 20)) * 7)
    return Ask("reader", str(folder / "x.tfrecord.gz"))


def _records() -> dict[str, tuple[bytes, Expected]]:
    many = b"".join(_feature(b"f%d" % k, 3, _field(1, b"\x01")) for k in range(300))
    deep = b""
    for _ in range(5000):
        deep = _field(1, deep)
    return {
        "empty": (b"", ERROR),
        "noise": (bytes(range(256)), ERROR),
        "claims-much": (_field(1, b"x", 1 << 60), ERROR),
        "claims-much-inside": (_example(_field(1, _field(1, b"a", 1 << 40))), ERROR),
        "endless-varint": (b"\xff" * 100, ERROR),
        "endless-number": (_example(_feature(b"a", 3, _field(1, b"\xff" * 100))), ERROR),
        "cut-number": (_example(_feature(b"a", 3, _field(1, b"\x80"))), ERROR),
        "odd-floats": (_example(_feature(b"a", 2, _field(1, b"12345"))), ERROR),
        "no-values": (_example(_feature(b"a", 3, b"")), ANY),
        "wrong-wire": (_example(_feature(b"a", 1, b"\x08\x01")), ERROR),
        "many-features": (_example(many), ERROR),
        "deep": (deep, ANY),
        "sequence": (_example(_LABEL) + _field(2, b""), ERROR),
        "long-name": (_example(_feature(b"a" * 9000, 3, _field(1, b"\x01"))), ERROR),
        "name-not-utf8": (_example(_feature(b"\xff\xfe", 3, _field(1, b"\x01"))), ERROR),
        "name-with-controls": (_example(_feature(b"\x1b[31m\n", 3, _field(1, b"\x01"))), ANY),
        "no-name": (_example(_feature(b"", 3, _field(1, b"\x01"))), ANY),
        "group": (b"\x0b\x0c", ERROR),
        "field-zero": (b"\x02\x01x", ERROR),
        "twice": (_example(_LABEL, _LABEL), RIGHT),
        "large-numbers": (_example(_feature(b"a", 3, _field(1, 9 * b"\xff" + b"\x7f"))), RIGHT),
        "many-strings": (_example(_feature(b"a", 1, b"\x0a\x00" * 200_000)), ERROR),
    }


def cases() -> Cases:
    """Cases of this format."""
    for name, (record, expected) in _records().items():
        yield Case(f"tfrecord/{name}", _file(_framed(record)), expected)
    good = _framed(_example(_LABEL))
    for size in (2**63, 2**64 - 1, 2**40, len(good)):
        yield Case(f"tfrecord/length-{size}", _file(good + _framed(b"", size)), says="cut off")
    yield Case("tfrecord/empty-file", _file(b""))
    yield Case("tfrecord/wrong-length-crc", _file(good + b"\0" * 12 + good))
    yield Case("tfrecord/cut-head", _file(good + good[:7]), says="cut off")
    yield Case("tfrecord/bomb.gz", _bomb, says="gunzip")
    yield Case("tfrecord/shard-name", _file(bytes(100), "train-00000-of-00001"))
    yield from special_files("tfrecord", sound, "x.tfrecord", but=("outside",))
    yield from damaged("tfrecord", sound, "x.tfrecord", 24)
