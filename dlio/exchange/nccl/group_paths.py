"""The sum of a bucket in its device's memory.

Each is a `dlio.exchange.paths.Path`, with the algorithm, the residuals, the state and the
counts of its twin on the host: `AllreduceSum`, `QuantisedAllreduce` and `RoutedSum`. No rank of
these may be lost: then the host's paths are chosen.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from dlio.exchange.buckets import Bucket
from dlio.exchange.compress.message_layout import pieces_of, split
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.nccl.compressors import make_codec
from dlio.exchange.nccl.device_group import DeviceGroup, Flight
from dlio.exchange.nccl.side_stream import SideStream, StreamWaits
from dlio.exchange.nccl.tensor_codec import TensorCodec
from dlio.exchange.routes import route

_ONE_HOP: Final = 2
"""Number of ranks that exchange their whole regions, as those of `QuantisedAllreduce`."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupMemory:
    """The group of an exchange, and the streams of its device."""

    group: DeviceGroup
    side: SideStream
    waits: StreamWaits

    @classmethod
    def of(cls, group: DeviceGroup) -> "GroupMemory":
        return cls(group, SideStream(group.device), StreamWaits(group.device))


def group_path(bucket: Bucket, setting: ExchangeContext, memory: GroupMemory) -> "_GroupPath":
    """Create the path that an exchange's topology and compressor need."""
    spec = setting.spec
    if spec.topology in ("hierarchical", "tree", "star"):
        return RoutedPath(bucket, setting, memory)
    if spec.codec is not None:
        return CompressedPath(bucket, setting, memory)
    return SumPath(bucket, memory)


