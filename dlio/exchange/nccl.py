"""Sums of gradients in the GPUs' memory, by NCCL.

`allreduce` without a compressor goes this way where torch.distributed connects exactly the ranks of
the exchange on their GPUs; every other exchange passes through the host. It has had compressors and
pairs of ranks on the device, too. They were a second copy of each algorithm: written once over
tensors, the compressors would be 1.8 to 71 times slower on the CPU than numpy's (docs/LOG.md).

gloo takes NCCL's place for tensors of the CPU, in tests.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dlio.comm import Communicator
from dlio.comm.common_store import common_store
from dlio.comm.deadlines import default_timeout_s
from dlio.comm.survival.recovery import recovery_of
from dlio.comm.world import keep_world
from dlio.errors import CommError, CommTimeout
from dlio.exchange.sums import Sum, ring_traffic
from dlio.util.settings import DEVICE_EXCHANGE, settings

_BACKENDS: Final = {"cuda": "nccl", "cpu": "gloo"}
_WATCHDOG: Final = 1.25
"""Deadline of NCCL's watchdog, which ends the process, in multiples of that of the launches."""
_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams and events.


def backend_of(device_type: str) -> str:
    """The backend that may sum tensors of a device; "" for none."""
    if device_type == "cpu" and not os.environ.get(DEVICE_EXCHANGE):
        return ""
    return _BACKENDS.get(device_type, "")


@contextlib.contextmanager
def devices_connected(comm: Communicator, device: torch.device) -> Iterator[None]:
    """Connect all ranks' GPUs by NCCL for the body, if DLIO_NCCL asks for it. Collective.

    Does nothing if a rank has no GPU, if ranks are to survive others, or if there is a group.
    Raises CommError if the ranks do not meet.
    """
    backend = backend_of(device.type)
    if backend == "nccl" and not settings().nccl:
        backend = ""
    if dist.is_initialized() or recovery_of(comm) is not None:
        backend = ""
    backends = set(comm.allgather(backend))
    if comm.size == 1 or len(backends) > 1 or not backend:
        yield
        return
    limit_s = default_timeout_s()
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            store=common_store(comm, limit_s),
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=limit_s),
        )
    except RuntimeError as error:
        raise CommError(
            f"the ranks do not meet by {backend} (DLIO_NCCL=0 leaves it out): {error}"
        ) from error
    keep_world()
    try:
        yield
    finally:
        dist.destroy_process_group()
        keep_world()


class DeviceGroup:
    """The ranks of an exchange as a process group of torch.distributed.

    All ranks launch the same sums in the same order. On a GPU sums run on a stream of the group,
    after all work that the current stream was given before, and the host waits for none. So a rank
    that is lost or far behind is found at a later launch: CommTimeout, once a sum has been under
    way for DLIO_TIMEOUT seconds. A host that waits for its device meanwhile does not come to that
    launch: torch's watchdog of NCCL then ends the process a little later.

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
        self._launched: deque[tuple[float, str, dist.Work]] = deque()
        self._group: Any = None
        self._waited_s = 0.0
        self._timers: deque[tuple[Any, Any]] = deque()
        limit_s = self._limit_s * (_WATCHDOG if self.backend == "nccl" else 1.0)
        with self.errors("meeting the other ranks"):
            self._group = dist.new_group(backend=self.backend, timeout=timedelta(seconds=limit_s))
            # NCCL connects the ranks at the first sum: better here, under this deadline, than in
            # the first backward pass.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def sum(self, tensor: torch.Tensor, what: str) -> dist.Work:
        """Launch the sum of a contiguous tensor over all ranks, in place."""
        while self._launched and self._launched[0][2].is_completed():
            self._launched.popleft()
        if self._launched and time.monotonic() - self._launched[0][0] > self._limit_s:
            raise self._failure(self._launched[0][1], f"nothing for {self._limit_s:.0f} s")
        with self.errors(what):
            work: Any = dist.all_reduce(tensor, group=self._group, async_op=True)
        self._launched.append((time.monotonic(), what, work))
        launched: dist.Work = work
        return launched

    def wait(self, work: dist.Work, what: str) -> None:
        """Have later work of the current stream wait for a sum; on the CPU, wait.

        Raises CommTimeout on the CPU, if it fails or takes longer than the deadline.
        """
        with self.errors(what), self._timed():
            work.wait()

    @property
    def waited_s(self) -> float:
        """Seconds that the GPU's current stream has waited for sums, without the host."""
        while self._timers and self._timers[0][1].query():
            began, ended = self._timers.popleft()
            self._waited_s += began.elapsed_time(ended) / 1e3
        return self._waited_s

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        # The host's clock would see the launch of a wait only, so events time it on the device.
        if self.device.type != "cuda":
            yield
            return
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        stream = _cuda.current_stream(self.device)
        began.record(stream)
        yield
        ended.record(stream)
        self._timers.append((began, ended))

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
        self._launched.clear()

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn errors of torch.distributed into CommTimeout."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | CommTimeout):
                raise
            why = str(error) or type(error).__name__
            raise self._failure(what, why.splitlines()[0]) from error

    def _failure(self, what: str, why: str) -> CommTimeout:
        return CommTimeout(
            f"rank {self.rank} of {self.size}: {what} failed by {self.backend}: another rank is "
            f"stopped, far behind, or left the run (DLIO_TIMEOUT sets the deadline): {why}"
        )


class NcclSum(Sum):
    """The sum of a bucket in its device's memory, launched by `start`.

    No rank may be lost: `buffer_placement` then chooses another path.
    """

    def __init__(self, group: DeviceGroup) -> None:
        super().__init__()
        self._group = group
        self._work: dist.Work | None = None

    def start(self, region: torch.Tensor) -> None:
        self.traffic.sent(*ring_traffic(self._group.size, region.nbytes))
        self._work = self._group.sum(region, "the sum of a bucket")

    def advance(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float | None = None) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with self.traffic.waiting():
                self._group.wait(work, "the sum of a bucket")

    def close(self) -> None:
        self._work = None
