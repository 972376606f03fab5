"""Detect whether MPI can sum GPU memory without blocking.

Open MPI cannot, CUDA-aware or not: its non-blocking reductions take host memory only, and its
blocking ones copy through the host. Other libraries advertise it through `mpi_memory_alloc_kinds`
(MPI 4.1) or, in MPICH and its derivatives, MPIX_Query_cuda_support. DLIO_CUDA_AWARE=1 or 0
overrides the detection. Tested with Open MPI only.
"""

import ctypes
import sys
from collections.abc import Callable

from dlio.util.settings import settings


def sums_device_memory() -> bool:
    """True if this process's MPI sums GPU memory. All ranks that use one library agree.

    Raises UsageError where DLIO_CUDA_AWARE is neither 0 nor 1.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return False
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return supports_device_buffers(
        settings().cuda_aware, mpi.Get_library_version(), kinds, _query_cuda_support
    )


def supports_device_buffers(
    override: bool | None, library: str, kinds: str, query: Callable[[], bool]
) -> bool:
    """Decide from DLIO_CUDA_AWARE (None when unset), the library's name, the comma-separated memory
    kinds that it lists, and MPIX_Query_cuda_support or a stand-in.
    """
    if override is not None:
        return override
    if library.startswith("Open MPI"):
        return False
    return any(kind.partition(":")[0] == "cuda" for kind in kinds.split(",")) or bool(query())


def _query_cuda_support() -> bool:
    """The library's answer to MPIX_Query_cuda_support; False if it lacks the function."""
    return any(
        bool(library.MPIX_Query_cuda_support())
        for library in loaded_libraries()
        if hasattr(library, "MPIX_Query_cuda_support")
    )


def loaded_libraries() -> list[ctypes.CDLL]:
    """MPI libraries mapped into this process; empty where /proc is not readable."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "libmpi" in line}
        return [ctypes.CDLL(path) for path in sorted(mapped)]
    except OSError:
        return []
