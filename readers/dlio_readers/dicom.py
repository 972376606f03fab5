"""DICOM files: their pixels, in the units that their headers give. pydicom reads them.

A file is read as a whole, bounded by its header. Stored values are rescaled to float32 by slope and
intercept: those of a frame, of the frames that share them (an enhanced scan keeps them in its
functional groups), or of the file. An attribute without a value says nothing.

Source: DICOM PS3.3, C.7.6.16 (functional groups), C.11.1 (modality LUT).
"""

import io
import math
import struct
import zlib
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray
from dlio.data.source import File, Source
from dlio.errors import SourceError, UsageError
from dlio.util.decompression_limits import streamed, windowed
from dlio.util.extras import how_to_install
from dlio.util.limits import check_claim, parsing
from dlio.util.printable import tell_once
from dlio.util.units import counted

DICOM_SUFFIXES: Final = (".dcm", ".dicom")
_MAGIC: Final = b"DICM"
_MAGIC_AT: Final = 128
_META: Final = b"\2\0"
"""Number of the group that says how the others are stored."""
_HEAD_BYTES: Final = 1 << 16
_DEFLATED: Final = b"1.2.840.10008.1.2.1.99"
_LONG_TYPES: Final = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"UC", b"UN", b"UR", b"UT")
"""Types of values whose length has four bytes."""
_JPEG_2000: Final = b"\xff\x4f\xff\x51"
_SIZED: Final = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), 0xCD, 0xCE, 0xCF, 0xF7)
"""Markers of JPEG and JPEG-LS that are followed by the sides."""
_DIRECTORY: Final = "DICOMDIR"
"""Names a file that lists others, and has no pixels."""


def may_be_dicom(name: str) -> bool:
    """True for a file's name without a suffix, or of numbers with dots, as scanners give them."""
    stem, dot, ending = name.rpartition(".")
    return name != _DIRECTORY and (not dot or (bool(stem) and ending.isdigit()))


def is_dicom(source: Source, name: str) -> bool:
    """True for a file that says it is DICOM."""
    return source.read(name, _MAGIC_AT, len(_MAGIC)) == _MAGIC


def dicom_array(file: File) -> ChunkedArray:
    """Return the pixels of a DICOM file: (rows, columns), with frames before and samples behind.

    Raises SourceError for damaged files and those that claim more than they hold, UsageError
    without pydicom.
    """
    pydicom = _pydicom(file)
    with parsing(file.name):
        begin = _meta_at(file)
        head = _head_of(file, begin)
        if "Rows" not in head or "Columns" not in head:
            raise SourceError(f"{file.name} is a DICOM file without pixels: leave it out")
        shape, dtype, frames = _shape(head)
    if head.get("PhotometricInterpretation") == "MONOCHROME1":
        tell_once("scans of MONOCHROME1, in which 0 is white, keep their numbers, as in pydicom")
    if min(shape) < 1:
        raise SourceError(f"{file.name} has the shape {shape}: it is damaged; restore it")
    check_claim(math.prod(shape) * dtype.itemsize, file.size, file.name)
    with parsing(file.name):
        slopes, intercepts = _rescaling(head, frames)
        table = _is_present(head, "ModalityLUTSequence")
        plain = bool((slopes == 1).all() and (intercepts == 0).all())
        own = np.dtype(dtype if plain else np.float32)
        if table:
            own = np.dtype(f"u{max(1, int(head.ModalityLUTSequence[0].LUTDescriptor[2]) // 8)}")

    def read(box: Box) -> npt.NDArray[Any]:
        with parsing(file.name):
            whole = pydicom.dcmread(io.BytesIO(file.read()), force=not begin)
            _check_frames(whole, frames, file.name)
            pixels = whole.pixel_array
        if pixels.shape != shape or pixels.dtype.newbyteorder("=") != dtype:
            raise SourceError(
                f"{file.name} holds {pixels.dtype}{list(pixels.shape)}, and its header says "
                f"{dtype}{list(shape)}: restore it"
            )
        part: npt.NDArray[Any] = pixels[box]
        if table:
            with parsing(file.name):
                part = pydicom.pixels.apply_modality_lut(part, whole)
        if table or plain:
            return part.astype(own, copy=False)
        chosen = box[0] if len(slopes) > 1 else slice(0, 1)
        sides = (-1,) + (1,) * (part.ndim - 1)
        slope, intercept = slopes[chosen].reshape(sides), intercepts[chosen].reshape(sides)
        scaled: npt.NDArray[Any] = (part.astype(np.float64) * slope + intercept).astype(own)
        return scaled

    return ChunkedArray(file.name, shape, own, shape, read)


def series_of(file: File) -> str:
    """Return the series that a DICOM file is of, "" if it does not say so. Raises as `dicom_array`,
    of which it reads the header."""
    with parsing(file.name):
        return str(_head_of(file, _meta_at(file)).get("SeriesInstanceUID") or "")


def _head_of(file: File, begin: int) -> Any:
    """Return the tags of a file before its pixels; `begin` is the place of its first group."""
    pydicom = _pydicom(file)
    _check_deflated(file, begin)
    with file.open() as stream:
        short = _ShortReads(stream, file.size)
        return pydicom.dcmread(short, stop_before_pixels=True, force=not begin)


def _pydicom(file: File) -> Any:
    """Return the module. Raises UsageError without it."""
    try:
        import pydicom
    except ImportError as error:
        raise UsageError(
            f"{file.name}: DICOM files need pydicom: {how_to_install('medical', 'pydicom')}"
        ) from error
    return pydicom


