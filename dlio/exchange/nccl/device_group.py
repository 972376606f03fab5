"""The ranks of an exchange as a process group of torch.distributed."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dlio.comm import Communicator
from dlio.comm.deadlines import default_timeout_s
from dlio.errors import CommTimeout

_WATCHDOG: Final = 1.25
"""Deadline of NCCL's watchdog, which ends the process, in multiples of that of the launches."""
_BACKENDS: Final = {"cuda": "nccl", "cpu": "gloo"}


class Flight:
    """Transfers under way, as a `dlio.comm.Request`; launched in the same order on all ranks."""

    def __init__(self, group: "DeviceGroup", works: Sequence[dist.Work], what: str) -> None:
        self._group, self._works, self._what = group, works, what
        self.launched = time.monotonic()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def cancel(self) -> bool:
        return self.done()

    def wait(self) -> None:
        """Have later work of the current stream wait for the transfers; on the CPU, wait.

        Raises CommTimeout on the CPU, if they fail or take longer than the deadline.
        """
        with self._group.errors(self._what):
            for work in self._works:
                work.wait()

    def is_overdue(self, limit_s: float) -> bool:
        """True if the transfers have not ended `limit_s` seconds after their launch."""
        return not self.done() and time.monotonic() - self.launched > limit_s

    def overdue(self, limit_s: float) -> CommTimeout:
        """The error of transfers that are overdue."""
        return self._group.failure(self._what, f"nothing for {limit_s:.0f} s")


class DeviceGroup:
    """Ranks that exchange tensors of one device.

    All ranks launch the same transfers in the same order. On a GPU transfers run on a stream of
    the group, after what the current stream was given before their launch, and the host waits for
    none. So a rank that is lost or far behind is found at a later launch: CommTimeout, once a
    transfer has been under way for DLIO_TIMEOUT seconds. A host that waits for its device meanwhile
    does not come to that launch: torch's watchdog of NCCL then ends the process a little later.

    Collective, as is `close`. Not thread-safe.

    Args:
        comm: the ranks; those of torch's default group.
        device: a GPU, or the CPU.

    Raises CommTimeout if the ranks do not meet.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.rank, self.size, self.device = comm.rank, comm.size, device
        self.backend = _BACKENDS[device.type]
        self._limit_s = default_timeout_s()
        self._flights: deque[Flight] = deque()
        self._group: Any = None
        limit_s = self._limit_s * (_WATCHDOG if self.backend == "nccl" else 1.0)
        with self.errors("meeting the other ranks"):
            self._group = dist.new_group(backend=self.backend, timeout=timedelta(seconds=limit_s))
            # Ranks without a partner would miss the first pair, at which NCCL connects all ranks.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def sum(self, tensor: torch.Tensor, what: str) -> Flight:
        """Launch the sum of a contiguous tensor over all ranks, in place."""
        return self._launch(
            what, lambda: [dist.all_reduce(tensor, group=self._group, async_op=True)]
        )

    def pair(
        self,
        outgoing: tuple[torch.Tensor, int] | None,
        incoming: tuple[torch.Tensor, int] | None,
        what: str,
    ) -> Flight:
        """Launch a message to a rank together with one from a rank, as (contiguous tensor, rank).

        The receiver's tensor is as long as the sender's.
        """
        operations = []
        if incoming is not None:
            operations.append(dist.P2POp(dist.irecv, *incoming, group=self._group))
        if outgoing is not None:
            operations.append(dist.P2POp(dist.isend, *outgoing, group=self._group))
        return self._launch(what, lambda: dist.batch_isend_irecv(operations))

    def deal(
        self,
        outgoing: torch.Tensor,
        sent: Sequence[int],
        incoming: torch.Tensor,
        received: Sequence[int],
        what: str,
    ) -> Flight:
        """Launch a message of bytes from each rank to each.

        Args:
            outgoing: uint8, the messages to all ranks one behind another.
            sent: number of bytes to each rank.
            incoming: uint8, the messages of all ranks one behind another.
            received: number of bytes from each rank.
        """
        return self._launch(
            what,
            lambda: [
                dist.all_to_all_single(
                    incoming, outgoing, list(received), list(sent), self._group, async_op=True
                )
            ],
        )

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
        self._flights.clear()

    def _launch(self, what: str, launch: Callable[[], Sequence[Any]]) -> Flight:
        while self._flights and self._flights[0].done():
            self._flights.popleft()
        if self._flights and self._flights[0].is_overdue(self._limit_s):
            raise self._flights[0].overdue(self._limit_s)
        with self.errors(what):
            works = launch()
        self._flights.append(Flight(self, works, what))
        return self._flights[-1]

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn errors of torch.distributed into CommTimeout."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | CommTimeout):
                raise
            why = str(error) or type(error).__name__
            raise self.failure(what, why.splitlines()[0]) from error

    def failure(self, what: str, why: str) -> CommTimeout:
        """The error of a transfer."""
        return CommTimeout(
            f"rank {self.rank} of {self.size}: {what} failed by {self.backend}: another rank is "
            f"stopped, far behind, or left the run (DLIO_TIMEOUT sets the deadline): {why}"
        )
