"""Sums over ranks of compressed gradients with error feedback.

Reduce-scatter and allgather (Dryden et al., MLHPC 2016): each rank owns a part of the region. The
owner receives every other rank's compressed share of that part, sums them in the order of ranks,
adds its residual, compresses the total and sends it to all. All ranks, the owner included, take the
decoded message, so that the result is bit-identical everywhere. A rank's own share of its own part
is added uncompressed.

Both hops have error feedback, in one residual as long as the region: in other ranks' parts it holds
the unsent part of this rank's shares, in the own part the unsent part of the sum. So at any time

    sums given out so far + residuals of all ranks = all gradients so far,

up to the rounding of float32 additions (and of `onebit`, see `compress`).

Two ranks send each other their messages of the whole region, and add both in the order of ranks:
as many bytes, in one hop, which leaves things out once and not twice.

With more ranks, p of them, and messages of b bytes for the whole region, a rank sends 2 (p - 1)
messages and about 2 (p - 1) / p b bytes: their number grows with p, their bytes do not. It decodes
and sums in the order of ranks as messages come.
"""

import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Request
from dlio.comm.waiting import leave
from dlio.errors import UsageError
from dlio.train.exchange.compress import make_compressor
from dlio.train.exchange.compress.layout import Piece, Scratch, pieces_of, split

__all__ = ["TAGS", "QuantisedAllreduce"]

TAGS = 2
"""Number of tags that a QuantisedAllreduce uses: its first tag and the next one."""


_ONE_HOP = 2
"""Ranks that send each other messages of the whole region: as many bytes, p - 1 times b, as
2 (p - 1) / p times b; with more ranks it would be more."""


class _Phase(Enum):
    IDLE = auto()
    SHARES = auto()
    """Waiting for the next rank's share of the own part."""
    SUMS = auto()
    """Waiting for the sums of the other parts, and for what was sent to leave."""


class _Part:
    """One rank's part of the region, as this rank sees it."""

    def __init__(self, pieces: Sequence[Piece], begin: int, name: str, scratch: Scratch) -> None:
        self.compressor = make_compressor(name, pieces, scratch)
        self.span = slice(begin, begin + self.compressor.entries)
        # What this rank sends to the owner, or, of its own part, the sum that it sends to all.
        self.outgoing = np.empty(self.compressor.max_bytes, np.uint8)
        # The owner's sum; not used of the own part.
        self.incoming = np.empty(self.compressor.max_bytes, np.uint8)
        self.request: Request | None = None
        """Receive of the owner's sum."""


