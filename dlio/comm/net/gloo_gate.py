"""Gloo's listener, closed to everybody while no group of ranks is being made.

Gloo keeps every connection that anybody opens, for ever, and aborts the process when it has no
descriptor left. It needs its listener only while it connects the ranks of a group. In between, a
filter of the kernel drops what arrives there: nobody gets a connection, and nothing is held.
"""

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist

from dlio.comm.net.address import making_listeners

_ATTACH: Final = 26
"""SO_ATTACH_FILTER."""
_DETACH: Final = 27
"""SO_DETACH_FILTER."""
_RETURN_ZERO: Final = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: BPF_RET, keep no byte of a packet."""
_LAZY: Final = "TORCH_GLOO_LAZY_INIT"
"""Variable by which gloo connects ranks later, at their first exchange."""


class GlooGate:
    """A device of gloo, and its listener at an address. Thread-safe."""

    def __init__(self, address: str) -> None:
        gloo: Any = dist.ProcessGroupGloo
        with making_listeners:
            before = _listeners(address)
            self.device = gloo.create_device(hostname=address)
            # gloo tells nobody which socket it listens at: it is the one that was not there before.
            new = _listeners(address).items() - before.items()
        self._lock = threading.Lock()
        self._open = 0
        # With lazy connections, ranks call at any time, and the gate has to stay open.
        self._inodes = [] if os.environ.get(_LAZY, "0") not in ("", "0") else [i for i, _ in new]
        self._set_filter()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let ranks in for a while."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, number: int) -> None:
        with self._lock:
            self._open += number
            self._set_filter()

    def _set_filter(self) -> None:
        """Attach or detach the filter, where the kernel knows such filters."""
        # A gate that is being made has duplicates of all sockets for a moment: a number that is
        # found now would be another socket's soon.
        with making_listeners:
            ours = {inode: number for inode, number in _sockets() if inode in self._inodes}
            for number in ours.values():
                with contextlib.suppress(OSError), _borrowed(number) as listener:
                    if self._open:
                        listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
                    else:
                        program = ctypes.create_string_buffer(_RETURN_ZERO, len(_RETURN_ZERO))
                        filters = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
                        listener.setsockopt(socket.SOL_SOCKET, _ATTACH, filters)


def _listeners(address: str) -> dict[int, int]:
    """Return this process's sockets that listen at an address: inode and descriptor."""
    listening = {}
    for inode, number in _sockets():
        with contextlib.suppress(OSError), _borrowed(number) as each:
            if (
                each.family == socket.AF_INET
                and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and each.getsockname()[0] == address
            ):
                listening[inode] = number
    return listening


def _sockets() -> list[tuple[int, int]]:
    """Return inode and descriptor of each socket of this process."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.append((status.st_ino, int(name)))
    return sockets


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket of a descriptor, which stays open."""
    # A duplicate: closing Python's object must not close gloo's listener.
    with socket.socket(fileno=os.dup(number)) as own:
        yield own
