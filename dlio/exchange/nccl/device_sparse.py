"""Sparse compression on a device: the messages of `dlio.exchange.compress.sparse`.

A message has the host's three parts. Each tensor's bytes have room for the most entries that it
sends, and what is left of it are escape bytes, which stand for no entry: so a message's length is
known, and the host's compressor can read it. It is as long as the longest of the host's: those that
send as many entries as they should are about a sixth shorter.

Lists of entries have that length, too, and no step depends on how many of them are in use: those
that are not are written to one more element behind the list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from dlio.exchange.compress.message_layout import Piece
from dlio.exchange.compress.sparse import (
    ESCAPE,
    HEAD,
    LONGEST,
    NONE,
    POWERS,
    SIGN,
    TRITS,
    TensorPlan,
    tensors_of,
)
from dlio.exchange.nccl.device_int8 import DeviceSmallTensors
from dlio.exchange.nccl.levels import (
    adapted,
    level_at,
    mean_beyond,
    order_statistic,
    sample_of,
    threshold_cut,
)
from dlio.exchange.nccl.numbers import bytes_of, in_rows, typed
from dlio.exchange.nccl.tensor_codec import DeviceCodec

_Cut = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_SEED = 0
_LOWER = 0xFFFF


@dataclass(frozen=True, slots=True)
class _SentEntries:
    """The entries of one tensor that a message holds."""

    kept: torch.Tensor
    """Mask over the entries that were to be sent."""
    negative: torch.Tensor
    """Mask of the negative ones."""
    values: torch.Tensor
    """The values sent; 0 for entries that are not."""
    word: torch.Tensor
    """Both signs' values as bfloat16, positive ones in the lower half; int32 without dimensions."""


