"""The path of a bucket from its device to its sum.

| path | the bucket | the sum |
|---|---|---|
| `host` | on the host | a `Sum` of host memory |
| `nccl` | on the GPU | by torch.distributed, on a stream of its own |
| `mpi` | on the GPU | by MPI, if it sums GPU memory without blocking |
| `pinned` | on the GPU | a `Sum` of pinned memory, copied there and back on a separate stream |

Compressors and routes work on the host, so they use `host` or `pinned`. Ranks with and without a
GPU exchange host memory. The three paths of a GPU are tested with stand-ins for its streams, and
on a GPU by `make gpu-check`.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dlio.comm import Communicator, Request
from dlio.comm.devices import sums_device_memory
from dlio.train.exchange.buckets import Bucket
from dlio.train.exchange.sums import Sum
from dlio.train.exchange_spec import ExchangeSpec

__all__ = [
    "Copies",
    "CudaCopies",
    "DeviceMpiPath",
    "HostPath",
    "NcclPath",
    "Path",
    "PinnedPath",
    "SumsDeviceMemory",
    "agreed",
    "choose",
    "find_path",
]

_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams and events.


@runtime_checkable
class SumsDeviceMemory(Protocol):
    """A communicator that can sum GPU memory."""

    def iallreduce_device(self, tensor: torch.Tensor) -> Request:
        """Start summing a float32 tensor in GPU memory over all ranks, in place."""


class Path(Protocol):
    """One bucket's path to its sum. Callers begin messages in the same order on all ranks."""

    def start(self) -> None:
        """Start the sum of a bucket that the current stream has written, or is about to."""

    def advance(self) -> bool:
        """Drive the sum forward without waiting; True once its messages have begun."""

    def begin(self) -> None:
        """Begin messages if they have not begun; waits for the copy that they are read from."""

    def wait(self) -> None:
        """Return once the bucket holds the sum for later work of the current stream."""

    def statistics(self) -> dict[str, float]:
        """Totals, as of a `Sum`."""

    def reset(self, undo: bool) -> None:
        """Drop a sum that a loss has interrupted, as `Sum.reset` does."""

    def close(self) -> None: ...


def choose(
    devices: Sequence[torch.device], on_host: bool, nccl: bool, mpi_sums_devices: bool
) -> str:
    """Choose the path for parameters on these devices. Pure.

    Args:
        on_host: the exchange computes on its messages (compressor or route).
        nccl: torch.distributed has exactly these ranks and sums on their GPUs.
    """
    kinds = {device.type for device in devices}
    if kinds != {"cuda"} or len(set(devices)) > 1:
        return "host"
    if on_host:
        return "pinned"
    if nccl:
        return "nccl"
    return "mpi" if mpi_sums_devices else "pinned"


def agreed(paths: Sequence[str]) -> str | None:
    """The path of GPUs if ranks chose different ones: through the host. None if all agree. Pure."""
    return None if len(set(paths)) == 1 else "pinned"


def find_path(devices: Sequence[torch.device], spec: ExchangeSpec, comm: Communicator) -> str:
    """Choose this rank's path. Collective."""
    on_host = spec.compressor is not None or spec.topology != "all"
    over_mpi = isinstance(comm, SumsDeviceMemory) and sums_device_memory()
    mine = choose(devices, on_host, _has_nccl(comm), over_mpi)
    instead = agreed(comm.allgather(mine))
    return mine if mine == "host" or instead is None else instead


def _has_nccl(comm: Communicator) -> bool:
    if not (dist.is_available() and dist.is_initialized()) or not torch.cuda.is_available():
        return False
    if (dist.get_rank(), dist.get_world_size()) != (comm.rank, comm.size):
        return False
    whole: Any = dist.group.WORLD
    try:
        backend = whole._get_backend(torch.device("cuda"))
    except RuntimeError:
        return False
    return str(backend.name()) == "nccl"


class HostPath:
    """Host memory, summed in place."""

    def __init__(self, bucket: Bucket, total: Sum) -> None:
        self._bucket, self._total = bucket, total

    def start(self) -> None:
        self._total.start(self._bucket.array)

    def advance(self) -> bool:
        self._total.advance()
        return True

    def begin(self) -> None:
        pass

    def wait(self) -> None:
        self._total.wait()

    def statistics(self) -> dict[str, float]:
        return self._total.statistics()

    def reset(self, undo: bool) -> None:
        self._total.reset(undo)

    def close(self) -> None:
        self._total.close()


