"""Whether MPI sums what lies in a GPU's memory, without blocking.

Open MPI, CUDA-aware or not, does not: its non-blocking reductions take host memory only, and its
blocking ones copy through the host. Others tell: by `mpi_memory_alloc_kinds` (MPI 4.1), or by
MPICH's and its relatives' MPIX_Query_cuda_support. Who knows better says so by DLIO_CUDA_AWARE=1
or 0. Tried with Open MPI only.
"""

import ctypes
import sys
from collections.abc import Callable

from dlio.util.settings import settings


def sums_device_memory() -> bool:
    """Of this process's MPI, which is initialised. The same on all ranks of one library.

    Raises UsageError where DLIO_CUDA_AWARE is neither 0 nor 1.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return False
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return told(settings().cuda_aware, mpi.Get_library_version(), kinds, _asked)


def told(override: bool | None, library: str, kinds: str, asked: Callable[[], bool]) -> bool:
    """What follows from all that can be known.

    Args:
        override: DLIO_CUDA_AWARE.
        library: what MPI calls itself.
        kinds: of memory, with commas between, as MPI lists them.
        asked: MPIX_Query_cuda_support, or what stands for it.
    """
    if override is not None:
        return override
    if library.startswith("Open MPI"):
        return False
    return any(kind.partition(":")[0] == "cuda" for kind in kinds.split(",")) or bool(asked())


def _asked() -> bool:
    """What the library answers; False where it has not heard of the question."""
    return any(
        bool(library.MPIX_Query_cuda_support())
        for library in loaded_libraries()
        if hasattr(library, "MPIX_Query_cuda_support")
    )


def loaded_libraries() -> list[ctypes.CDLL]:
    """The MPI libraries of this process; none where that cannot be told."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "libmpi" in line}
        return [ctypes.CDLL(path) for path in sorted(mapped)]
    except OSError:
        return []
