"""Things that one rank of each node does for all of them, such as a notice of any rank."""

import errno
import secrets
import socket

import xxhash

from dlio.comm import Communicator
from dlio.util.closable import Closable


class NodeClaims(Closable):
    """Claims of this rank. Collective to make.

    A claim is the name of an abstract socket, which one process of a node can have: no file is left
    and no rank waits for another. `close` gives them up.
    """

    def __init__(self, comm: Communicator) -> None:
        self._job = comm.tell(secrets.token_hex(8))
        self._held: list[socket.socket] = []

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    def is_first(self, text: str) -> bool:
        """True on the first rank of a node that asks this of a text; on others, too, where a system
        has no such sockets."""
        name = f"\0dlio-claim-{self._job}-{xxhash.xxh3_64_hexdigest(text.encode())}"
        try:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            return True
        try:
            claim.bind(name)
        except OSError as error:
            claim.close()
            return error.errno != errno.EADDRINUSE
        self._held.append(claim)
        return True
