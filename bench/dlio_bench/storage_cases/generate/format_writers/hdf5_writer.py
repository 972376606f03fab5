"""The writer of HDF5 files with data sets `records_0` and `labels`, as DLIO's generator names them.

records_0: uint8, (1, size, 1) of a single sample; (samples, size, 1) of several. labels: int64.
"""

import h5py
import numpy as np

from dlio_bench.storage_cases.generate.format_writers.part import FilePart


def write_hdf5(path: str, part: FilePart) -> None:
    """Write a file, contiguous and without filters, one sample at a time."""
    with h5py.File(path, "x", libver="latest") as file:
        shape = (len(part.sizes), int(part.sizes[0]), 1)
        records = file.create_dataset("records_0", shape, np.uint8)
        for row, data in enumerate(part.payloads()):
            records[row] = data[:, np.newaxis]
        file.create_dataset("labels", data=np.full(len(part.sizes), part.label, np.int64))
