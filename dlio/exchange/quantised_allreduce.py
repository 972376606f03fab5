"""Sums over ranks of compressed gradients with error feedback.

Reduce-scatter and allgather (Dryden et al., MLHPC 2016): each rank owns a part of the region. The
owner receives every other rank's compressed share of that part, sums them in the order of ranks,
adds its residual, compresses the total and sends it to all. All ranks, the owner included, take the
decoded message, so that the result is bit-identical everywhere. A rank's own share of its own part
is added uncompressed.

Both hops have error feedback, in one residual as long as the region: in other ranks' parts it holds
the unsent part of this rank's shares, in the own part the unsent part of the sum. So at any time

    all sums returned so far + residuals of all ranks = all gradients so far,

up to the rounding of float32 additions (and of `onebit`, see `compress`).

Two ranks need only one hop: they exchange messages of the whole region, and both add them in the
order of ranks. This sends as many bytes, and compresses once instead of twice.

With p > 2 ranks and messages of b bytes for the whole region, a rank sends 2 (p - 1) messages and
about 2 b (p - 1) / p bytes: the number of messages grows with p, their bytes hardly. Shares are
decoded and added as they arrive, in the order of ranks.
"""

import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import await_end, leave
from dlio.errors import UsageError
from dlio.exchange.compress import make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, Piece, pieces_of, split
from dlio.exchange.sums import ErrorFeedback, Sum, Tensors

TAGS = 2
"""Number of tags that a QuantisedAllreduce uses: its first tag and the next one."""
_ONE_HOP = 2
"""Number of ranks for which one hop is used. It sends (p - 1) b bytes instead of 2 b (p - 1) / p:
the same for 2 ranks, more for others."""


class _SumPhase(Enum):
    IDLE = auto()
    SHARES = auto()
    """Waiting for the next rank's share of the own part."""
    SUMS = auto()
    """Waiting for the sums of the other parts, and for this rank's messages to leave."""


class _OwnedPart:
    """One rank's part of the region, with this rank's buffers for it."""

    def __init__(
        self, pieces: Sequence[Piece], begin: int, name: str, scratch: ChunkScratch
    ) -> None:
        self.compressor = make_compressor(name, pieces, scratch)
        self.span = slice(begin, begin + self.compressor.entries)
        self.outgoing = np.empty(self.compressor.max_bytes, np.uint8)
        """This rank's share, sent to the owner; in its own part, the sum, sent to all."""
        self.incoming = np.empty(self.compressor.max_bytes, np.uint8)
        """The owner's sum; unused in the own part."""
        self.request: Request | None = None
        """Pending receive of the owner's sum."""


