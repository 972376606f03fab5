"""Scans: DICOM, NIfTI of several members, OME-Zarr."""

import gzip
import json
import struct
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import zarr

from tests.hostile.corpus.arrayfiles import scan
from tests.hostile.corpus.case import ANY, ERROR, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, nonsense, special_files

_PLAIN: Final = b"1.2.840.10008.1.2.1"
_DEFLATED: Final = b"1.2.840.10008.1.2.1.99"
_JPEG: Final = b"1.2.840.10008.1.2.4.50"
_JPEG_2000: Final = b"1.2.840.10008.1.2.4.90"
_RLE: Final = b"1.2.840.10008.1.2.5"
_SIDE: Final = 8


def _element(
    group: int, element: int, kind: bytes, value: bytes, claim: int | None = None
) -> bytes:
    size = len(value) if claim is None else claim
    if kind in (b"OB", b"OW", b"SQ", b"UN", b"UT"):
        head = struct.pack("<HH2sHI", group, element, kind, 0, size & 0xFFFFFFFF)
    else:
        head = struct.pack("<HH2sH", group, element, kind, size & 0xFFFF)
    return head + value


def _number(element: int, value: int) -> bytes:
    return _element(0x28, element, b"US", struct.pack("<H", value & 0xFFFF))


def _meta(syntax: bytes) -> bytes:
    padded = syntax + b"\0" * (len(syntax) % 2)
    rows = _element(2, 0x10, b"UI", padded)
    size = _element(2, 0, b"UL", struct.pack("<I", len(rows)))
    return bytes(128) + b"DICM" + size + rows


def _body(pixels: bytes = bytes(2 * _SIDE * _SIDE), more: bytes = b"", **changes: int) -> bytes:
    about = {"rows": _SIDE, "columns": _SIDE, "bits": 16, "sign": 0, "samples": 1, **changes}
    return (
        _number(0x02, about["samples"])
        + _element(0x28, 0x04, b"CS", b"MONOCHROME2 ")
        + (_element(0x28, 0x08, b"IS", b"%d " % about["frames"]) if "frames" in about else b"")
        + _number(0x10, about["rows"])
        + _number(0x11, about["columns"])
        + _number(0x100, about["bits"])
        + _number(0x101, about["bits"])
        + _number(0x102, about["bits"] - 1)
        + _number(0x103, about["sign"])
        + more
        + pixels
    )


def _pixels(data: bytes = bytes(2 * _SIDE * _SIDE), claim: int | None = None) -> bytes:
    return _element(0x7FE0, 0x10, b"OW", data, claim)


def _frames(*frames: bytes) -> bytes:
    """Compressed frames, each in an item."""
    items = b"".join(
        struct.pack("<HHI", 0xFFFE, 0xE000, len(each)) + each
        for each in (b"", *(each + b"\0" * (len(each) % 2) for each in frames))
    )
    end = struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    return _element(0x7FE0, 0x10, b"OB", items + end, 0xFFFFFFFF)


def _written(data: bytes, name: str = "x.dcm") -> Make:
    def make(folder: Path) -> Ask:
        (folder / name).write_bytes(data)
        return Ask("reader", str(folder / name))

    return make


sound = _written(_meta(_PLAIN) + _body(_pixels()))


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


deflated = _written(_meta(_DEFLATED) + _deflate(_body(_pixels())))