class QuantisedAllreduce:
    """Sums one flat float32 region over all ranks, again and again, without blocking.

    `start` sends; `advance`, called now and then, moves it on; `wait` joins it. All ranks start
    the same regions in the same order and then wait for them in the same order; several may be
    under way, each with tags of its own. One rank: nothing is compressed, copied or sent.

    For one thread at a time. Owns its buffers, not the communicator.

    Args:
        tensors: (name, shape) of what lies in the region, one after the other.
        compressor: one of `compress.NAMES`; UsageError for any other.
        tag: the first of TAGS that nothing else on this communicator uses.
        scratch: memory that other regions of the same thread may use, too.
    """

    def __init__(
        self,
        comm: Communicator,
        tensors: Sequence[tuple[str, Sequence[int]]],
        compressor: str,
        tag: int,
        scratch: Scratch | None = None,
    ) -> None:
        self._comm = comm
        self._tag = tag
        pieces = pieces_of(tensors)
        self.entries = pieces[-1].stop if pieces else 0
        """Length of the region."""
        scratch = scratch or Scratch()
        alone = comm.size == 1
        self.residual = np.zeros(0 if alone else self.entries, np.float32)
        """Values that this rank has not sent yet, shape (entries,): part of a checkpoint."""
        self._one_hop = comm.size == _ONE_HOP
        self._parts: list[_Part] = []
        begin = 0
        for part in split(pieces, 1 if self._one_hop else comm.size):
            self._parts.append(_Part([] if alone else part, begin, compressor, scratch))
            begin = self._parts[-1].span.stop
        self._own = self._parts[0 if self._one_hop else comm.rank]
        """The part whose shares other ranks send to this one."""
        own = self._own.compressor
        self._shares = {
            rank: np.empty(own.max_bytes, np.uint8)
            for rank in range(comm.size)
            if rank != comm.rank and own.entries
        }
        self._share_requests: dict[int, Request] = {}
        self._total = np.empty(0 if self._one_hop else own.entries, np.float32)
        self._next_rank = 0
        self._sends: list[Request] = []
        self._phase = _Phase.IDLE
        self._region = np.empty(0, np.float32)
        self._wait_s = 0.0
        self._messages = 0
        self._bytes = 0

    def start(self, region: npt.NDArray[np.float32]) -> None:
        """Begin to sum `region`, shape (entries,), contiguous; it holds the sum when `done`, and
        must not be touched before.

        Raises DlioError, naming the tensor, where it is not finite; UsageError for another length
        or when the last sum has not been joined.
        """
        if len(region) != self.entries:
            raise UsageError(f"a region of {len(region)} entries where {self.entries} are summed")
        if self._phase is not _Phase.IDLE:
            raise UsageError("a sum was started before the last one was joined: call wait()")
        if self._comm.size == 1:
            return
        self._region = region
        self._phase = _Phase.SHARES
        self._next_rank = 0
        for rank, share in self._shares.items():
            self._share_requests[rank] = self._comm.irecv(share, rank, self._tag)
        if self._one_hop:
            if self.entries:
                self._send(self._own, region, list(self._shares), self._tag)
                self._total = region
            return
        # From the next rank on, so that not all send to the same one first.
        for step in range(1, self._comm.size):
            rank = (self._comm.rank + step) % self._comm.size
            part = self._parts[rank]
            if part.compressor.entries:
                part.request = self._comm.irecv(part.incoming, rank, self._tag + 1)
                self._send(part, region[part.span], [rank], self._tag)

    def advance(self) -> bool:
        """Drive the sum forward without waiting; True if it is complete."""
        if self._phase is _Phase.SHARES and self._add_shares():
            if not self._one_hop:
                self._tell_sum()
            self._phase = _Phase.SUMS
        if self._phase is _Phase.SUMS:
            self._take_sums()
            self._sends = [request for request in self._sends if not request.done()]
            if not self._sends and not any(part.request for part in self._parts):
                self._phase = _Phase.IDLE
        return self.done()

    def done(self) -> bool:
        """True if no sum is under way; drives nothing forward."""
        return self._phase is _Phase.IDLE

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the sum is there.

        Raises CommTimeout when that takes longer than `timeout_s` seconds, or, by default, when
        any one message takes longer than the communicator's own deadline.
        """
        started = time.perf_counter()
        try:
            while not self.advance():
                left_s = timeout_s
                if timeout_s is not None:
                    left_s = max(0.0, timeout_s - (time.perf_counter() - started))
                self._comm.wait([self._awaited()], self._what(), left_s)
        finally:
            self._wait_s += time.perf_counter() - started

    def flush(self, region: npt.NDArray[np.float32]) -> None:
        """Overwrite `region` with the sum of all ranks' residuals, and clear them. Collective.

        At an epoch's end: the sum is applied once, so that nothing of the epoch is lost.

        Raises UsageError while a sum is under way, CommTimeout.
        """
        if not self.done():
            raise UsageError("residuals were asked for while a sum was under way: call wait()")
        if self._comm.size == 1:
            region[:] = 0
            return
        region[:] = self.residual
        started = time.perf_counter()
        self._comm.wait([self._comm.iallreduce(region)], "the residuals of the other ranks")
        self._wait_s += time.perf_counter() - started
        self._messages += 1
        self._bytes += region.nbytes
        self.residual[:] = 0

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint, between two sums."""
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

    def statistics(self) -> dict[str, float]:
        """Since the beginning: `wait_s` seconds in wait and flush, `messages` and `bytes` sent; a
        flush counts as one message of the region's length."""
        return {
            "wait_s": self._wait_s,
            "messages": float(self._messages),
            "bytes": float(self._bytes),
        }

    def close(self) -> None:
        """Give up what is under way. Nobody may be waiting for this rank any more."""
        receives = [(each, self._shares[rank]) for rank, each in self._share_requests.items()]
        receives += [(part.request, part.incoming) for part in self._parts if part.request]
        for request, memory in receives:
            if not request.cancel():
                leave(request, memory)
        for request in self._sends:
            if not request.done():
                leave(request, *(part.outgoing for part in self._parts))
        self._share_requests.clear()
        self._sends.clear()
        for part in self._parts:
            part.request = None
        self._phase = _Phase.IDLE

    def _send(
        self, part: _Part, values: npt.NDArray[np.float32], ranks: Sequence[int], tag: int
    ) -> None:
        used = part.compressor.encode(values, self.residual[part.span], part.outgoing)
        for rank in ranks:
            self._sends.append(self._comm.isend(part.outgoing[:used], rank, tag))
        self._messages += len(ranks)
        self._bytes += len(ranks) * used

    def _add_shares(self) -> bool:
        """Add arrived shares to the own part's total, in rank order; True once all are added."""
        own = self._own
        if not own.compressor.entries:
            return True
        while self._next_rank < self._comm.size:
            rank = self._next_rank
            if rank == 0:
                self._total[:] = 0
            if rank == self._comm.rank and self._one_hop:
                with np.errstate(over="ignore"):
                    own.compressor.add(own.outgoing, self._total)
            elif rank == self._comm.rank:
                self._total += self._region[own.span]
            elif self._share_requests[rank].done():
                with np.errstate(over="ignore"):  # Found and named when the sum is compressed.
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
            self._take(own, own.outgoing)

    def _take_sums(self) -> None:
        for part in self._parts:
            if part.request is not None and part.request.done():
                part.request = None
                self._take(part, part.incoming)

    def _take(self, part: _Part, message: npt.NDArray[np.uint8]) -> None:
        here = self._region[part.span]
        here[:] = 0
        part.compressor.add(message, here)

    def _awaited(self) -> Request:
        """One of the requests that the sum still waits for."""
        if self._phase is _Phase.SHARES:
            return self._share_requests[self._next_rank]
        for part in self._parts:
            if part.request is not None:
                return part.request
        return self._sends[0]

    def _what(self) -> str:
        if self._phase is _Phase.SHARES:
            return f"compressed gradients of rank {self._next_rank}"
        for rank, part in enumerate(self._parts):
            if part.request is not None:
                return f"the sum of compressed gradients that rank {rank} owns"
        return "compressed gradients to leave"