class Copies(Protocol):
    """Copies between a device and pinned memory, concurrent with the device's computation."""

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Start a copy to the host, after the current work of the current stream."""

    def arrived(self) -> bool:
        """True if the last `to_host` is complete."""

    def await_host(self) -> None:
        """Wait for the last `to_host`."""

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Start a copy to the device; later work of the current stream waits for it."""


class CudaCopies:
    """Copies on one stream, which the buckets of an exchange may share.

    Args:
        stream: a stream of the device.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = _cuda.Event()

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(device.device))
        with torch.cuda.stream(self._stream):
            host.copy_(device, non_blocking=True)
            self._event.record(self._stream)

    def arrived(self) -> bool:
        return bool(self._event.query())

    def await_host(self) -> None:
        self._event.synchronize()

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
        torch.cuda.current_stream(device.device).wait_stream(self._stream)


class PinnedPath:
    """A path through pinned memory: a bucket is sent once its copy has arrived there."""

    def __init__(
        self, bucket: Bucket, total: Sum, copies: Copies, host: torch.Tensor | None = None
    ) -> None:
        self._bucket, self._total, self._copies = bucket, total, copies
        if host is None:
            host = torch.empty(bucket.flat.numel(), pin_memory=True)
        self._host = host
        self._begun = True

    def start(self) -> None:
        self._begun = False
        self._copies.to_host(self._host, self._bucket.flat)

    def advance(self) -> bool:
        if not self._begun and self._copies.arrived():
            self._send()
        elif self._begun:
            self._total.advance()
        return self._begun

    def begin(self) -> None:
        if not self._begun:
            self._copies.await_host()
            self._send()

    def wait(self) -> None:
        self.begin()
        self._total.wait()
        self._copies.to_device(self._bucket.flat, self._host)

    def statistics(self) -> dict[str, float]:
        return self._total.statistics()

    def reset(self, undo: bool) -> None:
        self._total.reset(undo and self._begun)
        self._begun = True

    def close(self) -> None:
        self._total.close()

    def _send(self) -> None:
        self._begun = True
        self._total.start(self._host.numpy())


class _Ring:
    """Totals of a ring, as `AllreduceSum` has them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.starts = self.bytes = 0

    def statistics(self) -> dict[str, float]:
        hops = 2 * (self._ranks - 1)
        sent = hops * self.bytes / self._ranks
        return {"wait_s": 0.0, "messages": float(hops * self.starts), "bytes": sent}


class NcclPath:
    """A bucket in GPU memory, summed in place by torch.distributed.

    Args:
        group: the exchange's own group, kept apart from the user's operations.
    """

    def __init__(self, bucket: Bucket, ranks: int, group: dist.ProcessGroup | None) -> None:
        self._bucket, self._group = bucket, group
        self._counts = _Ring(ranks)
        self._work: dist.Work | None = None

    def start(self) -> None:
        self._counts.starts += 1
        self._counts.bytes += self._bucket.flat.nbytes
        self._work = dist.all_reduce(self._bucket.flat, group=self._group, async_op=True)

    def advance(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def statistics(self) -> dict[str, float]:
        return self._counts.statistics()

    def reset(self, undo: bool) -> None:
        self._work = None

    def close(self) -> None:
        self._work = None


class DeviceMpiPath:
    """A bucket in GPU memory, summed in place by MPI once the stream has written it.

    Args:
        comm: a communicator that is `SumsDeviceMemory`.
    """

    def __init__(self, bucket: Bucket, comm: Communicator) -> None:
        assert isinstance(comm, SumsDeviceMemory)
        self._bucket, self._comm = bucket, comm
        self._device_sums: SumsDeviceMemory = comm
        self._written = _cuda.Event()
        self._counts = _Ring(comm.size)
        self._request: Request | None = None
        self._begun = True

    def start(self) -> None:
        self._counts.starts += 1
        self._counts.bytes += self._bucket.flat.nbytes
        self._begun = False
        self._written.record(torch.cuda.current_stream(self._bucket.flat.device))

    def advance(self) -> bool:
        if not self._begun and self._written.query():
            self.begin()
        elif self._request is not None:
            self._request.done()
        return self._begun

    def begin(self) -> None:
        if not self._begun:
            self._written.synchronize()
            self._begun = True
            self._request = self._device_sums.iallreduce_device(self._bucket.flat)

    def wait(self) -> None:
        self.begin()
        if self._request is not None:
            self._comm.wait([self._request], "gradients of the other ranks")
            self._request = None

    def statistics(self) -> dict[str, float]:
        return self._counts.statistics()

    def reset(self, undo: bool) -> None:
        self._request, self._begun = None, True

    def close(self) -> None:
        self._request = None
