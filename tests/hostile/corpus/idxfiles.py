"""IDX files, as MNIST has them."""

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files

PICTURES = "data/train-images-idx3-ubyte"
LABELS = "data/train-labels-idx1-ubyte"


def _idx(sides: Sequence[int], data: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(sides) % 256]) + struct.pack(f">{len(sides)}I", *sides) + data


_SOUND = {PICTURES: _idx((6, 4, 4), bytes(range(96))), LABELS: _idx((6,), bytes(range(6)))}


def sound(folder: Path) -> Ask:
    """Six pictures with labels."""
    (folder / "data").mkdir()
    for name, data in _SOUND.items():
        (folder / name).write_bytes(data)
    return Ask("reader", str(folder / "data"))


def packed(folder: Path) -> Ask:
    """The same, compressed."""
    (folder / "data").mkdir()
    for name, data in _SOUND.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
    return Ask("reader", str(folder / "data"))


def _alone(data: bytes, suffix: str = "") -> Make:
    def make(folder: Path) -> Ask:
        (folder / f"x.idx3-ubyte{suffix}").write_bytes(data)
        return Ask("reader", str(folder / f"x.idx3-ubyte{suffix}"))

    return make


def _bomb(folder: Path) -> Ask:
    zeros = gzip.compress(bytes(1 << 20)) * 1024
    return _alone(gzip.compress(_idx((1 << 14, 1 << 16), b"")) + zeros, ".gz")(folder)


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("idx/sound", sound, RIGHT, "6 samples")
    yield Case("idx/sound-packed", packed, RIGHT, "6 samples")
    for victim in (PICTURES, LABELS):
        yield from special_files("idx", sound, victim, ANY)
        yield from damaged("idx", sound, victim, 18)
        yield from damaged("idx", packed, f"{victim}.gz", 12)
    most = 2**32 - 1
    refused = {
        "empty": b"",
        "head": b"\0\0\x08",
        "no-sides": _idx((), b"abc"),
        "sides-missing": b"\0\0\x08\xff\0\0\0\1",
        "sides-255": _idx((1,) * 255, b"a"),
        "sides-32": _idx((1,) * 32, b"a"),
        "huge-sides": _idx((most,) * 31, bytes(100)),
        "huge": _idx((most, most, most), bytes(100)),
        "huge-row": _idx((1, most, most), bytes(100)),
        "huge-deep": _idx((most,) * 60, bytes(100)),
        "rows-of-nothing": _idx((most, 0), b""),
        "no-rows": _idx((0, 4), b""),
        "kind": _idx((4,), bytes(64), 10),
        "cut": _idx((4,), bytes(31), 14),
    }
    says = {"sides-255": "has 255 dimensions", "huge-deep": "60 dim", "sides-32": "32 dim"}
    says |= {"huge-sides": f"instead of over {2**63}"}
    for name, data in refused.items():
        yield Case(f"idx/{name}", _alone(data), says=says.get(name, ""))
        yield Case(f"idx/{name}-packed", _alone(gzip.compress(data), ".gz"))
    yield Case("idx/bomb", _bomb)
    yield Case("idx/behind", _alone(_idx((4,), bytes(1 << 20))), RIGHT, "4 samples")
    yield Case("idx/sides-31", _alone(_idx((1,) * 31, b"a")), RIGHT, "1 sample")
    yield Case("idx/nan", _alone(_idx((4,), b"\xff" * 16, 13)), RIGHT, "4 samples")
