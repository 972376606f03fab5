"""Arrays and scans of which each file is one sample."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.hostile.corpus.case import RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files


def scan(shape: tuple[int, ...] = (4, 5, 6), kind: int = 4, bits: int = 16) -> bytearray:
    """A NIfTI-1 file of int16."""
    head = bytearray(352)
    head[:4] = np.int32(348).tobytes()
    head[40:56] = np.array([len(shape), *shape, *[1] * (7 - len(shape))], "<i2").tobytes()
    head[70:74] = np.array([kind, bits], "<i2").tobytes()
    head[108:112] = np.float32(352).tobytes()
    head[344:348] = b"n+1\0"
    return head + np.arange(120, dtype="<i2").tobytes()


def sound(folder: Path) -> Ask:
    """Two class folders."""
    for name in "ab":
        (folder / "data" / name).mkdir(parents=True)
        np.save(folder / "data" / name / "x.npy", np.arange(24.0).reshape(2, 3, 4))
    return Ask("reader", str(folder / "data"))


def _sound_scan(folder: Path) -> Ask:
    (folder / "x.nii").write_bytes(scan())
    return Ask("reader", str(folder / "x.nii"))


def _sound_packed(folder: Path) -> Ask:
    (folder / "x.nii.gz").write_bytes(gzip.compress(bytes(scan())))
    return Ask("reader", str(folder / "x.nii.gz"))


def _changed(change: Callable[[bytearray], object], suffix: str = ".nii") -> Make:
    def make(folder: Path) -> Ask:
        data = scan()
        change(data)
        plain = bytes(data)
        path = folder / f"x{suffix}"
        path.write_bytes(gzip.compress(plain) if suffix.endswith("gz") else plain)
        return Ask("reader", str(path))

    return make


def _at(offset: int, value: bytes) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[offset : offset + len(value)] = value

    return change


def _bomb(folder: Path) -> Ask:
    data = bytes(scan()) + bytes(700 << 20)
    (folder / "x.nii.gz").write_bytes(gzip.compress(data, 1))
    return Ask("reader", str(folder / "x.nii.gz"))


def _pickled(folder: Path) -> Ask:
    ask = sound(folder)
    np.save(folder / "data" / "a" / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    return ask


def _claims(folder: Path) -> Ask:
    ask = sound(folder)
    path = folder / "data" / "a" / "x.npy"
    path.write_bytes(path.read_bytes().replace(b"(2, 3, 4)", b"(9000000,9000,4)"))
    return ask


def cases() -> Cases:
    """Cases of this format."""
    many = np.array([7, 32767, 32767, 32767, 32767], "<i2").tobytes()
    yield Case("files/claims-much.nii", _changed(_at(40, many)))
    yield Case("files/claims-much.nii.gz", _changed(_at(40, many), ".nii.gz"))
    yield Case("files/negative-dimension", _changed(_at(42, b"\xff\xff")))
    yield Case("files/no-dimensions", _changed(_at(40, b"\0\0")))
    yield Case("files/many-dimensions", _changed(_at(40, b"\xff\x7f")))
    yield Case("files/records", _changed(_at(70, np.array([128, 24], "<i2").tobytes())))
    yield Case("files/no-such-type", _changed(_at(70, b"\xff\x7f")))
    yield Case("files/offset-behind-the-end", _changed(_at(108, np.float32(1e9).tobytes())))
    yield Case("files/offset-is-nan", _changed(_at(108, np.float32("nan").tobytes())))
    yield Case("files/negative-offset", _changed(_at(108, np.float32(-9e9).tobytes())))
    yield Case("files/bomb.nii.gz", _bomb, RIGHT)
    yield Case("files/pickle.npy", _pickled)
    yield Case("files/claims-much.npy", _claims)
    yield from special_files("files", sound, "data/a/x.npy", but=("folder",))
    yield from damaged("files", sound, "data/a/x.npy", 6)
    yield from damaged("nifti", _sound_scan, "x.nii", 12)
    yield from damaged("nifti-gz", _sound_packed, "x.nii.gz", 6)
