"""Commands on tables of very many rows."""

import io
import os
import tracemalloc
from pathlib import Path

import numpy as np

from dlio.cli.ls import describe

_ROWS = 20_000_000


def test_rows_without_labels_take_no_memory_to_be_described(tmp_path: Path) -> None:
    head = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (_ROWS, 4)}
    np.lib.format.write_array_header_1_0(head, about)
    path = tmp_path / "x.npy"
    path.write_bytes(head.getvalue())
    os.truncate(path, len(head.getvalue()) + 4 * _ROWS)
    describe(str(path))
    tracemalloc.start()
    try:
        said = describe(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said["samples"] == _ROWS
    assert said["classes"] == {}
    assert peak < _ROWS
