"""Medical images, one a file: NIfTI, as it is or gzipped, and DICOM; their headers are read first.

A NIfTI file is read in place, a gzipped one or a DICOM file as a whole, bounded by its header.
Intensities are scaled as the header says, to float32; the other headers' fields are not read.
"""

import io
import math
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray
from dlio.data.schema import MAX_PAYLOAD
from dlio.data.source import File, own_name
from dlio.errors import SourceError, UsageError
from dlio.util.extras import how_to_install
from dlio.util.limits import check_claim, parsing
from dlio_readers.columns import storable
from dlio_readers.ranges import ranged_array

NIFTI_SUFFIXES: Final = (".nii", ".nii.gz")
DICOM_SUFFIXES: Final = (".dcm", ".dicom")
_HEAD_BYTES: Final = 540
"""Of the longer header, NIfTI-2's."""
_PACKED_HEAD: Final = 1 << 16


def nifti_array(file: File) -> ChunkedArray:
    """Return the image of a NIfTI-1 or -2 file, dimensions as the header has them (x, y, z, ...).

    Raises SourceError for damaged files and those that claim more than they hold, UsageError
    without nibabel.
    """
    try:
        from nibabel.nifti1 import Nifti1Header
        from nibabel.nifti2 import Nifti2Header
    except ImportError as error:
        raise UsageError(
            f"{file.name}: NIfTI files need nibabel: {how_to_install('medical', 'nibabel')}"
        ) from error
    packed = own_name(file.name).endswith(".gz")
    data = file.read(0, _PACKED_HEAD if packed else _HEAD_BYTES)
    with parsing(file.name):
        if packed:
            data = _inflated(data, _HEAD_BYTES, file.name)
        sizes = [int.from_bytes(data[:4], order) for order in ("little", "big")]
        kind, size = (Nifti2Header, 540) if 540 in sizes else (Nifti1Header, 348)
        if size not in sizes or len(data) < size:
            raise SourceError(f"{file.name} is not a NIfTI file, or is cut off: restore it")
        head = kind(data[:size], check=False)
        shape, dtype = tuple(map(int, head.get_data_shape())), np.dtype(head.get_data_dtype())
        offset, (slope, inter) = int(head.get_data_offset()), head.get_slope_inter()
    if not storable(dtype) or min(shape, default=0) < 1 or offset < 0:
        raise SourceError(f"{file.name} is {dtype}{list(shape)}, which samples cannot have")
    # Whole numbers of Python, which do not overflow.
    wanted = offset + math.prod(shape) * dtype.itemsize
    scale = (1.0, 0.0) if slope is None else (float(slope), float(inter or 0.0))
    plain = scale == (1.0, 0.0)
    own = np.dtype(dtype.newbyteorder("=") if plain else np.float32)
    if packed:
        check_claim(wanted, file.size, file.name)
        if wanted > MAX_PAYLOAD:
            raise SourceError(f"{file.name} becomes {wanted} bytes, over 2 GiB: store it as .nii")

        def unpacked(box: Box) -> npt.NDArray[Any]:
            raw = _inflated(file.read(), wanted, file.name)
            if len(raw) < wanted:
                raise SourceError(f"{file.name} is cut off: {len(raw)} bytes, not {wanted}")
            whole = np.frombuffer(raw, dtype, math.prod(shape), offset).reshape(shape, order="F")
            return _scaled(whole[box], scale, own)

        return ChunkedArray(file.name, shape, own, shape, unpacked)
    if wanted > file.size:
        raise SourceError(f"{file.name} is cut off: {file.size} bytes instead of {wanted}")
    stored = ranged_array(file, file.name, offset, shape, dtype, fortran=True)

    def scaled(box: Box) -> npt.NDArray[Any]:
        return _scaled(stored.read(box), scale, own)

    return ChunkedArray(file.name, shape, own, stored.chunks, scaled)


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
        shape, dtype = _dicom_shape(head)
        scale = (float(head.get("RescaleSlope", 1)), float(head.get("RescaleIntercept", 0)))
    own = np.dtype(dtype if scale == (1.0, 0.0) else np.float32)
    if min(shape) < 1:
        raise SourceError(f"{file.name} has the shape {shape}: it is damaged; restore it")
    check_claim(math.prod(shape) * dtype.itemsize, file.size, file.name)

    def read(box: Box) -> npt.NDArray[Any]:
        with parsing(file.name):
            pixels = pydicom.dcmread(io.BytesIO(file.read())).pixel_array
        if pixels.shape != shape or pixels.dtype != dtype:
            raise SourceError(
                f"{file.name} holds {pixels.dtype}{list(pixels.shape)}, and its header says "
                f"{dtype}{list(shape)}: restore it"
            )
        return _scaled(pixels[box], scale, own)

    return ChunkedArray(file.name, shape, own, shape, read)


def _dicom_shape(head: Any) -> tuple[tuple[int, ...], "np.dtype[Any]"]:
    frames, samples = int(head.get("NumberOfFrames", 1) or 1), int(head.get("SamplesPerPixel", 1))
    shape: tuple[int, ...] = (int(head.Rows), int(head.Columns))
    if frames > 1:
        shape = (frames, *shape)
    if samples > 1:
        shape = (*shape, samples)
    bits = int(head.BitsAllocated)
    kind = "i" if int(head.PixelRepresentation) else "u"
    return shape, np.dtype(f"{kind}{max(1, bits // 8)}")


def _scaled(
    part: npt.NDArray[Any], scale: tuple[float, float], own: "np.dtype[Any]"
) -> npt.NDArray[Any]:
    """Scale stored values, unless they are as they are meant."""
    if scale == (1.0, 0.0):
        return part.astype(own, copy=False)
    slope, inter = scale
    return (part.astype(np.float64) * slope + inter).astype(own)


def _inflated(data: bytes, most: int, name: str) -> bytes:
    """Return up to `most` bytes of gzipped data, of one member or several. Raises SourceError."""
    out = bytearray()
    try:
        while data and len(out) < most:
            one = zlib.decompressobj(wbits=31)
            out += one.decompress(data, most - len(out))
            data = one.unused_data
    except zlib.error as error:
        raise SourceError(f"{name} is not gzipped, or is damaged: {error}; restore it") from error
    return bytes(out)
