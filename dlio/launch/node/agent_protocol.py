"""Names of the files and sockets of a job on one node, and the messages that pass through them.

    /dev/shm/dlio-<uid>/job-<token>.<node>/     private (0700); gone with the job
        zygote          socket that shims connect to
        keeper          socket that takes locks which outlive ranks
        done-<start>    exit code that ranks leave at their end
        mpi-<start>/    shared memory of Open MPI
        paused-<start>  time when all ranks had paused, to be started again among others
    state/          snapshots

Node names are part of the folder's name: nodes may be pretended on one machine.
"""

import array
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from dlio.util.shared_folders import SHARED_MEMORY, user_folder

ZYGOTE: Final = "zygote"
KEEPER: Final = "keeper"
BEAT_S: Final = 0.5
"""Seconds between two signs of life of an agent, and of the launcher."""
PAUSED: Final = "paused-"
"""Beginning of a file's name; the number of the start follows."""
STATE: Final = "state"
Message: TypeAlias = dict[str, Any]
"""A message between processes of one job, as JSON."""
_LENGTH: Final = struct.Struct("<q")


class PeerSilence:
    """For how long the other side has given no sign of life, as far as this process can know.

    A machine may stand still as a whole, with both sides on it or with this one alone: a virtual
    one that is moved does for many seconds. Nobody has been silent by then, so what lies between
    two looks counts as one beat at most. `looked` is to be called several times a beat, after the
    signs that have come were read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._silent_s = clock, clock(), 0.0

    def heard(self) -> None:
        """Note a sign of life."""
        self._last, self._silent_s = self._clock(), 0.0

    def looked(self) -> float:
        """Note a look, and return the seconds of silence."""
        now = self._clock()
        self._silent_s += min(now - self._last, BEAT_S)
        self._last = now
        return self._silent_s


def folder_name(token: str, node: str) -> str:
    """Return the name of a job's folder on a node, as `SharedFolder` takes it."""
    return f"job-{token}.{node}"


def job_folder(token: str, node: str) -> str:
    """Return the usual path of a job's folder on a node, for its shims, which look for another."""
    return os.path.join(SHARED_MEMORY, user_folder(), folder_name(token, node))


def pack(message: Mapping[str, object]) -> bytes:
    """Return a message with its length in front."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def receive_exactly(connection: socket.socket, count: int = 0) -> tuple[Message, list[int]]:
    """Receive a message that `pack` made, and at most `count` descriptors.

    Raises EOFError if the other side is gone, OSError after the socket's timeout.
    """
    descriptors: list[int] = []
    head, body = b"", b""
    try:
        while len(head) < _LENGTH.size:
            piece, parts, *_ = connection.recvmsg(
                _LENGTH.size - len(head), socket.CMSG_SPACE(4 * count)
            )
            for level, kind, data in parts:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                    descriptors += numbers
            if not piece:
                raise EOFError("the other side is gone")
            head += piece
        (length,) = _LENGTH.unpack(head)
        while len(body) < length:
            piece = connection.recv(length - len(body))
            if not piece:
                raise EOFError("the other side is gone")
            body += piece
        return json.loads(body), descriptors
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise
