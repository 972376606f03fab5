"""Messages between a trial and the searcher, over a socket that the searcher made.

Rank 0 tells the results of each epoch and waits for the answer, whether the trial goes on. If other
trials have to come to the same look first, the answer comes later; meanwhile the other ranks of the
trial are told to wait on.
"""

import os
import selectors
import socket
from typing import Final, Self

from dlio.comm import Communicator
from dlio.errors import CommError
from dlio.launch.node.agent_protocol import pack, receive_exactly
from dlio.util.settings import TRIAL_LINK

_TURN_S: Final = 20.0
"""Time between two signs to the other ranks, well below the deadline of their waits."""


class TrialLink:
    """A trial's end of the link."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ[TRIAL_LINK]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def begin(self) -> None:
        """Tell that the trial's program runs."""
        self._socket.sendall(pack({"begins": True}))

    def tell(
        self,
        epoch: int,
        values: list[float | None],
        source_bytes: int = 0,
        peers: Communicator | None = None,
    ) -> bool:
        """Tell an epoch's results; return False if the trial shall end. Collective over `peers`.

        Args:
            epoch: its number, from 0.
            values: of the objectives.

        Raises CommError if the searcher is gone.
        """
        if peers is None or peers.rank == 0:
            message = {"epoch": epoch, "values": values, "source_bytes": source_bytes}
            try:
                self._socket.sendall(pack(message))
            except OSError as error:
                raise CommError(f"the searcher has ended: {error}") from error
        while True:
            answer = self._answer() if peers is None or peers.rank == 0 else None
            if peers is not None:
                answer = peers.tell(answer)
            if answer is not None:
                return answer

    def _answer(self) -> bool | None:
        """Return the searcher's decision; None if there is none yet."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(_TURN_S):
                return None
        try:
            message, _ = receive_exactly(self._socket)
        except (EOFError, OSError) as error:
            raise CommError(f"the searcher has ended: {error}") from error
        return bool(message["goes_on"])
