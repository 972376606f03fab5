"""Repeated non-blocking sums of one flat float32 region over all ranks."""

import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import await_end, leave
from dlio.exchange.compress import make_compressor
from dlio.exchange.compress.error_feedback import ErrorFeedback
from dlio.exchange.compress.message_layout import pieces_of
from dlio.exchange.compress.quantised_allreduce import QuantisedAllreduce
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.routes import Op, route

_F32 = npt.NDArray[np.float32]
_HEAD: Final = 8
"""Bytes before a compressed message: its length, for ranks that forward it."""
Tensors = Sequence[tuple[str, Sequence[int]]]
"""(name, shape) of the tensors in a region, in the order of their elements."""


class Sum(Protocol):
    """The sum of one region. All ranks start and wait for regions in the same order."""

    def start(self, region: _F32) -> None:
        """Start summing `region` in place. Do not touch it before the sum is complete."""

    def advance(self) -> bool:
        """Drive the sum forward without waiting; True if it is complete."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the sum is complete. Raises CommTimeout after the deadline."""

    def flush(self, region: _F32) -> None:
        """Overwrite `region` with the sum of all ranks' residuals, and clear them. Collective."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint, between two sums.

        `owed` is this rank's residual; all else is valid only for the same number of ranks.
        """

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present."""

    def statistics(self) -> dict[str, float]:
        """Totals since the start: `wait_s`, and `messages` and `bytes` that this rank sent."""

    def reset(self, undo: bool) -> None:
        """Drop a sum that a loss has interrupted, and go on with the ranks that are left.

        Its region may be used again. Call it once all communicators are of the next generation.

        Args:
            undo: the sum is void on all ranks: residuals are as before it was started. Otherwise
                some rank has it, and what was left out of its messages stays owed.
        """

    def close(self) -> None: ...


class _SavedSum(Protocol):
    def state(self) -> dict[str, torch.Tensor]: ...

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None: ...


def states_of(sums: Sequence[_SavedSum]) -> dict[str, torch.Tensor]:
    """Merge the states of several sums, as `owed/<number>` etc."""
    return {
        f"{name}/{number}": value
        for number, each in enumerate(sums)
        for name, value in each.state().items()
    }


def load_states(sums: Sequence[_SavedSum], state: Mapping[str, torch.Tensor]) -> None:
    """Restore the result of `states_of`."""
    for number, each in enumerate(sums):
        ours = [name for name in state if name.endswith(f"/{number}")]
        each.load_state({name.rpartition("/")[0]: state[name] for name in ours})


def make_sum(setting: ExchangeContext, tensors: Tensors, tag: int) -> Sum:
    """Create the sum that an exchange's topology and compressor need.

    Args:
        tensors: (name, shape) of the tensors in the region.
        tag: the first of `TAGS` tags that nothing else on the communicator uses.
    """
    spec, comm = setting.spec, setting.comm
    if spec.topology in ("hierarchical", "tree", "star"):
        return RoutedSum(setting, tensors, tag)
    if spec.codec is not None:
        keeps = setting.recovery is not None
        scratch, decay = setting.scratch, spec.decay
        return QuantisedAllreduce(comm, tensors, spec.codec, tag, scratch, keeps, decay)
    return AllreduceSum(comm)


class AllreduceSum:
    """The library's own non-blocking allreduce."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._request: Request | None = None
        self._wait_s = 0.0
        self._messages = self._bytes = 0.0

    def start(self, region: _F32) -> None:
        hops = 2 * (self._comm.size - 1)
        self._messages += hops
        self._bytes += hops * region.nbytes / self._comm.size
        self._request = self._comm.iallreduce(region)

    def advance(self) -> bool:
        if self._request is not None and self._request.done():
            self._request = None
        return self._request is None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._request is None:
            return
        began = time.perf_counter()
        self._comm.wait([self._request], "gradients of the other ranks", timeout_s)
        self._wait_s += time.perf_counter() - began
        self._request = None

    def flush(self, region: _F32) -> None:
        region[:] = 0

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        """Totals of a ring: each rank sends 2 (p - 1) messages of a p-th of the bytes."""
        return {"wait_s": self._wait_s, "messages": self._messages, "bytes": self._bytes}

    def reset(self, undo: bool) -> None:
        if self._request is not None:
            await_end([self._request])
        self._request = None

    def close(self) -> None:
        self._request = None


class RoutedSum:
    """A sum over point-to-point messages along a route.

    With a compressor, each hop up keeps its residual for the next sum, and all ranks receive the
    one message that the root encodes.

    Args:
        tag: a tag that nothing else on the communicator uses.
    """

    def __init__(self, setting: ExchangeContext, tensors: Tensors, tag: int) -> None:
        self._setting, self._comm, self._tag = setting, setting.comm, tag
        self._ops = self._route()
        compressor = setting.spec.compressor
        pieces = pieces_of(tensors)
        self.entries = pieces[-1].stop if pieces else 0
        self._codec = None
        longest = 4 * self.entries
        if compressor is not None:
            self._codec = make_compressor(compressor, pieces, setting.scratch)
            longest = _HEAD + self._codec.max_bytes
        self._residual = ErrorFeedback(
            self.entries if self._codec else 0, keeps=setting.recovery is not None
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
        self._region = np.empty(0, np.float32)
        self._wait_s = 0.0
        self._messages = self._bytes = 0

    def _route(self) -> list[Op]:
        spec, nodes = self._setting.spec, self._setting.nodes()
        return route(spec.topology, self._comm.rank, nodes, spec.compressor is not None)

    def start(self, region: _F32) -> None:
        self._region, self._at, self._down = region, 0, False
        self._residual.keep()
        if self._codec is not None and self._setting.recovery is not None:
            self._memory = self._codec.state()
        if not self._ops:
            self._residual.pay(region)
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
        try:
            while not self.advance():
                left_s = timeout_s
                if timeout_s is not None:
                    left_s = max(0.0, timeout_s - (time.perf_counter() - began))
                if self._receive is not None and not self._receive.done():
                    what = f"gradients of rank {self._ops[self._at].peer}"
                    self._comm.wait([self._receive], what, left_s)
                else:
                    self._comm.wait(self._sends[:1], "gradients to leave", left_s)
        finally:
            self._wait_s += time.perf_counter() - began

    def flush(self, region: _F32) -> None:
        if self._codec is None:
            region[:] = 0
            return
        region[:] = self._residual.owed
        self._comm.wait([self._comm.iallreduce(region)], "residuals of the other ranks")
        self._residual.owed[:] = 0

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

    def statistics(self) -> dict[str, float]:
        return {
            "wait_s": self._wait_s,
            "messages": float(self._messages),
            "bytes": float(self._bytes),
        }

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
        for send in self._sends:
            if not send.done():
                leave(send, self._outgoing, self._region)
        self._receive, self._sends = None, []

    def _begin(self) -> None:
        """Post the messages of the next operation."""
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
            arrived = self._incoming.view(np.float32)
            if kind == "take":
                self._region[:] = arrived
            else:
                self._region += arrived
        elif kind == "take":
            # Forwarded unchanged.
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
        self._messages += 1
        self._bytes += len(message)

    def _give(self) -> None:
        """Overwrite the region with the decoded message that goes down."""
        assert self._codec is not None
        self._down = True
        self._region[:] = 0
        self._codec.add(self._outgoing[_HEAD:], self._region)
