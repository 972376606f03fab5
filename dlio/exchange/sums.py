"""Repeated non-blocking sums of one flat float32 or float64 region over all ranks.

| class | the region | the messages |
|---|---|---|
| `AllreduceSum` | on the host | the library's non-blocking allreduce |
| `RoutedSum` | on the host | point to point, along `routes` |
| `QuantisedAllreduce` | on the host | compressed shares and sums; see `quantised_allreduce` |
| `NarrowSum` | on the host | those of one of the above, in float32; see there |
| `PinnedSum` | on the GPU | copied to page-locked memory, for one of the above, and back |
| `DeviceMpiSum` | on the GPU | by MPI, if it sums GPU memory without blocking |
| `NcclSum` | on the GPU | by torch.distributed; see `nccl` |

`buffer_placement` chooses. Those of a GPU are tested with stand-ins for its streams, and on a GPU
by `make gpu-check`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import await_end, leave
from dlio.exchange.compress import make_compressor
from dlio.exchange.compress.message_layout import F32, pieces_of
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.routes import Op, route
from dlio.exchange.traffic import MessageTraffic

_HEAD: Final = 8
"""Bytes before a compressed message: its length, for ranks that forward it."""
_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams and events.
Tensors = Sequence[tuple[str, Sequence[int]]]
"""(name, shape) of the tensors in a region, in the order of their elements."""


class Sum:
    """The sum of one region. All ranks start and wait for regions in the same order."""

    own_s = 0.0
    """Seconds that the host has waited for its own device."""
    begun = True
    """False while a device is still to write the region. Later regions must not overtake it: all
    ranks begin messages in the same order."""

    def __init__(self) -> None:
        self.traffic = MessageTraffic()

    def start(self, region: torch.Tensor) -> None:
        """Start summing `region` in place. Do not touch it before the sum is complete."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Drive the sum forward without waiting; True if it is complete."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin messages if they have not begun; waits for the device that writes the region."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the region holds the sum, for later work of the current stream.

        Raises CommTimeout after the deadline.
        """
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint, between two sums, on the host.

        `owed` is this rank's residual; all else is valid only for the same number of ranks.
        """
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present."""

    def statistics(self) -> dict[str, float]:
        """Totals since the start: `wait_s`, and `messages` and `bytes` that this rank sent."""
        return self.traffic.as_dict()

    def reset(self, undo: bool) -> None:
        """Drop a sum that a loss has interrupted, and continue with the survivors.

        Its region may be used again. Call it once all communicators are of the next generation.
        With `undo` the sum is void on all ranks: residuals are as before it was started. Otherwise
        some rank has it, and what was left out of its messages stays owed.
        """

    def close(self) -> None: ...


def ring_traffic(ranks: int, size: int) -> tuple[int, float]:
    """(messages, bytes) that a rank sends for a sum of `size` bytes around a ring.

    Libraries choose their algorithm in silence; a ring sends the fewest bytes possible, 2 (p - 1)
    messages of a p-th of them.
    """
    hops = 2 * (ranks - 1)
    return hops, hops * size / ranks


class BucketSums(list[Sum]):
    """The sums of an exchange's buckets, whose totals continue when the sums are made anew."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, float] = {}

    def remake(self, sums: Iterable[Sum]) -> None:
        """Close these sums, and continue with others, which are made after that."""
        self._before = self.statistics()
        self.close()
        self[:] = sums

    def replace(self, number: int, make: Callable[[], Sum]) -> None:
        """Close a sum, and continue with another one, made after that, in its place."""
        state = {name: value.clone() for name, value in self[number].state().items()}
        for key, value in self[number].statistics().items():
            self._before[key] = self._before.get(key, 0.0) + value
        self[number].close()
        self[number] = make()
        self[number].load_state(state)

    def state(self) -> dict[str, torch.Tensor]:
        """Merge the states of the sums, as `owed/<number>` etc."""
        return {
            f"{name}/{number}": value
            for number, each in enumerate(self)
            for name, value in each.state().items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`."""
        for number, each in enumerate(self):
            ours = [name for name in state if name.endswith(f"/{number}")]
            each.load_state({name.rpartition("/")[0]: state[name] for name in ours})

    def statistics(self) -> dict[str, float]:
        """Totals since the start, as of a single sum."""
        counts = [self._before, *(each.statistics() for each in self)]
        keys = ("wait_s", "messages", "bytes")
        return {key: sum(each.get(key, 0.0) for each in counts) for key in keys}

    def reset(self, undo: bool, begun: Collection[int]) -> None:
        """Drop sums that a loss has interrupted; `undo` is for those that have `begun`."""
        for number, each in enumerate(self):
            each.reset(undo and number in begun)

    def close(self) -> None:
        """Close all sums."""
        for each in self:
            each.close()


# Sums of host memory.


class ErrorFeedback:
    """A rank's residual: the part of its gradients that its messages have left out so far.

    `keeps` if a sum may have to be undone, because a rank was lost in the middle of it; `decay` is
    the share of the residual that is still owed when the next sum begins.
    """

    def __init__(self, entries: int, keeps: bool = False, decay: float = 1.0) -> None:
        self._decay = np.float32(decay)
        self.owed = np.zeros(entries, np.float32)
        """Shape (entries,). A part of each checkpoint."""
        self._before = np.zeros(entries, np.float32) if keeps else None

    def keep(self) -> None:
        """Remember the residual, before a sum is started, and let it decay."""
        if self._before is not None:
            self._before[:] = self.owed
        if self._decay < 1.0:
            # For `diloco+threshold` only, where the residual stands for the outer momentum:
            # undecayed, it would be sent in full, however old.
            self.owed *= self._decay

    def put_back(self) -> None:
        """Return to the last residual that was remembered."""
        if self._before is not None:
            self.owed[:] = self._before

    def pay(self, region: F32) -> None:
        """Add the residual to a region that is not compressed, because no other rank is left."""
        if len(self.owed):
            region += self.owed
            self.owed[:] = 0


class AllreduceSum(Sum):
    """The library's own non-blocking allreduce."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._request: Request | None = None

    def start(self, region: torch.Tensor) -> None:
        self.traffic.sent(*ring_traffic(self._comm.size, region.nbytes))
        # The algorithm is the library's choice. A ring halves the time of 100 MB in one piece, but
        # gains nothing for several buckets of 1 MiB, or over 1 Gbit/s.
        self._request = self._comm.iallreduce(region.numpy())

    def advance(self) -> bool:
        # Open MPI moves a long message only inside calls to it: asking drives it.
        if self._request is not None and self._request.done():
            self._request = None
        return self._request is None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._request is not None:
            with self.traffic.waiting():
                self._comm.wait([self._request], "gradients of the other ranks", timeout_s)
            self._request = None

    def reset(self, undo: bool) -> None:
        if self._request is not None:
            await_end([self._request])
        self._request = None

    def close(self) -> None:
        self._request = None


class RoutedSum(Sum):
    """A sum over point-to-point messages along a route, with a tag of its own.

    With a compressor, each hop up keeps its residual for the next sum, and all ranks receive the
    one message that the root encodes.
    """

    def __init__(
        self,
        context: ExchangeContext,
        tensors: Tensors,
        tag: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._context, self._comm, self._tag = context, context.comm, tag
        self._ops = self._route()
        compressor = context.spec.compressor
        pieces = pieces_of(tensors)
        self.entries = pieces[-1].stop if pieces else 0
        self._codec = None
        longest = dtype.itemsize * self.entries
        if compressor is not None:
            self._codec = make_compressor(compressor, pieces, context.scratch)
            longest = _HEAD + self._codec.max_bytes
        self._residual = ErrorFeedback(
            self.entries if self._codec else 0, keeps=context.recovery is not None
        )
        self._memory = np.empty(0, np.int64)
        """The compressor's state before the last sum, where it may have to be undone."""
        self._incoming = np.empty(longest, np.uint8)
        self._outgoing = np.empty(longest if self._codec else 0, np.uint8)
        self._down = False
        """True if `_outgoing` holds the sum that all ranks receive."""
        self._at = len(self._ops)
        self._receive: Request | None = None
        self._sends: list[Request] = []
        self._region: npt.NDArray[Any] = np.empty(0, np.float32)

    def _route(self) -> list[Op]:
        spec, nodes = self._context.spec, self._context.nodes()
        return route(spec.topology, self._comm.rank, nodes, spec.compressor is not None)

    def start(self, region: torch.Tensor) -> None:
        self._region, self._at, self._down = region.numpy(), 0, False
        self._residual.keep()
        if self._codec is not None and self._context.recovery is not None:
            self._memory = self._codec.state()
        if not self._ops:
            self._residual.pay(self._region)
        else:
            self._begin()
            self.advance()

    def advance(self) -> bool:
        while self._at < len(self._ops) and self._end():
            self._at += 1
            if self._at < len(self._ops):
                self._begin()
        self._sends = [send for send in self._sends if not send.done()]
        return self._at == len(self._ops) and not self._sends

    def wait(self, timeout_s: float | None = None) -> None:
        began = time.perf_counter()
        with self.traffic.waiting():
            while not self.advance():
                left_s = timeout_s
                # One deadline for the sum: one for each hop would grow with the tree's depth.
                if timeout_s is not None:
                    left_s = max(0.0, timeout_s - (time.perf_counter() - began))
                if self._receive is not None and not self._receive.done():
                    what = f"gradients of rank {self._ops[self._at].peer}"
                    self._comm.wait([self._receive], what, left_s)
                else:
                    self._comm.wait(self._sends[:1], "gradients to leave", left_s)

    def state(self) -> dict[str, torch.Tensor]:
        if self._codec is None:
            return {}
        codec = torch.from_numpy(self._codec.state())
        return {"owed": torch.from_numpy(self._residual.owed), "codec": codec}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._codec is not None and "owed" in state:
            self._residual.owed[:] = state["owed"].numpy()
        if self._codec is not None and "codec" in state:
            self._codec.load_state(state["codec"].numpy())

    def reset(self, undo: bool) -> None:
        await_end([*self._sends, *([] if self._receive is None else [self._receive])])
        self._receive, self._sends = None, []
        self._ops = self._route()
        self._at = len(self._ops)
        if undo:
            self._residual.put_back()
            if self._codec is not None:
                self._codec.load_state(self._memory)

    def close(self) -> None:
        if self._receive is not None and not self._receive.cancel():
            leave(self._receive, self._incoming)
        # Not cancelled: a cancelled message could match a later receive with its tag. Its memory
        # is kept for ever instead, because MPI may still read it.
        for send in self._sends:
            if not send.done():
                leave(send, self._outgoing, self._region)
        self._receive, self._sends = None, []

    def _begin(self) -> None:
        kind, peer = self._ops[self._at]
        if kind != "send":
            self._receive = self._comm.irecv(self._incoming, peer, self._tag)
        if kind in ("send", "swap"):
            self._send(peer)

    def _end(self) -> bool:
        """End the next operation if its message has arrived; True if so."""
        if self._receive is None:
            return True
        if not self._receive.done():
            return False
        kind, _ = self._ops[self._at]
        if kind != "add" and not all(send.done() for send in self._sends):
            return False  # Adding would change a region that is being sent.
        self._receive = None
        if self._codec is None:
            arrived = self._incoming.view(self._region.dtype)
            if kind == "take":
                self._region[:] = arrived
            else:
                self._region += arrived
        elif kind == "take":
            # Forwarded unchanged.
            # Encoding it again at each hop would lose more, and ranks would get different sums.
            self._incoming, self._outgoing = self._outgoing, self._incoming
            self._give()
        else:
            self._codec.add(self._incoming[_HEAD:], self._region)
        return True

    def _send(self, peer: int) -> None:
        message = self._region.view(np.uint8)
        if self._codec is not None:
            if not self._down:
                used = self._codec.encode(self._region, self._residual.owed, self._outgoing[_HEAD:])
                self._outgoing[:_HEAD].view(np.uint64)[0] = used
                if not any(op.kind == "take" for op in self._ops[self._at :]):
                    self._give()  # The root takes the decoded sum, too.
            used = int(self._outgoing[:_HEAD].view(np.uint64)[0])
            message = self._outgoing[: _HEAD + used]
        self._sends.append(self._comm.isend(message, peer, self._tag))
        self.traffic.sent(1, len(message))

    def _give(self) -> None:
        """Overwrite the region with the decoded message that goes down."""
        assert self._codec is not None
        self._down = True
        self._region[:] = 0
        self._codec.add(self._outgoing[_HEAD:], self._region)


# Sums of a GPU's memory.


@runtime_checkable
class SumsDeviceMemory(Protocol):
    """A communicator that can sum GPU memory."""

    def iallreduce_device(self, tensor: torch.Tensor) -> Request:
        """Start summing a float32 or float64 tensor in GPU memory over all ranks, in place."""


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
    """Copies on one stream of the device, which the buckets of an exchange may share."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = _cuda.Event()

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        # A stream of its own: on the current stream the copy would delay the rest of backward.
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


class PinnedSum(Sum):
    """A sum by way of `host`, pinned memory as long as the region, which is sent once its copy has
    arrived there.

    CUDA-aware Open MPI does not replace it: its non-blocking reductions take host memory only, and
    its blocking ones copy through the host themselves.
    """

    def __init__(self, total: Sum, copies: PinnedCopies, host: torch.Tensor) -> None:
        self._total, self._copies, self._host = total, copies, host
        self.traffic = total.traffic
        self._region = torch.empty(0)

    def start(self, region: torch.Tensor) -> None:
        self.begun = False
        self._region = region
        self._copies.to_host(self._host, region)

    def advance(self) -> bool:
        if self.begun:
            return self._total.advance()
        if self._copies.arrived():
            self._send()
        return False

    def begin(self) -> None:
        if not self.begun:
            began = time.perf_counter()
            self._copies.await_host()
            self.own_s += time.perf_counter() - began
            self._send()

    def wait(self, timeout_s: float | None = None) -> None:
        self.begin()
        self._total.wait(timeout_s)
        self._copies.to_device(self._region, self._host)

    def state(self) -> dict[str, torch.Tensor]:
        return self._total.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._total.load_state(state)

    def reset(self, undo: bool) -> None:
        # A copy that was never sent has left no residual to undo.
        self._total.reset(undo and self.begun)
        self.begun = True

    def close(self) -> None:
        self._total.close()

    def _send(self) -> None:
        self.begun = True
        self._total.start(self._host)


class DeviceMpiSum(Sum):
    """A region in GPU memory, summed in place by MPI (`SumsDeviceMemory`) once the stream has
    written it.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        assert isinstance(comm, SumsDeviceMemory)
        self._comm = comm
        self._device_sums: SumsDeviceMemory = comm
        self._written = _cuda.Event()
        self._region = torch.empty(0)
        self._request: Request | None = None

    def start(self, region: torch.Tensor) -> None:
        self.traffic.sent(*ring_traffic(self._comm.size, region.nbytes))
        self.begun = False
        self._region = region
        self._written.record(torch.cuda.current_stream(region.device))

    def advance(self) -> bool:
        if not self.begun and self._written.query():
            self.begin()
        return self.begun and (self._request is None or self._request.done())

    def begin(self) -> None:
        if not self.begun:
            began = time.perf_counter()
            # MPI knows no streams: the region has to be there when it begins to read.
            self._written.synchronize()
            self.own_s += time.perf_counter() - began
            self.begun = True
            self._request = self._device_sums.iallreduce_device(self._region)

    def wait(self, timeout_s: float | None = None) -> None:
        self.begin()
        if self._request is not None:
            self._comm.wait([self._request], "gradients of the other ranks", timeout_s)
            self._request = None

    def reset(self, undo: bool) -> None:
        self._request, self.begun = None, True

    def close(self) -> None:
        self._request = None
