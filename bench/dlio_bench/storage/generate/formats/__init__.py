"""Writers of one file of a workload, one for each format; WRITERS names them."""

from collections.abc import Callable
from typing import Final

from dlio_bench.storage.generate.formats.folder import write_folder
from dlio_bench.storage.generate.formats.npz import write_npz
from dlio_bench.storage.generate.formats.part import Part
from dlio_bench.storage.workload import Format

__all__ = ["WRITERS", "Part"]

WRITERS: Final[dict[Format, Callable[[str, Part], None]]] = {
    "folder": write_folder,
    "npz": write_npz,
}
"""Each is called with the path to write, which does not exist, and the samples to write there."""
