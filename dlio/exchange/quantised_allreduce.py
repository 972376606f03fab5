"""Sums over ranks of compressed gradients with error feedback.

Reduce-scatter and allgather (Dryden et al., MLHPC 2016): each rank owns a part of the region. The
owner receives every other rank's compressed share of that part, sums them in the order of ranks,
adds its residual, compresses the total and sends it to all. All ranks, the owner included, take the
decoded message, so that the result is bit-identical everywhere. A rank's own share of its own part
is added uncompressed.

From 5 ranks on shares go there in several hops, along the dimensions of a grid of the ranks (see
`dlio.plan.sum_grid`): a rank gets shares of a block of parts, adds them, and sends shares of the
partial sum on, compressed once more. Compressed sums go back the same ways and are forwarded as
they are.

Every hop has error feedback, in one residual as long as the region: in the parts that a hop sends
away it holds the unsent part of its messages, in the own part that of the sum. No entry is
sent by two hops of a rank. So at any time

    all sums returned so far + residuals of all ranks = all gradients so far,

up to the rounding of float32 additions (and of `onebit`, see `compress`). The values that all
steps together leave out are the residuals, and do not grow with the steps. With `int8`, where an
entry of a rank is at most a, its sum over p ranks misses at most (d + 1) p a / 100 for d hops each
way: hops round fewer, but larger partial sums.

Two ranks need only one hop: they exchange messages of the whole region, and both add them in the
order of ranks. This sends as many bytes, and compresses once instead of twice.

With p > 2 ranks and messages of b bytes for the whole region, a rank sends about 2 b (p - 1) / p
bytes, in 2 (p - 1) messages up to 4 ranks, and a number that grows with log p for more. Shares are
decoded and added as they arrive, in the order of ranks.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import await_end, leave
from dlio.errors import CommError, UsageError
from dlio.exchange.compress import Compressor, make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, Pieces, cuts, pieces_of, within
from dlio.exchange.sums import ErrorFeedback, Sum, Tensors
from dlio.plan.sum_grid import hops, owners
from dlio.util.units import counted

TAGS = 2
"""Number of tags that a QuantisedAllreduce uses: its first tag and the next one."""
_ONE_HOP = 2
"""Number of ranks for which one hop is used. It sends (p - 1) b bytes instead of 2 b (p - 1) / p:
the same for 2 ranks, more for others."""
_LENGTH: Final = np.dtype(np.int64)
"""In a grid, messages of sums begin with the lengths of their parts: ranks forward them."""


class _SumPhase(Enum):
    IDLE = auto()
    SHARES = auto()
    """Waiting for the next rank's share of the parts that this rank adds."""
    SUMS = auto()
    """Waiting for the sums of the other parts, and for this rank's messages to leave."""


class _RegionBlock:
    """Consecutive entries of the region that travel in one message."""

    def __init__(self, pieces: Pieces, begin: int, name: str, scratch: ChunkScratch) -> None:
        self.compressor = make_compressor(name, pieces, scratch)
        self.entries = self.compressor.entries
        self.span = slice(begin, begin + self.entries)
        self.message = np.empty(0, np.uint8)
        """The sum, if this is one rank's part, as that rank has compressed it."""


class _SentShare:
    """The values that one other rank gets, and the sums that it sends back."""

    def __init__(
        self, rank: int, block: _RegionBlock, parts: Sequence[_RegionBlock], incoming: int
    ) -> None:
        self.rank, self.block, self.parts = rank, block, parts
        self.outgoing = np.empty(block.compressor.max_bytes, np.uint8)
        self.incoming = np.empty(incoming, np.uint8)
        self.request: Request | None = None
        """Pending receive of the sums."""


