"""Weights as a partner has heard of them: CHOCO-SGD (Koloskova et al., arXiv 1902.00340).

Weights compress badly to a few bits, and changes of weights alone let ranks drift apart. So the two
ranks of a pair keep the same two copies, one of each rank's weights. A rank sends the compressed
difference between its weights and their copy, and both add the message to the copy. The part that a
message leaves out is in the next difference, without a residual. Then each rank moves by half of
the difference between the copies, so that the mean of their weights stays.

The part that messages of few bits leave out gathers in few entries, which they
approximate ever worse. So every `REFRESH`-th message to a partner holds whole weights as bfloat16:
a quarter of a bit per entry and message.

A rank keeps two copies for each of its partners, of which it has log2(ranks).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from dlio.train.exchange.device.codec import Codec

__all__ = ["REFRESH", "Copies"]

REFRESH: Final = 64


@dataclass(slots=True, eq=False)
class _Copy:
    """One rank's weights, as both ranks of a pair know them."""

    weights: torch.Tensor
    messages: int = 0


@dataclass(slots=True, eq=False)
class _Side:
    """The copies of the weights of one side of each pair, by partner."""

    codec: Codec
    whole: Codec
    copies: dict[int, _Copy] = field(default_factory=dict)

    def of(self, partner: int, like: torch.Tensor) -> tuple[_Copy, Codec]:
        """Return a copy, and the compressor of the message that is added to it next."""
        if partner not in self.copies:
            self.copies[partner] = _Copy(torch.zeros_like(like))
        copy = self.copies[partner]
        codec = self.codec
        if copy.messages % REFRESH == 0:
            codec = self.whole
            copy.weights[:] = 0
        copy.messages += 1
        return copy, codec


class Copies:
    """The copies of one bucket.

    Args:
        codec: compressor of differences.
        whole: compressor of whole weights.
    """

    def __init__(self, codec: Codec, whole: Codec) -> None:
        self._sides = {"mine": _Side(codec, whole), "theirs": _Side(codec, whole)}

    def clear(self) -> None:
        """Forget all copies, because a message was lost or parameters have other shapes."""
        for side in self._sides.values():
            side.copies.clear()

    def encode(self, partner: int, weights: torch.Tensor, message: torch.Tensor) -> int:
        """Write the message for a partner; return its length in bytes.

        Args:
            partner: any number that both ranks of a pair mean each other by.
            weights: this rank's; shape (entries,).
        """
        copy, codec = self._sides["mine"].of(partner, weights)
        used = codec.encode(weights - copy.weights, torch.zeros_like(weights), message)
        codec.add(message[:used], copy.weights)
        return used

    def add(self, partner: int, message: torch.Tensor, into: torch.Tensor) -> None:
        """Set `into` to what the partner's copy has more than this rank's, after its message.

        Call it after `encode` of the same turn. Raises CommError for a damaged message.
        """
        copy, codec = self._sides["theirs"].of(partner, into)
        codec.add(message, copy.weights)
        torch.sub(copy.weights, self._sides["mine"].copies[partner].weights, out=into)

    def state(self) -> dict[str, torch.Tensor]:
        """The copies, for a checkpoint, under `<side>/<partner>/<messages>`."""
        return {
            f"{name}/{partner}/{copy.messages}": copy.weights.cpu()
            for name, side in self._sides.items()
            for partner, copy in side.copies.items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor], like: torch.Tensor) -> None:
        """Restore `state`, into memory of the kind of `like`."""
        self.clear()
        for key, weights in state.items():
            name, partner, messages = key.split("/")
            copy = _Copy(weights.to(like.device, copy=True), int(messages))
            self._sides[name].copies[int(partner)] = copy