class QuantisedAllreduce(Sum):
    """Repeated non-blocking sums of one flat float32 region over all ranks, compressed.

    `start` sends this rank's shares, `advance` drives the sum forward, `wait` completes it. All
    ranks start and complete regions in the same order. Several regions may be pending at a time if
    their tags differ. With one rank nothing is compressed, copied or sent.

    Not thread-safe. Owns its buffers, not the communicator.

    Nothing else on the communicator uses the `TAGS` tags from `tag` on; other regions of the same
    thread may share `scratch`. If it `keeps` residuals, `reset` can undo a sum; this takes as much
    memory as the region.

    Raises UsageError for an unknown compressor.
    """

    def __init__(
        self,
        comm: Communicator,
        tensors: Tensors,
        compressor: str,
        tag: int,
        scratch: ChunkScratch | None = None,
        keeps: bool = False,
        decay: float = 1.0,
    ) -> None:
        super().__init__()
        self._comm, self._tag = comm, tag
        self._pieces = pieces_of(tensors)
        self._name, self._scratch = compressor, scratch or ChunkScratch()
        self.entries = self._pieces[-1].stop if self._pieces else 0
        """Length of the region."""
        self._residual = ErrorFeedback(0 if comm.size == 1 else self.entries, keeps, decay)
        self._share_requests: dict[int, Request] = {}
        self._sends: list[Request] = []
        self._phase = _SumPhase.IDLE
        self._region = np.empty(0, np.float32)
        self._cut()

    @property
    def residual(self) -> npt.NDArray[np.float32]:
        """Values that this rank has not sent yet; shape (entries,). Part of a checkpoint."""
        return self._residual.owed

    def _cut(self) -> None:
        comm = self._comm
        alone = comm.size == 1
        # One hop saves time, not accuracy: `onebit` on two ranks trains no better by it.
        self._one_hop = comm.size == _ONE_HOP
        self._parts: list[_OwnedPart] = []
        begin = 0
        for part in split(self._pieces, 1 if self._one_hop else comm.size):
            self._parts.append(_OwnedPart([] if alone else part, begin, self._name, self._scratch))
            begin = self._parts[-1].span.stop
        self._own = self._parts[0 if self._one_hop else comm.rank]
        """The part that this rank sums: other ranks send it their shares."""
        own = self._own.compressor
        self._shares = {
            rank: np.empty(own.max_bytes, np.uint8)
            for rank in range(comm.size)
            if rank != comm.rank and own.entries
        }
        self._total = np.empty(0 if self._one_hop else own.entries, np.float32)
        self._next_rank = 0

    def start(self, region: torch.Tensor) -> None:
        """Start summing `region`, shape (entries,), in place. Do not touch it meanwhile.

        Raises DlioError, naming the tensor, if an entry is NaN or infinite; UsageError for a region
        of another length, or if the last sum is not complete.
        """
        if len(region) != self.entries:
            raise UsageError(f"cannot sum {len(region)} entries: the region has {self.entries}")
        if self._phase is not _SumPhase.IDLE:
            raise UsageError("cannot start a sum before the last one is complete: call wait()")
        self._residual.keep()
        if self._comm.size == 1:
            self._residual.pay(region.numpy())
            return
        self._region = region.numpy()
        self._phase = _SumPhase.SHARES
        self._next_rank = 0
        for rank, share in self._shares.items():
            self._share_requests[rank] = self._comm.irecv(share, rank, self._tag)
        if self._one_hop:
            if self.entries:
                self._send(self._own, self._region, list(self._shares), self._tag)
                self._total = self._region
            return
        # Start with the next rank, so that ranks do not all send to the same one first.
        for step in range(1, self._comm.size):
            rank = (self._comm.rank + step) % self._comm.size
            part = self._parts[rank]
            if part.compressor.entries:
                part.request = self._comm.irecv(part.incoming, rank, self._tag + 1)
                self._send(part, self._region[part.span], [rank], self._tag)

    def advance(self) -> bool:
        """Drive the sum forward without waiting; True if it is complete."""
        if self._phase is _SumPhase.SHARES and self._add_shares():
            if not self._one_hop:
                self._tell_sum()
            self._phase = _SumPhase.SUMS
        if self._phase is _SumPhase.SUMS:
            for part in self._parts:
                if part.request is not None and part.request.done():
                    part.request = None
                    self._take(part, part.incoming)
            self._sends = [request for request in self._sends if not request.done()]
            if not self._sends and not any(part.request for part in self._parts):
                self._phase = _SumPhase.IDLE
        return self.done()

    def done(self) -> bool:
        """True if no sum is pending. Unlike `advance`, does not drive it forward."""
        return self._phase is _SumPhase.IDLE

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the sum is complete.

        Raises CommTimeout after `timeout_s` seconds; for None, if a single message takes longer
        than the communicator's deadline.
        """
        started = time.perf_counter()
        with self.traffic.waiting():
            while not self.advance():
                left_s = timeout_s
                if timeout_s is not None:
                    left_s = max(0.0, timeout_s - (time.perf_counter() - started))
                request, what = self._awaited()
                self._comm.wait([request], what, left_s)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the residual and the compressors' states for a checkpoint, between two sums."""
        return {
            "owed": torch.from_numpy(self.residual),
            **{
                f"part{number}": torch.from_numpy(part.compressor.state())
                for number, part in enumerate(self._parts)
            },
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present."""
        if "owed" in state:
            self.residual[:] = state["owed"].numpy()
        for number, part in enumerate(self._parts):
            if f"part{number}" in state:
                part.compressor.load_state(state[f"part{number}"].numpy())

    def reset(self, undo: bool) -> None:
        """Drop a sum that a loss has interrupted, and go on with the ranks that are left.

        The compressors forget their memory, because it refers to parts that no longer exist. With
        `undo` the residual is as before the sum was started.
        """
        receives = [part.request for part in self._parts if part.request is not None]
        # Buffers are in use until the requests end: dropping them here would have MPI write into
        # memory that Python has given back.
        await_end([*receives, *self._share_requests.values(), *self._sends])
        self._forget()
        self._cut()
        if undo:
            self._residual.put_back()

    def close(self) -> None:
        """Cancel a pending sum. No other rank may still be waiting for this one."""
        receives = [(each, self._shares[rank]) for rank, each in self._share_requests.items()]
        receives += [(part.request, part.incoming) for part in self._parts if part.request]
        for request, memory in receives:
            if not request.cancel():
                leave(request, memory)
        for request in self._sends:
            if not request.done():
                leave(request, *(part.outgoing for part in self._parts))
        self._forget()

    def _forget(self) -> None:
        self._share_requests.clear()
        self._sends.clear()
        for part in self._parts:
            part.request = None
        self._phase = _SumPhase.IDLE

    def _send(
        self, part: _OwnedPart, values: npt.NDArray[np.float32], ranks: Sequence[int], tag: int
    ) -> None:
        used = part.compressor.encode(values, self.residual[part.span], part.outgoing)
        for rank in ranks:
            self._sends.append(self._comm.isend(part.outgoing[:used], rank, tag))
        self.traffic.sent(len(ranks), len(ranks) * used)

    def _add_shares(self) -> bool:
        """Add arrived shares to this rank's part, in rank order; return True once all are added."""
        own = self._own
        if not own.compressor.entries:
            return True
        # In the order of ranks, not of arrival: float addition is not associative, and a run would
        # not give the same weights twice.
        while self._next_rank < self._comm.size:
            rank = self._next_rank
            if rank == 0:
                self._total[:] = 0
            if rank == self._comm.rank and self._one_hop:
                with np.errstate(over="ignore"):
                    own.compressor.add(own.outgoing, self._total)
            elif rank == self._comm.rank:
                # Compressing the own share would add an error, and save no byte.
                self._total += self._region[own.span]
            elif self._share_requests[rank].done():
                with np.errstate(over="ignore"):  # Compressing the sum reports it, with its tensor.
                    own.compressor.add(self._shares[rank], self._total)
                del self._share_requests[rank]
            else:
                return False
            self._next_rank += 1
        return True

    def _tell_sum(self) -> None:
        own = self._own
        if own.compressor.entries:
            self._send(own, self._total, list(self._shares), self._tag + 1)
            # The owner has the exact total, but takes the message: weights would differ between
            # ranks.
            self._take(own, own.outgoing)

    def _take(self, part: _OwnedPart, message: npt.NDArray[np.uint8]) -> None:
        here = self._region[part.span]
        here[:] = 0
        part.compressor.add(message, here)

    def _awaited(self) -> tuple[Request, str]:
        """Return one of the requests that the sum still waits for, and its name in errors."""
        if self._phase is _SumPhase.SHARES:
            rank = self._next_rank
            return self._share_requests[rank], f"compressed gradients of rank {rank}"
        for rank, part in enumerate(self._parts):
            if part.request is not None:
                return part.request, f"the sum of compressed gradients that rank {rank} owns"
        return self._sends[0], "compressed gradients to leave"


class NarrowSum(Sum):
    """A float64 region, summed as float32 by `total`: compressors know no other type.

    Their messages round to 16 bits or fewer, so that float64 would not be seen in them.
    """

    def __init__(self, total: Sum) -> None:
        super().__init__()
        self._total, self.traffic = total, total.traffic
        self._region = self._narrow = torch.empty(0)

    def start(self, region: torch.Tensor) -> None:
        self._region, self._narrow = region, region.float()
        self._total.start(self._narrow)

    def advance(self) -> bool:
        return self._total.advance()

    def wait(self, timeout_s: float | None = None) -> None:
        self._total.wait(timeout_s)
        self._region.copy_(self._narrow)

    def state(self) -> dict[str, torch.Tensor]:
        return self._total.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._total.load_state(state)

    def reset(self, undo: bool) -> None:
        self._total.reset(undo)

    def close(self) -> None:
        self._total.close()