class _ShortReads:
    """A stream that takes no memory for bytes that are asked for and are not there."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, count: int = -1) -> bytes:
        """Return a number of bytes, or all up to the end; fewer at the end."""
        left = max(0, self._size - self.tell())
        return self._stream.read(left if count is None or count < 0 else min(count, left))


def _meta_at(file: File) -> int:
    """Return the place of a file's first group, 0 for one without the preamble before it.

    Raises SourceError if there is none.
    """
    head = file.read(0, _MAGIC_AT + len(_MAGIC))
    if head[_MAGIC_AT:] == _MAGIC:
        return len(head)
    if head[:2] == _META and head[4:6].isalpha() and head[4:6].isupper():
        return 0
    raise SourceError(
        f"{file.name} is not a DICOM file, or lacks the header that says how its pixels are "
        "stored: read it with pydicom.dcmread(path, force=True), set file_meta.TransferSyntaxUID, "
        "and write it with save_as(path, enforce_file_format=True)"
    )


def _check_deflated(file: File, begin: int) -> None:
    """Check how much a deflated file becomes: pydicom inflates it as a whole.

    Raises SourceError if that is too much, ValueError if its first group is damaged.
    """
    head = file.read(0, _HEAD_BYTES)
    at, syntax = begin, b""
    # The elements of group 2 are little-endian, with their types.
    while head[at : at + 2] == _META and at + 12 <= len(head):
        is_long = head[at + 4 : at + 6] in _LONG_TYPES
        size = int.from_bytes(
            head[at + 8 : at + 12] if is_long else head[at + 6 : at + 8], "little"
        )
        begin = at + (12 if is_long else 8)
        if head[at + 2 : at + 4] == b"\x10\0":
            syntax = head[begin : begin + size].rstrip(b"\0 ")
        at = begin + size
    if syntax != _DEFLATED:
        return
    done = 0
    try:
        read = windowed(lambda offset, count: file.read(at + offset, count))
        for part in streamed("deflate", read):
            done += len(part)
            check_claim(done, file.size, file.name)
    except (EOFError, zlib.error):
        pass  # pydicom reports it.


def _check_frames(whole: Any, frames: int, name: str) -> None:
    """Raise SourceError if a compressed frame has other sides than the file's header: decoders take
    memory for what it says."""
    if not whole.file_meta.TransferSyntaxUID.is_encapsulated:
        return
    from pydicom.encaps import generate_frames

    for number, frame in enumerate(generate_frames(whole.PixelData, number_of_frames=frames)):
        sides = _coded_sides(frame)
        if sides not in (None, (int(whole.Rows), int(whole.Columns))):
            raise SourceError(
                f"{name}: its frame {number} has {sides} pixels, and its header says "
                f"{(int(whole.Rows), int(whole.Columns))}: restore it"
            )


def _coded_sides(frame: bytes) -> tuple[int, int] | None:
    """Return (rows, columns) of a frame of JPEG, JPEG-LS or JPEG 2000; None for other codecs."""
    if (at := frame[:256].find(_JPEG_2000)) >= 0:
        right, bottom, left, top = struct.unpack_from(">4I", frame, at + 8)
        return bottom - top, right - left
    at = 2
    while frame[:2] == b"\xff\xd8" and at + 9 <= len(frame) and frame[at] == 0xFF:
        if frame[at + 1] in _SIZED:
            rows, columns = struct.unpack_from(">2H", frame, at + 5)
            return rows, columns
        at += 2 + int.from_bytes(frame[at + 2 : at + 4], "big")
    return None


def _shape(head: Any) -> tuple[tuple[int, ...], "np.dtype[Any]", int]:
    """Return (shape, type of the stored values, number of frames)."""
    frames, samples = int(head.get("NumberOfFrames", 1) or 1), int(head.get("SamplesPerPixel", 1))
    shape: tuple[int, ...] = (int(head.Rows), int(head.Columns))
    if frames > 1:
        shape = (frames, *shape)
    if samples > 1:
        shape = (*shape, samples)
    bits = int(head.BitsAllocated)
    # Pixels that are floats have no representation.
    known = {0: "u", 1: "i"}
    kind = known[int(head.PixelRepresentation)] if "PixelRepresentation" in head else "f"
    return shape, np.dtype(f"{kind}{max(1, bits // 8)}"), frames


def _rescaling(head: Any, frames: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return slope and intercept, shape (frames,) if frames have their own and else (1,)."""
    shared = head.get("SharedFunctionalGroupsSequence") or []
    every = _transformation(shared[0]) if len(shared) else None
    groups = head.get("PerFrameFunctionalGroupsSequence") or []
    if len(groups) not in (0, frames):
        raise ValueError(f"{frames} frames have {counted(len(groups), 'functional group')}")
    pairs = [
        (_number(own, "RescaleSlope", 1.0), _number(own, "RescaleIntercept", 0.0))
        for group in groups or [head]
        for own in [_transformation(group) or every or head]
    ]
    slopes, intercepts = np.array(pairs, np.float64).T
    return slopes, intercepts


def _transformation(group: Any) -> Any:
    """Return how a functional group transforms pixels; None if it does not say."""
    items = group.get("PixelValueTransformationSequence") or []
    return items[0] if len(items) else None


def _number(of: Any, name: str, missing: float) -> float:
    return float(of.get(name)) if _is_present(of, name) else missing


def _is_present(of: Any, name: str) -> bool:
    """True for an attribute with a value."""
    value = of.get(name)
    return value is not None and value != "" and not (hasattr(value, "__len__") and not len(value))