class DeviceSparse(DeviceCodec):
    """A compressor that sends the entries of the largest magnitudes.

    Args:
        thresholds: levels are adapted thresholds; otherwise means.
        dense: all tensors send ternary digits.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        device: torch.device,
        thresholds: bool = False,
        dense: bool = False,
    ) -> None:
        super().__init__(pieces, device)
        self._thresholds = thresholds
        self._messages = 0
        self._small = DeviceSmallTensors(pieces, device)
        self._tensors = tensors_of(pieces, dense)
        count = len(self._tensors)
        self._begins = torch.zeros(count, dtype=torch.int64, device=device)
        """By tensor, the entry at which the search for entries to send begins."""
        self._steps = torch.full((count,), NONE, dtype=torch.int64, device=device)
        """By tensor, the number of its threshold."""
        self._powers = torch.from_numpy(POWERS).to(device)
        self._small_at = 4 * HEAD * count
        self._entries_at = self._small_at + self._small.max_bytes
        self.max_bytes = self._entries_at + sum(map(_room, self._tensors))

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        self._messages += 1
        small = self._small.parts(v)
        heads, entries = [], []
        for number, tensor in enumerate(self._tensors):
            here = v[tensor.piece.start : tensor.piece.stop]
            level = self._level(number, here)
            begin = self._begins[number].clone()
            if tensor.whole:
                word, coded = self._digits(here, level)
            else:
                word, coded = self._listed(number, here, level)
            length = torch.full_like(word, _room(tensor))
            heads.append(torch.stack([word, begin.to(torch.int32), length]))
            entries.append(coded)
        head = [bytes_of(torch.cat(heads))] if heads else []
        return [*head, *small, *entries]

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        self._small.add(message[self._small_at :], into)
        heads = typed(message[: self._small_at], torch.int32).view(-1, HEAD)
        at = self._entries_at
        for number, tensor in enumerate(self._tensors):
            coded = message[at : at + _room(tensor)]
            at += _room(tensor)
            word, begin = heads[number, 0], heads[number, 1].long()
            positive = (word << 16).view(torch.float32)
            negative = (word & ~_LOWER).view(torch.float32)
            here = into[tensor.piece.start : tensor.piece.stop]
            if tensor.whole:
                digits = ((coded[:, None] // self._powers) % 3).view(-1)[: len(here)]
                here += torch.where(digits == 1, positive, torch.where(digits == 0, 0.0, negative))
                continue
            over = (coded & (SIGN - 1)).long()
            ahead = (over + 1).clamp(max=LONGEST).cumsum(0) - 1
            is_entry = over != ESCAPE
            q = torch.where(coded >= SIGN, negative, positive)
            places = torch.where(is_entry, (ahead + begin) % len(here), 0)
            here.index_add_(0, places, torch.where(is_entry, q, 0.0))

    def state(self) -> torch.Tensor:
        messages = torch.tensor([self._messages])
        return torch.cat([messages, self._begins.cpu(), self._steps.cpu()])

    def load_state(self, state: torch.Tensor) -> None:
        self._messages = int(state[0])
        begins, steps = state[1:].tensor_split(2)
        self._begins.copy_(begins)
        self._steps.copy_(steps)

    def _level(self, number: int, v: torch.Tensor) -> torch.Tensor:
        """Return the smallest magnitude to send; infinity if all entries are zero."""
        tensor = self._tensors[number]
        level = order_statistic(sample_of(v, _SEED, self._messages, number), tensor.ratio)
        if self._thresholds and not tensor.whole:
            self._steps[number], level = adapted(self._steps[number], level)
        return level_at(level, v)

    def _digits(self, v: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Subtract a dense tensor's sent values; return (word, ternary digits as bytes)."""
        sent = _send(v, v.abs() >= level, level, mean_beyond)
        v -= sent.values
        digits = sent.kept.to(torch.uint8) * (1 + sent.negative.to(torch.uint8))
        padded = in_rows(digits, TRITS)
        return sent.word, (padded * self._powers).sum(1, dtype=torch.uint8)

    def _listed(
        self, number: int, v: torch.Tensor, level: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Subtract a tensor's sent values; return (word, bytes of its entries)."""
        size, room, begin = len(v), self._tensors[number].room, self._begins[number].clone()
        reached = v.abs() >= level
        total = reached.sum()
        # One more than fit: the first that does not is the next message's first.
        ahead = _first(reached, room + 1, begin)
        used = torch.arange(room + 1, device=v.device) < total
        fit = used & ((1 + _escapes(ahead)).cumsum(0) <= room)
        count = fit.sum()
        follows = (ahead.take(count.clamp(max=room)) + begin) % size
        self._begins[number] = torch.where(count < total, follows, 0)
        places = torch.where(fit, (ahead + begin) % size, 0)
        cut = threshold_cut if self._thresholds else mean_beyond
        sent = _send(v[places], fit, level, cut)
        v.index_add_(0, places, -sent.values)
        return sent.word, _steps(ahead, sent, room)


def _room(tensor: TensorPlan) -> int:
    """Bytes of a tensor's entries."""
    return -(-tensor.piece.size // TRITS) if tensor.whole else tensor.room


def _send(v: torch.Tensor, chosen: torch.Tensor, level: torch.Tensor, cut: _Cut) -> _SentEntries:
    """Find the values to send for the chosen entries of v."""
    sizes, negative = v.abs(), torch.signbit(v)
    values = torch.zeros_like(v)
    bits = []
    for side in (chosen & ~negative, chosen & negative):
        least, mean = cut(sizes, side, level)
        # Truncated to bfloat16. A side without entries sends nothing.
        of_side = torch.where(side.any(), mean, 0.0).float().view(torch.int32) >> 16
        bits.append(of_side)
        q = (of_side << 16).view(torch.float32)
        values = torch.where(side & (sizes >= least), q, values)
    kept = values != 0
    word = bits[0] + ((bits[1] | 1 << 15) - (1 << 16)) * (1 << 16)
    return _SentEntries(kept, negative, torch.where(negative, -values, values), word)


def _first(chosen: torch.Tensor, room: int, begin: torch.Tensor) -> torch.Tensor:
    """Return the distances from `begin` of the first `room` chosen entries, ascending, around the
    tensor's end. Elements behind the last of them are the tensor's size."""
    size = len(chosen)
    places = torch.arange(size, device=chosen.device)
    rank = chosen.long().cumsum(0)
    before = rank.take(begin) - chosen.take(begin).long()
    rank = torch.where(places >= begin, rank - before, rank - before + rank[-1]) - 1
    slots = torch.where(chosen & (rank < room), rank, room)
    ahead = torch.where(places >= begin, places - begin, places - begin + size)
    return _placed(slots, ahead, room, size)


def _steps(ahead: torch.Tensor, sent: _SentEntries, room: int) -> torch.Tensor:
    """Encode the distances and signs of the entries sent, as the host does; shape (room,)."""
    size = len(ahead)
    rank = sent.kept.long().cumsum(0) - 1
    slots = torch.where(sent.kept, rank, size)
    kept = _placed(slots, ahead, size, 0)
    signs = _placed(slots, sent.negative.long(), size, 0)
    used = torch.arange(size, device=ahead.device) <= rank[-1]
    escapes = torch.where(used, _escapes(kept), 0)
    over = functional.pad(kept, (1, 0), value=-1).diff() - 1 - LONGEST * escapes
    places = torch.where(used, (escapes + 1).cumsum(0) - 1, room)
    return _placed(places, over + SIGN * signs, room, ESCAPE).to(torch.uint8)


def _placed(places: torch.Tensor, values: torch.Tensor, count: int, rest: int) -> torch.Tensor:
    """Return `count` elements with the values at their places, and `rest` elsewhere.

    Args:
        places: `count` for values that have none.
    """
    whole = torch.full((count + 1,), rest, dtype=values.dtype, device=values.device)
    return whole.scatter_(0, places, values)[:count]


def _escapes(ahead: torch.Tensor) -> torch.Tensor:
    """Number of escape bytes before each entry's own byte."""
    return (functional.pad(ahead, (1, 0), value=-1).diff() - 1).div(LONGEST, rounding_mode="floor")
