"""Messages and bytes that the MPI library has sent, by Open MPI's own monitoring.

It also counts the messages of collectives, which their callers cannot see. It counts messages as
the point-to-point layer gets them, without the pieces and the handshakes that a transport makes of
them, and is there when the ranks were started with ENVIRONMENT.
"""

import ctypes
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.comm.devices import loaded_libraries

ENVIRONMENT: Final = {"OMPI_MCA_pml_monitoring_enable": "1"}
_COUNT: Final = "pml_monitoring_messages_count"
_SIZE: Final = "pml_monitoring_messages_size"
_CLASS_SIZE: Final = 2
"""MPI_T_PVAR_CLASS_SIZE in Open MPI."""
_THREAD_MULTIPLE: Final = 3


class Monitor:
    """This rank's counters. Made in MPI, once; they last as long as the process."""

    def __init__(self) -> None:
        """Raises OSError where the library has no such counters, or does not count."""
        from mpi4py import MPI

        self._library = _loaded()
        provided = ctypes.c_int()
        _check(self._library.MPI_T_init_thread(_THREAD_MULTIPLE, ctypes.byref(provided)))
        world = ctypes.c_void_p.from_address(MPI._addressof(MPI.COMM_WORLD))
        self._counters = [_Counter(self._library, name, world) for name in (_COUNT, _SIZE)]

    def read(self) -> tuple[int, int]:
        """Messages and bytes that this rank has sent since its counters were made."""
        messages, size = (int(each.read().sum()) for each in self._counters)
        return messages, size


class _Counter:
    """A variable of MPI's tool interface, a number for each rank."""

    def __init__(self, library: ctypes.CDLL, name: str, world: ctypes.c_void_p) -> None:
        self._library = library
        index, length = ctypes.c_int(), ctypes.c_int()
        status = library.MPI_T_pvar_get_index(name.encode(), _CLASS_SIZE, ctypes.byref(index))
        _check(status)
        self._session, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        _check(library.MPI_T_pvar_session_create(ctypes.byref(self._session)))
        handle = ctypes.byref(self._handle)
        where = ctypes.byref(world), handle, ctypes.byref(length)
        _check(library.MPI_T_pvar_handle_alloc(self._session, index, *where))
        self._length = length.value
        library.MPI_T_pvar_start(self._session, self._handle)  # Those that always count say no.

    def read(self) -> npt.NDArray[np.uint64]:
        values = np.zeros(self._length, np.uint64)
        pointer = ctypes.c_void_p(values.ctypes.data)
        _check(self._library.MPI_T_pvar_read(self._session, self._handle, pointer))
        return values


def _check(code: int) -> None:
    if code:
        raise OSError(f"the MPI library does not count messages (MPI_T error {code})")


def _loaded() -> ctypes.CDLL:
    """The MPI library of this process."""
    for library in loaded_libraries():
        if hasattr(library, "MPI_T_pvar_read"):
            return library
    raise OSError("no MPI library is loaded: messages are counted under Open MPI only")