class _GroupPath:
    """A path whose `start` launches all of a sum, on the side stream."""

    def __init__(self, bucket: Bucket, memory: GroupMemory) -> None:
        self._bucket, self._memory, self._group = bucket, memory, memory.group
        self._mark: torch.cuda.Event | None = None
        self._wait_s = 0.0
        self._messages = self._bytes = 0.0

    def start(self) -> None:
        with self._memory.side.after_current():
            self._sum(self._bucket.flat)
        self._mark = self._memory.side.mark()

    def _sum(self, region: torch.Tensor) -> None:
        """Launch the sum of the region, in place, on the current stream."""
        raise NotImplementedError

    def advance(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def wait(self) -> None:
        began = time.perf_counter()
        with self._memory.waits.timed():
            self._join()
        self._wait_s += time.perf_counter() - began

    def _join(self) -> None:
        self._memory.side.join(self._mark)

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        return {"wait_s": self._wait_s, "messages": self._messages, "bytes": self._bytes}

    def reset(self, undo: bool) -> None:
        raise NotImplementedError("no rank of a device's group may be lost")

    def close(self) -> None:
        self._join()


class SumPath(_GroupPath):
    """The library's own sum, on the group's stream."""

    _flight: Flight | None = None

    def start(self) -> None:
        hops = 2 * (self._group.size - 1)
        self._messages += hops
        self._bytes += hops * self._bucket.flat.nbytes / self._group.size
        self._flight = self._group.sum(self._bucket.flat, "the sum of a bucket")

    def _join(self) -> None:
        if self._flight is not None:
            flight, self._flight = self._flight, None
            flight.wait()

    def close(self) -> None:
        self._flight = None


@dataclass(slots=True, eq=False)
class _RankPart:
    """One rank's part of the region."""

    codec: TensorCodec
    span: slice


class CompressedPath(_GroupPath):
    """Reduce-scatter and allgather of compressed parts, as `QuantisedAllreduce`."""

    def __init__(self, bucket: Bucket, setting: ExchangeContext, memory: GroupMemory) -> None:
        super().__init__(bucket, memory)
        group, spec = self._group, setting.spec
        assert spec.codec is not None
        self._decay = spec.decay
        self._one_hop = group.size == _ONE_HOP
        pieces = pieces_of(bucket.tensors)
        self._parts: list[_RankPart] = []
        at = 0
        for part in split(pieces, 1 if self._one_hop else group.size):
            codec = make_codec(spec.codec, part, setting.scratch, group.device)
            self._parts.append(_RankPart(codec, slice(at, at + codec.entries)))
            at += codec.entries
        self._owed = torch.zeros(at, device=group.device)
        own = self._parts[0 if self._one_hop else group.rank].codec.max_bytes
        parts = self._parts * group.size if self._one_hop else self._parts
        others = [rank != group.rank for rank in range(group.size)]
        self._to = [each.codec.max_bytes * other for each, other in zip(parts, others, strict=True)]
        """Bytes of this rank's share of each rank's part."""
        self._shares = [own * other for other in others]
        """Bytes of each rank's share of this rank's part."""

    def _sum(self, region: torch.Tensor) -> None:
        if self._decay < 1.0:
            self._owed *= self._decay
        if self._one_hop:
            self._exchange(region)
        else:
            self._add_shares(region)

    def _exchange(self, region: torch.Tensor) -> None:
        """Exchange messages of the whole region with the only other rank."""
        (part,) = self._parts
        if not part.codec.entries:
            return
        mine = self._message(sum(self._to))
        part.codec.encode(region, self._owed, mine)
        theirs = self._deal(mine, self._to, self._shares)
        region.zero_()
        for rank in range(self._group.size):
            part.codec.add(mine if rank == self._group.rank else theirs, region)

    def _add_shares(self, region: torch.Tensor) -> None:
        own = self._parts[self._group.rank]
        shares = self._message(sum(self._to))
        for part, message in zip(self._parts, torch.split(shares, self._to), strict=True):
            if len(message):
                part.codec.encode(region[part.span], self._owed[part.span], message)
        arrived = self._deal(shares, self._to, self._shares)
        total = torch.zeros_like(region[own.span])
        for rank, message in enumerate(torch.split(arrived, self._shares)):
            if rank == self._group.rank:
                total += region[own.span]
            elif len(message):
                own.codec.add(message, total)
        mine = self._message(own.codec.max_bytes)
        if len(mine):
            own.codec.encode(total, self._owed[own.span], mine)
        sums = self._deal(mine.repeat(self._group.size - 1), self._shares, self._to)
        for rank, message in enumerate(torch.split(sums, self._to)):
            part = self._parts[rank]
            region[part.span] = 0
            if part.codec.entries:
                part.codec.add(mine if rank == self._group.rank else message, region[part.span])

    def _deal(
        self, outgoing: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        incoming = self._message(sum(received))
        what = "compressed values of the other ranks"
        self._group.deal(outgoing, sent, incoming, received, what).wait()
        self._messages += sum(count > 0 for count in sent)
        self._bytes += sum(sent)
        return incoming

    def _message(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._group.device)

    def state(self) -> dict[str, torch.Tensor]:
        return {
            "owed": self._owed.cpu(),
            **{f"part{k}": part.codec.state() for k, part in enumerate(self._parts)},
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if "owed" in state:
            self._owed.copy_(state["owed"])
        for number, part in enumerate(self._parts):
            if f"part{number}" in state:
                part.codec.load_state(state[f"part{number}"])


class RoutedPath(_GroupPath):
    """Messages along a route, as `RoutedSum`; compressed ones have no head with their length."""

    def __init__(self, bucket: Bucket, setting: ExchangeContext, memory: GroupMemory) -> None:
        super().__init__(bucket, memory)
        spec, device = setting.spec, self._group.device
        compressed = spec.codec is not None
        self._ops = route(spec.topology, self._group.rank, setting.nodes(), compressed)
        self._codec: TensorCodec | None = None
        if spec.codec is not None:
            self._codec = make_codec(spec.codec, pieces_of(bucket.tensors), setting.scratch, device)
        self._owed = torch.zeros(self._codec.entries if self._codec else 0, device=device)

    def _sum(self, region: torch.Tensor) -> None:
        down: torch.Tensor | None = None
        """The message that all ranks take in the end."""
        for number, (kind, peer) in enumerate(self._ops):
            outgoing = incoming = None
            if kind in ("send", "swap"):
                outgoing = region if self._codec is None else down
                if outgoing is None:
                    outgoing = self._encoded(region)
                    if not any(op.kind == "take" for op in self._ops[number:]):
                        down = outgoing  # The root takes the decoded sum, too.
                        self._take(down, region)
                self._messages += 1
                self._bytes += outgoing.nbytes
            if kind != "send":
                incoming = torch.empty_like(region) if self._codec is None else self._message()
            self._group.pair(
                None if outgoing is None else (outgoing, peer),
                None if incoming is None else (incoming, peer),
                f"a bucket's sum with rank {peer}",
            ).wait()
            if incoming is None:
                continue
            if kind == "take":
                down = incoming
                self._take(down, region)
            elif self._codec is None:
                region += incoming
            else:
                self._codec.add(incoming, region)

    def _message(self) -> torch.Tensor:
        count = 0 if self._codec is None else self._codec.max_bytes
        return torch.empty(count, dtype=torch.uint8, device=self._group.device)

    def _encoded(self, region: torch.Tensor) -> torch.Tensor:
        message = self._message()
        assert self._codec is not None
        self._codec.encode(region, self._owed, message)
        return message

    def _take(self, message: torch.Tensor, region: torch.Tensor) -> None:
        if self._codec is None:
            region.copy_(message)
        else:
            region.zero_()
            self._codec.add(message, region)

    def state(self) -> dict[str, torch.Tensor]:
        if self._codec is None:
            return {}
        return {"owed": self._owed.cpu(), "codec": self._codec.state()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._codec is not None and "owed" in state:
            self._owed.copy_(state["owed"])
        if self._codec is not None and "codec" in state:
            self._codec.load_state(state["codec"])
