"""Locks that outlive the process that has taken them: the node's agent keeps them.

A folder in shared memory lasts as long as somebody holds its lock (`dlio.util.shared_folders`). A
lock of the kernel's belongs to the open file, and an open file can be sent through a socket; it is
kept from the moment when it is sent.
"""

import os
import socket
from array import array
from contextlib import suppress
from typing import Final

from dlio.launch.node.agent_protocol import KEEPER, pack
from dlio.util.private_sockets import connect
from dlio.util.settings import AGENT

_TIMEOUT_S: Final = 5.0


def keep(lock: int) -> None:
    """Have the agent hold an open file's lock until the job is over; does nothing without one."""
    folder = os.environ.get(AGENT)
    if folder is None:
        return
    # If the agent is gone, this rank ends, too.
    with suppress(OSError), connect(folder, KEEPER, _TIMEOUT_S) as connection:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [lock]))]
        connection.sendmsg([pack({"keep": True})], rights)