def _bomb(folder: Path) -> Ask:
    """A deflated file that becomes 700 MiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    parts = [packer.compress(_body(_pixels(b"", 700 << 20)))]
    parts += [packer.compress(bytes(1 << 20)) for _ in range(700)]
    return _written(_meta(_DEFLATED) + b"".join(parts) + packer.flush())(folder)


def _sequence(depth: int) -> bytes:
    """Sequences within each other, of unknown length."""
    open_ = struct.pack("<HH2sHI", 8, 0x1115, b"SQ", 0, 0xFFFFFFFF)
    item = struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)
    return (open_ + item) * depth


def _sides(marker: bytes, rows: int, columns: int) -> bytes:
    return b"\xff\xd8\xff" + marker + struct.pack(">HBHHB", 8, 8, rows, columns, 1) + bytes(3)


def _image_2000(rows: int, columns: int) -> bytes:
    return b"\xff\x4f\xff\x51" + struct.pack(">HH4I", 41, 0, columns, rows, 0, 0) + bytes(40)


def _dicom_cases() -> Cases:
    yield Case("dicom/sound", sound, RIGHT, "1 samples")
    yield Case("dicom/sound-deflated", deflated, RIGHT, "1 samples")
    yield Case("dicom/bomb", _bomb)
    yield from special_files("dicom", sound, "x.dcm", but=("folder",))
    yield from damaged("dicom", sound, "x.dcm", 36)
    yield from damaged("dicom-deflated", deflated, "x.dcm", 18)
    for name, changes in {
        "rows-many": {"rows": 65535, "columns": 65535},
        "rows-none": {"rows": 0},
        "frames-many": {"frames": 2**30},
        "frames-negative": {"frames": -5},
        "bits-odd": {"bits": 12},
        "bits-none": {"bits": 0},
        "bits-many": {"bits": 4096},
        "sign": {"sign": 7},
        "samples": {"samples": 9},
    }.items():
        yield Case(f"dicom/{name}", _written(_meta(_PLAIN) + _body(_pixels(), b"", **changes)))
    for name, more in {
        "deep": _sequence(5000),
        "long": _element(8, 0x16, b"UT", b"", 2**31),
        "elements": b"".join(_element(9, k, b"LO", b"") for k in range(0x1000, 0x9000)),
        "unknown-type": struct.pack("<HH2sHI", 9, 1, b"ZZ", 0, 2**31),
        "slope": _element(0x28, 0x1053, b"DS", b"1e999 "),
        "slope-text": _element(0x28, 0x1053, b"DS", b"abc "),
        "slope-long": _element(0x28, 0x1053, b"DS", b"9" * 5000),
        "table": _element(0x28, 0x3000, b"SQ", b""),
    }.items():
        yield Case(f"dicom/{name}", _written(_meta(_PLAIN) + _body(_pixels(), more)), ANY)
    yield Case("dicom/pixels-short", _written(_meta(_PLAIN) + _body(_pixels(bytes(5)))))
    yield Case("dicom/pixels-claim", _written(_meta(_PLAIN) + _body(_pixels(b"", 2**31))))
    yield Case("dicom/meta-none", _written(bytes(128) + b"DICM"))
    yield Case("dicom/meta-claim", _written(_meta(_PLAIN)[:140] + b"\xff" * 8))
    yield Case("dicom/empty-body", _written(_meta(_PLAIN)))
    yield Case("dicom/syntax-unknown", _written(_meta(b"1.2.3.4") + _body(_pixels())), ANY)
    codings = {"jpeg": _JPEG, "j2k": _JPEG_2000, "rle": _RLE}
    frames = {
        "none": b"",
        "large": _sides(b"\xc0", 60000, 60000),
        "large-2000": _image_2000(2**31 - 1, 2**31 - 1),
        "rle": struct.pack("<16I", 15, *[64] * 15) + bytes(64),
        "rle-many": struct.pack("<16I", 2**32 - 1, *[64] * 15) + bytes(64),
    }
    for coding, syntax in codings.items():
        for name, frame in frames.items():
            body = _meta(syntax) + _body(_frames(frame))
            yield Case(f"dicom/{coding}-{name}", _written(body))
        body = _meta(syntax) + _body(_frames(*[b"x"] * 5000), frames=5000)
        yield Case(f"dicom/{coding}-frames", _written(body))
        yield Case(f"dicom/{coding}-cut", _written(_meta(syntax) + _body(_frames(b"x" * 50))[:-70]))


def packed(folder: Path) -> Ask:
    """A scan of many members of gzip."""
    data = bytes(scan())
    parts = [gzip.compress(data[k : k + 50]) for k in range(0, len(data), 50)]
    (folder / "x.nii.gz").write_bytes(b"".join(parts))
    return Ask("reader", str(folder / "x.nii.gz"))


def _members(count: int, tail: bytes = b"") -> Make:
    def make(folder: Path) -> Ask:
        empty = gzip.compress(b"")
        data = gzip.compress(bytes(scan())[:400]) + empty * count
        (folder / "x.nii.gz").write_bytes(data + gzip.compress(bytes(scan())[400:]) + tail)
        return Ask("reader", str(folder / "x.nii.gz"))

    return make


def _nifti_cases() -> Cases:
    yield Case("nifti-gz/members", packed, RIGHT, "1 samples")
    yield Case("nifti-gz/members-empty", _members(100_000), RIGHT, "1 samples")
    yield Case("nifti-gz/zeros", _members(3, bytes(10 << 20)), RIGHT, "1 samples")
    yield Case("nifti-gz/tail", _members(3, b"tail" * 100), RIGHT, "1 samples")
    yield from damaged("nifti-gz-members", packed, "x.nii.gz", 12)


def _image(folder: Path) -> Path:
    """An image of OME-Zarr 0.4 with a mask."""
    path = folder / "x.ome.zarr"
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    level = root.create_array("0", shape=(3, 8, 8), chunks=(1, 8, 8), dtype="uint8")
    level[:] = np.arange(192, dtype=np.uint8).reshape(3, 8, 8)
    mask = root.create_group("labels").create_group("cells")
    mask.create_array("0", shape=(3, 8, 8), chunks=(1, 8, 8), dtype="uint8")[:] = 1
    scales: Any = [
        {"version": "0.4", "datasets": [{"path": "0"}], "axes": [{"name": n} for n in "zyx"]}
    ]
    root.attrs["multiscales"] = scales
    mask.attrs["multiscales"] = scales
    root["labels"].attrs["labels"] = ["cells"]
    return path


def ome(folder: Path) -> Ask:
    """An image of OME-Zarr."""
    return Ask("reader", str(_image(folder)))


def _about(value: Any, where: str = ".zattrs") -> Make:
    def make(folder: Path) -> Ask:
        path = _image(folder)
        text = value if isinstance(value, str) else json.dumps(value)
        (path / where).write_text(text)
        return Ask("reader", str(path))

    return make


def _scales(path: object) -> dict[str, Any]:
    return {"multiscales": [{"datasets": [{"path": path}]}]}


def _ome_cases() -> Cases:
    yield Case("ome-zarr/sound", ome, RIGHT)
    files = ("x.ome.zarr/.zattrs", "x.ome.zarr/0/.zarray", "x.ome.zarr/labels/.zattrs")
    for file in files:
        yield from damaged("ome-zarr", ome, file, 8)
        yield from nonsense("ome-zarr", ome, file, 8)
    for name, value in {
        "up": _scales("../0"),
        "root": _scales("/etc"),
        "number": _scales(5),
        "list": _scales(["0"]),
        "missing": _scales("9"),
        "self": _scales("."),
        "empty": _scales(""),
        "group": _scales("labels"),
        "none": {"multiscales": []},
        "text": {"multiscales": "abc"},
        "plate": {"plate": {"wells": [{"path": "../.."}]}},
        "plate-many": {"plate": {"wells": [{"path": "A/1"}] * 100_000}},
        "wells-deep": {"plate": {"wells": [{"path": "labels"}]}, "well": {"images": []}},
        "json": "{" * 50_000,
        "escapes": _scales("\x1b[31m"),
    }.items():
        yield Case(f"ome-zarr/{name}", _about(value), ERROR)
    yield Case("ome-zarr/labels-up", _about({"labels": ["../.."]}, "labels/.zattrs"))
    yield Case("ome-zarr/labels-many", _about({"labels": ["cells"] * 9999}, "labels/.zattrs"), ANY)


def cases() -> Cases:
    """Return the cases of these formats."""
    yield from _dicom_cases()
    yield from _nifti_cases()
    yield from _ome_cases()
