"""Sizes and bytes of a workload's samples, each from the seed and its own number. Pure."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio_bench.storage_cases.workload import Workload

ARRAYS: Final = ("npz", "hdf5", "zarr")
"""Formats of arrays; in the others a sample is a string of bytes."""
LEAST_BYTES: Final = 64
"""Bytes of the smallest sample: an image needs a header."""
_SIZES: Final = 1 << 63
"""Number of the stream of random numbers that sizes come from; samples are numbered from 0."""
_HEADER_ROOM: Final = 32
_SMALLEST: Final = 8
"""Normal sizes are within 1/8 and 15/8 of their mean: none is negative, and the mean is kept."""


def sample_sizes(workload: Workload) -> npt.NDArray[np.int64]:
    """Return the bytes of each sample; shape (samples,).

    Arrays with several samples in a file have rows of the same size.
    """
    mean, stdev = workload.sample_bytes, workload.sample_bytes_stdev
    count = workload.samples
    if mean < LEAST_BYTES:
        raise UsageError(
            f"workload {workload.name}: samples of {mean:g} bytes are too small: set "
            f"dataset.record_length_bytes to {LEAST_BYTES} or more"
        )
    one_size = workload.format == "zarr" or (
        workload.format in ARRAYS and workload.samples_per_file > 1
    )
    if one_size and stdev:
        raise UsageError(
            f"workload {workload.name}: rows of {workload.format} have one size: set "
            "dataset.record_length_bytes_stdev to 0, or choose another format"
        )
    if not stdev:
        # One number in memory, however many samples there are.
        return np.broadcast_to(np.int64(round(mean)), count)
    generator = np.random.Generator(_stream(workload.seed, _SIZES))
    if workload.distribution == "lognormal":
        variance = np.log1p((stdev / mean) ** 2)
        drawn = generator.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
    else:
        drawn = generator.normal(mean, stdev, count)
        while (outside := np.abs(drawn - mean) > mean * (1 - 1 / _SMALLEST)).any():
            drawn[outside] = generator.normal(mean, stdev, int(outside.sum()))
    return np.maximum(np.rint(drawn), LEAST_BYTES).astype(np.int64)


def payload(workload: Workload, sample: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a sample, which cannot be compressed; shape (size,)."""
    generator = np.random.Generator(_stream(workload.seed, sample))
    words = -(-size // 8)
    drawn = generator.integers(0, 2**64 - 1, words, np.uint64, endpoint=True)
    data = drawn.astype("<u8", copy=False).view(np.uint8)[:size]
    if workload.format == "folder":
        header = _image_header(size)
        data[: len(header)] = np.frombuffer(header, np.uint8)
    return data


def _image_header(size: int) -> bytes:
    """Return the header of a PPM image, whose pixels are stored as they are, of nearly `size`
    bytes. Decoding it copies the pixels and takes no other time."""
    side = math.isqrt((size - _HEADER_ROOM) // 3)
    return b"P6\n%d %d\n255\n" % (side, (size - _HEADER_ROOM) // (3 * side))


def _stream(seed: int, number: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed % 2**64, number], np.uint64))
