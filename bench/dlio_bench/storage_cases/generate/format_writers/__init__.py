"""Writers of one file of a workload, one for each format; WRITERS names them."""

from collections.abc import Callable
from typing import Final

from dlio_bench.storage_cases.generate.format_writers.folder_writer import write_folder
from dlio_bench.storage_cases.generate.format_writers.hdf5_writer import write_hdf5
from dlio_bench.storage_cases.generate.format_writers.native_writer import write_native
from dlio_bench.storage_cases.generate.format_writers.npz_writer import write_npz
from dlio_bench.storage_cases.generate.format_writers.parquet_writer import write_parquet
from dlio_bench.storage_cases.generate.format_writers.part import FilePart
from dlio_bench.storage_cases.generate.format_writers.tar_writer import write_tar
from dlio_bench.storage_cases.generate.format_writers.tfrecord_writer import write_tfrecord
from dlio_bench.storage_cases.generate.format_writers.zarr_writer import make_store, write_zarr
from dlio_bench.storage_cases.workload import Format

__all__ = ["WRITERS", "FilePart", "make_store"]

WRITERS: Final[dict[Format, Callable[[str, FilePart], None]]] = {
    "folder": write_folder,
    "npz": write_npz,
    "hdf5": write_hdf5,
    "zarr": write_zarr,
    "parquet": write_parquet,
    "tar": write_tar,
    "tfrecord": write_tfrecord,
    "native": write_native,
}
"""Each is called with the path to write, which does not exist, and the samples to write there."""