class _HopBuffers:
    """This rank's side of a hop: `dlio.plan.sum_grid.SumHop` with buffers."""

    def __init__(
        self, rank: int, sources: Sequence[int], block: _RegionBlock, shares: Sequence[_SentShare]
    ) -> None:
        self.shares = shares
        self.block = block
        """The entries that this rank adds in this hop."""
        self.parts: Sequence[_RegionBlock] = [block]
        self.order = sorted([*sources, rank])
        """The ranks whose shares are added, this one included, in the order of additions."""
        length = block.compressor.max_bytes
        self.sources = {each: np.empty(length, np.uint8) for each in sources if block.entries}
        self.total = np.empty(block.entries, np.float32)
        self.outgoing = np.empty(0, np.uint8)
        """In a grid, the sums of `parts` in one message, sent to all sources."""

    def pending(self) -> Iterator[_SentShare]:
        """Yield the shares whose sums have not come back."""
        return (share for share in self.shares if share.request is not None)


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
        size, rank = self._comm.size, self._comm.rank
        # One hop saves time, not accuracy: `onebit` on two ranks trains no better by it.
        self._one_hop, self._in_grid = size == _ONE_HOP, False
        self._hops: list[_HopBuffers] = []
        self._at = self._next_rank = 0
        """The hop under way, and the next one to add of the ranks in its order."""
        if size == 1:
            self._block(0, 0)  # Refuses an unknown compressor.
        elif self._one_hop:
            self._hops = [_HopBuffers(rank, [1 - rank], self._block(0, self.entries), [])]
        else:
            self._cut_for_grid()
        last = self._hops[-1].block.compressor.max_bytes if self._hops else 0
        self._own_message = np.empty(last, np.uint8)
        """The own part's sum, compressed; in one hop, this rank's values."""

    def _cut_for_grid(self) -> None:
        size, rank = self._comm.size, self._comm.rank
        count = owners(size, self.entries)
        ends = cuts(self._pieces, count)
        # With fewer owners than ranks, the others have empty parts.
        ends = [ends[place * count // size] for place in range(size + 1)]
        spans = enumerate(pairwise(ends))
        parts = {place: self._block(*span) for place, span in spans if span[0] < span[1]}
        plan = hops(size, rank)
        self._in_grid = len(plan) > 1

        def block(places: range) -> tuple[_RegionBlock, list[_RegionBlock]]:
            """Return the block of some parts, and those of the parts that are not empty."""
            inside = [parts[place] for place in places if place in parts]
            if len(inside) == 1:
                return inside[0], inside
            return self._block(ends[places.start], ends[places.stop]), inside

        for hop in plan:
            shares = []
            for peer, places in hop.shares:
                share, inside = block(places)
                if inside:
                    shares.append(_SentShare(peer, share, inside, self._longest(inside)))
            added, inside = block(hop.parts)
            self._hops.append(_HopBuffers(rank, hop.sources, added, shares))
            self._hops[-1].parts = inside
            if self._in_grid:
                self._hops[-1].outgoing = np.empty(self._longest(inside), np.uint8)

    def _block(self, start: int, stop: int) -> _RegionBlock:
        pieces = within(self._pieces, start, stop)
        return _RegionBlock(pieces, start, self._name, self._scratch)

    def _longest(self, parts: Sequence[_RegionBlock]) -> int:
        """Return the largest length of a message with the sums of these parts."""
        heads = _LENGTH.itemsize * len(parts) if self._in_grid else 0
        return heads + sum(part.compressor.max_bytes for part in parts)

    def start(self, region: torch.Tensor) -> None:
        """Start summing `region`, shape (entries,), in place. Do not touch it meanwhile.

        Raises DlioError, naming the tensor, if an entry is NaN or infinite; UsageError for a region
        of another length, or if the last sum is not complete.
        """
        if len(region) != self.entries:
            raise UsageError(
                f"cannot sum {counted(len(region), 'entry')}: the region has {self.entries}"
            )
        if self._phase is not _SumPhase.IDLE:
            raise UsageError("cannot start a sum before the last one is complete: call wait()")
        self._residual.keep()
        if self._comm.size == 1:
            self._residual.pay(region.numpy())
            return
        self._region = region.numpy()
        self._phase = _SumPhase.SHARES
        self._at = self._next_rank = 0
        for hop in self._hops:
            for rank, share in hop.sources.items():
                self._share_requests[rank] = self._comm.irecv(share, rank, self._tag)
            for each in hop.shares:
                each.request = self._comm.irecv(each.incoming, each.rank, self._tag + 1)
        if self._one_hop:
            only = self._hops[0]
            only.total = self._region
            if self.entries:
                self._encode_own(self._region)
                self._send(only.block.message, list(only.sources), self._tag)
        else:
            self._send_shares()

    def advance(self) -> bool:
        """Drive the sum forward without waiting; True if it is complete."""
        while self._phase is _SumPhase.SHARES and self._add_shares():
            if self._at + 1 < len(self._hops):
                self._at, self._next_rank = self._at + 1, 0
                self._send_shares()
            else:
                self._phase = _SumPhase.SUMS
                if not self._one_hop:
                    self._tell_sum()
        if self._phase is _SumPhase.SUMS:
            for share in [each for hop in self._hops for each in hop.pending()]:
                if share.request is not None and share.request.done():
                    share.request = None
                    self._take_sums(share)
            while self._at and not any(self._hops[self._at].pending()):
                self._at -= 1
                self._tell_sums(self._hops[self._at])
            self._sends = [request for request in self._sends if not request.done()]
            if not self._at and not self._sends and not any(self._hops[0].pending()):
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
        memories = {name: torch.from_numpy(each.state()) for name, each in self._encoders()}
        return {"owed": torch.from_numpy(self.residual), **memories}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present."""
        if "owed" in state:
            self.residual[:] = state["owed"].numpy()
        for name, each in self._encoders():
            if name in state:
                each.load_state(state[name].numpy())

    def reset(self, undo: bool) -> None:
        """Drop a sum that a loss has interrupted, and go on with the ranks that are left.

        The compressors forget their memory, because it refers to parts that no longer exist. With
        `undo` the residual is as before the sum was started.
        """
        receives = [each.request for each in self._awaiting() if each.request is not None]
        # Buffers are in use until the requests end: dropping them here would have MPI write into
        # memory that Python has given back.
        await_end([*receives, *self._share_requests.values(), *self._sends])
        self._forget()
        self._cut()
        if undo:
            self._residual.put_back()

    def close(self) -> None:
        """Cancel a pending sum. No other rank may still be waiting for this one."""
        shares = {rank: each for hop in self._hops for rank, each in hop.sources.items()}
        receives = [(each, shares[rank]) for rank, each in self._share_requests.items()]
        receives += [(each.request, each.incoming) for each in self._awaiting() if each.request]
        for request, memory in receives:
            if not request.cancel():
                leave(request, memory)
        sent = [share.outgoing for hop in self._hops for share in hop.shares]
        sent += [self._own_message, *(hop.outgoing for hop in self._hops)]
        for request in self._sends:
            if not request.done():
                leave(request, *sent)
        self._forget()

    def _forget(self) -> None:
        self._share_requests.clear()
        self._sends.clear()
        for share in self._awaiting():
            share.request = None
        self._phase = _SumPhase.IDLE

    def _awaiting(self) -> list[_SentShare]:
        return [share for hop in self._hops for share in hop.pending()]

    def _encoders(self) -> Iterator[tuple[str, Compressor]]:
        """Yield the compressors of this rank's messages, and their names in a checkpoint."""
        for number, hop in enumerate(self._hops):
            kind = f"hop{number}-" if len(self._hops) > 1 else "part"
            for share in hop.shares:
                yield f"{kind}{share.rank}", share.block.compressor
            if hop is self._hops[-1]:
                own = 0 if self._one_hop else self._comm.rank
                yield f"{kind}{own}", hop.block.compressor

    def _encode_own(self, values: npt.NDArray[np.float32]) -> None:
        own = self._hops[-1].block
        used = own.compressor.encode(values, self.residual[own.span], self._own_message)
        own.message = self._own_message[:used]

    def _send(self, message: npt.NDArray[np.uint8], ranks: Sequence[int], tag: int) -> None:
        for rank in ranks:
            self._sends.append(self._comm.isend(message, rank, tag))
        self.traffic.sent(len(ranks), len(ranks) * len(message))

    def _values(self, span: slice) -> npt.NDArray[np.float32]:
        """Return values to add in the hop under way: the region's, or the last hop's sum."""
        if not self._at:
            return self._region[span]
        last = self._hops[self._at - 1]
        begin = last.block.span.start
        return last.total[span.start - begin : span.stop - begin]

    def _send_shares(self) -> None:
        for share in self._hops[self._at].shares:
            block = share.block
            values, residual = self._values(block.span), self.residual[block.span]
            used = block.compressor.encode(values, residual, share.outgoing)
            self._send(share.outgoing[:used], [share.rank], self._tag)

    def _add_shares(self) -> bool:
        """Add the shares of a hop that have arrived; return True once all are added."""
        hop = self._hops[self._at]
        if not hop.block.entries:
            return True
        # In the order of ranks, not of arrival: float addition is not associative, and a run would
        # not give the same weights twice.
        while self._next_rank < len(hop.order):
            rank = hop.order[self._next_rank]
            if self._next_rank == 0:
                hop.total[:] = 0
            if rank == self._comm.rank and self._one_hop:
                with np.errstate(over="ignore"):
                    hop.block.compressor.add(hop.block.message, hop.total)
            elif rank == self._comm.rank:
                # Compressing the own share would add an error, and save no byte.
                hop.total += self._values(hop.block.span)
            elif self._share_requests[rank].done():
                with np.errstate(over="ignore"):  # Compressing the sum reports it, with its tensor.
                    hop.block.compressor.add(hop.sources[rank], hop.total)
                del self._share_requests[rank]
            else:
                return False
            self._next_rank += 1
        return True

    def _tell_sum(self) -> None:
        hop = self._hops[-1]
        if hop.block.entries:
            self._encode_own(hop.total)
            self._tell_sums(hop)
            # The owner has the exact total, but takes the message: weights would differ between
            # ranks.
            self._take(hop.block)

    def _tell_sums(self, hop: _HopBuffers) -> None:
        """Send the sums of a hop's parts, as their owners have compressed them, to its sources."""
        if not hop.parts:
            return
        messages = [part.message for part in hop.parts]
        if not self._in_grid:
            self._send(messages[0], list(hop.sources), self._tag + 1)
            return
        lengths = np.array([len(each) for each in messages], _LENGTH).view(np.uint8)
        size = len(lengths) + sum(map(len, messages))
        np.concatenate([lengths, *messages], out=hop.outgoing[:size])
        self._send(hop.outgoing[:size], list(hop.sources), self._tag + 1)

    def _take_sums(self, share: _SentShare) -> None:
        if not self._in_grid:
            share.parts[0].message = share.incoming
        else:
            at = _LENGTH.itemsize * len(share.parts)
            lengths = share.incoming[:at].view(_LENGTH).tolist()
            if min(lengths) < 0 or at + sum(lengths) > len(share.incoming):
                raise CommError(f"the sums of rank {share.rank} are damaged: invalid lengths")
            for part, length in zip(share.parts, lengths, strict=True):
                part.message = share.incoming[at : at + length]
                at += length
        for part in share.parts:
            self._take(part)

    def _take(self, part: _RegionBlock) -> None:
        here = self._region[part.span]
        here[:] = 0
        part.compressor.add(part.message, here)

    def _awaited(self) -> tuple[Request, str]:
        """Return one of the requests that the sum still waits for, and its name in errors."""
        if self._phase is _SumPhase.SHARES:
            rank = self._hops[self._at].order[self._next_rank]
            return self._share_requests[rank], f"compressed gradients of rank {rank}"
        for hop in reversed(self._hops):
            for share in hop.pending():
                if share.request is not None:
                    return share.request, f"the sums of compressed gradients from rank {share.rank}"
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
