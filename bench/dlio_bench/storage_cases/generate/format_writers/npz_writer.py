"""The writer of .npz files with arrays `x` and `y`, as DLIO's generator names them.

x: uint8, (size, 1, 1) of a single sample, whose last dimension is the sample's number in DLIO;
(samples, size) of several. y: int64, one label for each sample.
"""

import numpy as np

from dlio_bench.storage_cases.generate.format_writers.part import FilePart


def write_npz(path: str, part: FilePart) -> None:
    """Write a file without compression."""
    rows = list(part.payloads())
    x = rows[0].reshape(-1, 1, 1) if len(rows) == 1 else np.stack(rows)
    with open(path, "xb") as file:
        np.savez(file, x=x, y=np.full(len(rows), part.label, np.int64))
