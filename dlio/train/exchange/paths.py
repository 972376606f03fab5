"""Where a bucket's gradients lie, and how they are summed from there.

| path | the bucket | the sum |
|---|---|---|
| `host` | on the host | a `Sum` of host memory |
| `nccl` | on the GPU | torch.distributed's, on a stream of its own |
| `mpi` | on the GPU | MPI's, where it takes GPU memory without blocking |
| `pinned` | on the GPU | a `Sum` of pinned memory, copied there and back on a stream beside |

A compressor and a route work on the host, so they go with `host` and `pinned`. Ranks with and
without a GPU meet in host memory. The three paths over a GPU are tested on stand-ins for its
streams; they have not run on a GPU.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dlio.comm import Communicator, Request
from dlio.comm.devices import sums_device_memory
from dlio.train.exchange.buckets import Bucket
from dlio.train.exchange.sums import Sum
from dlio.train.exchange_spec import ExchangeSpec


class Path(Protocol):
    """One bucket's way to its sum. Its messages begin in one order on all ranks, which is the
    caller's to keep."""

    def start(self) -> None:
        """The bucket is written, or will be when the current stream comes there."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether messages have begun."""

    def begin(self) -> None:
        """Have messages begun, if they have not; waits for the copy that they are made from."""

    def wait(self) -> None:
        """The bucket holds the sum, for whatever the current stream does next."""

    def statistics(self) -> dict[str, float]:
        """As a `Sum`'s."""

    def close(self) -> None: ...


def choose(
    devices: Sequence[torch.device], on_host: bool, nccl: bool, mpi_sums_devices: bool
) -> str:
    """The path for parameters on these devices. Pure.

    Args:
        on_host: whether the exchange computes with what it sends.
        nccl: whether torch.distributed sums among just these ranks on their GPUs.
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
    """What ranks that choose differently do instead: GPUs by way of the host. Pure."""
    return None if len(set(paths)) == 1 else "pinned"


def find_path(devices: Sequence[torch.device], spec: ExchangeSpec, comm: Communicator) -> str:
    """This rank's path. Collective."""
    on_host = spec.compressor is not None or spec.topology != "all"
    over_mpi = hasattr(comm, "iallreduce_device") and sums_device_memory()
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
    """Memory of the host, summed where it is."""

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

    def close(self) -> None:
        self._total.close()


class Copies(Protocol):
    """Copies between a device and pinned memory, beside what the device computes."""

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Begin, once the current stream has come here."""

    def arrived(self) -> bool:
        """Whether the last `to_host` has."""

    def await_host(self) -> None: ...

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Begin; what the current stream does from here on waits for it."""


class CudaCopies:
    """On one stream, which the buckets of an exchange may share.

    Args:
        stream: of the device.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(device.device))
        with torch.cuda.stream(self._stream):
            host.copy_(device, non_blocking=True)
            self._event.record(self._stream)

    def arrived(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def await_host(self) -> None:
        self._event.synchronize()

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
        torch.cuda.current_stream(device.device).wait_stream(self._stream)


class PinnedPath:
    """By way of pinned memory: a bucket is sent when its copy has arrived there."""

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

    def close(self) -> None:
        self._total.close()

    def _send(self) -> None:
        self._begun = True
        self._total.start(self._host.numpy())


class _Ring:
    """Counts as `AllreduceSum` does."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.starts = self.bytes = 0

    def statistics(self) -> dict[str, float]:
        hops = 2 * (self._ranks - 1)
        sent = hops * self.bytes / self._ranks
        return {"wait_s": 0.0, "messages": float(hops * self.starts), "bytes": sent}


class NcclPath:
    """torch.distributed sums the bucket where it is.

    Args:
        group: of the exchange's own, so that the user's operations never come in between.
    """

    def __init__(self, bucket: Bucket, ranks: int, group: Any) -> None:
        self._bucket, self._group = bucket, group
        self._counts = _Ring(ranks)
        self._work: Any = None

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

    def close(self) -> None:
        self._work = None


class DeviceMpiPath:
    """MPI sums the bucket where it is, once the stream that writes it has come there.

    Args:
        written: an event of the device.
    """

    def __init__(self, bucket: Bucket, comm: Any, written: torch.cuda.Event) -> None:
        self._bucket, self._comm, self._written = bucket, comm, written
        self._counts = _Ring(comm.size)
        self._request: Request | None = None
        self._begun = True

    def start(self) -> None:
        self._counts.starts += 1
        self._counts.bytes += self._bucket.flat.nbytes
        self._begun = False
        self._written.record(torch.cuda.current_stream(self._bucket.flat.device))

    def advance(self) -> bool:
        if not self._begun and self._written.query():  # type: ignore[no-untyped-call]
            self.begin()
        elif self._request is not None:
            self._request.done()
        return self._begun

    def begin(self) -> None:
        if not self._begun:
            self._written.synchronize()
            self._begun = True
            self._request = self._comm.iallreduce_device(self._bucket.flat)

    def wait(self) -> None:
        self.begin()
        if self._request is not None:
            self._comm.wait([self._request], "gradients of the other ranks")
            self._request = None

    def statistics(self) -> dict[str, float]:
        return self._counts.statistics()

    def close(self) -> None:
        self._request = None
