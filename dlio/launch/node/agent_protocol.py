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
from collections.abc import Mapping
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
