"""Writers of one file of a workload, one for each format; WRITERS names them."""

from collections.abc import Callable
from typing import Final

from dlio_bench.storage.generate.formats.folder import write_folder
from dlio_bench.storage.generate.formats.hdf5 import write_hdf5
from dlio_bench.storage.generate.formats.native import write_native
from dlio_bench.storage.generate.formats.npz import write_npz
from dlio_bench.storage.generate.formats.parquet import write_parquet
from dlio_bench.storage.generate.formats.part import Part
from dlio_bench.storage.generate.formats.tar import write_tar
from dlio_bench.storage.generate.formats.tfrecord import write_tfrecord
from dlio_bench.storage.generate.formats.zarr import make_store, write_zarr
from dlio_bench.storage.workload import Format

__all__ = ["WRITERS", "Part", "make_store"]

WRITERS: Final[dict[Format, Callable[[str, Part], None]]] = {
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
