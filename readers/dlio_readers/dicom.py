"""DICOM files: their pixels, in the units that their headers give. pydicom reads them.

A file is read as a whole, bounded by its header. Stored values are rescaled to float32 by slope and
intercept: those of a frame, of the frames that share them (an enhanced scan keeps them in its
functional groups), or of the file. An attribute without a value says nothing.

Source: DICOM PS3.3, C.7.6.16 (functional groups), C.11.1 (modality LUT).
"""

import io
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray
from dlio.data.source import File, Source
from dlio.errors import SourceError, UsageError
from dlio.util.extras import how_to_install
from dlio.util.limits import check_claim, parsing

DICOM_SUFFIXES: Final = (".dcm", ".dicom")
_MAGIC: Final = b"DICM"
_MAGIC_AT: Final = 128
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
    try:
        import pydicom
    except ImportError as error:
        raise UsageError(
            f"{file.name}: DICOM files need pydicom: {how_to_install('medical', 'pydicom')}"
        ) from error

    with parsing(file.name):
        with file.open() as stream:
            head = pydicom.dcmread(stream, stop_before_pixels=True)
        if "Rows" not in head or "Columns" not in head:
            raise SourceError(f"{file.name} is a DICOM file without pixels: leave it out")
        shape, dtype, frames = _shape(head)
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
            whole = pydicom.dcmread(io.BytesIO(file.read()))
            pixels = whole.pixel_array
        if pixels.shape != shape or pixels.dtype != dtype:
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
        raise ValueError(f"{frames} frames have {len(groups)} functional groups")
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
