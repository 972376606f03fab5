"""The path of a bucket from its device to its sum.

| path | the bucket | the sum |
|---|---|---|
| `host` | on the host | a `Sum` of host memory |
| `nccl` | on the GPU | by torch.distributed, on a stream of its own; see `device.paths` |
| `mpi` | on the GPU | by MPI, if it sums GPU memory without blocking |
| `pinned` | on the GPU | a `Sum` of pinned memory, copied there and back on a separate stream |
| `gloo` | on the CPU | as `nccl`, for tests of its code |

`dlio.exchange.buffer_placement` chooses. Presets that exchange weights take `nccl`, too; instead of
`mpi` and `pinned` their buckets are in pinned memory, and they are `HostPath`s. Compressors that a
device lacks, and `asgd`, work on the host. Ranks with and without a GPU exchange host memory. The
paths of a GPU are tested with stand-ins for its streams, and on a GPU by `make gpu-check`.
"""

import time
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

import torch

from dlio.comm import Communicator, Request
from dlio.exchange.buckets import Bucket
from dlio.exchange.sums import Sum

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

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint, on the host, as a `Sum`."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present."""

    def statistics(self) -> dict[str, float]:
        """Totals, as of a `Sum`; `own_s` are seconds that the host waited for its own device."""

    def reset(self, undo: bool) -> None:
        """Drop a sum that a loss has interrupted, as `Sum.reset` does."""

    def close(self) -> None: ...


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

    def state(self) -> dict[str, torch.Tensor]:
        return self._total.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._total.load_state(state)

    def statistics(self) -> dict[str, float]:
        return self._total.statistics()

    def reset(self, undo: bool) -> None:
        self._total.reset(undo)

    def close(self) -> None:
        self._total.close()


class PinnedCopies(Protocol):
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
        self, bucket: Bucket, total: Sum, copies: PinnedCopies, host: torch.Tensor | None = None
    ) -> None:
        self._bucket, self._total, self._copies = bucket, total, copies
        if host is None:
            host = torch.empty(bucket.flat.numel(), pin_memory=True)
        self._host = host
        self._begun = True
        self._own_s = 0.0

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
            began = time.perf_counter()
            self._copies.await_host()
            self._own_s += time.perf_counter() - began
            self._send()

    def wait(self) -> None:
        self.begin()
        self._total.wait()
        self._copies.to_device(self._bucket.flat, self._host)

    def state(self) -> dict[str, torch.Tensor]:
        return self._total.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._total.load_state(state)

    def statistics(self) -> dict[str, float]:
        return {**self._total.statistics(), "own_s": self._own_s}

    def reset(self, undo: bool) -> None:
        self._total.reset(undo and self._begun)
        self._begun = True

    def close(self) -> None:
        self._total.close()

    def _send(self) -> None:
        self._begun = True
        self._total.start(self._host.numpy())


class _RingTotals:
    """Totals of a ring, as `AllreduceSum` has them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.starts = self.bytes = 0

    def statistics(self) -> dict[str, float]:
        hops = 2 * (self._ranks - 1)
        sent = hops * self.bytes / self._ranks
        return {"wait_s": 0.0, "messages": float(hops * self.starts), "bytes": sent}


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
        self._counts = _RingTotals(comm.size)
        self._request: Request | None = None
        self._begun = True
        self._own_s = 0.0

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
            began = time.perf_counter()
            self._written.synchronize()
            self._own_s += time.perf_counter() - began
            self._begun = True
            self._request = self._device_sums.iallreduce_device(self._bucket.flat)

    def wait(self) -> None:
        self.begin()
        if self._request is not None:
            self._comm.wait([self._request], "gradients of the other ranks")
            self._request = None

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        return {**self._counts.statistics(), "own_s": self._own_s}

    def reset(self, undo: bool) -> None:
        self._request, self._begun = None, True

    def close(self) -> None:
        self._request = None
