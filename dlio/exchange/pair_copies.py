"""Weights that both ranks of a pair know: gossip of differences, after CHOCO-SGD (Koloskova et al.,
arXiv 1902.00340).

Weights compress badly to a few bits, and changes of weights alone let ranks drift apart. So the two
ranks of a pair keep the same copy a of weights near to theirs. Each rank sends q, its compressed
difference to the copy, moves by half of the difference of the two messages, and adds the mean of
both to the copy:

    q_i = compressed(w_i - a),    w_i <- w_i + (q_j - q_i) / 2,    a <- a + (q_i + q_j) / 2.

The mean of the pair's weights stays. Afterwards, w_i - a is what the message left out: error
feedback without a residual, whatever share of the difference a message holds.

CHOCO-SGD has a copy of each rank's weights. Such copies do not take part in the averaging, so that
the next messages have to repeat it; with a compressor that leaves out most of a difference, weights
then swing ever further.

The first message to a partner holds whole weights as bfloat16. A rank keeps a copy for each of its
partners, of which it has log2(ranks).
"""

from collections.abc import Mapping

import torch

from dlio.exchange.nccl.tensor_codec import TensorCodec


class PairCopies:
    """The copies of one bucket.

    Args:
        codec: compressor of differences.
        whole: compressor of whole weights.
    """

    def __init__(self, codec: TensorCodec, whole: TensorCodec) -> None:
        self._codec, self._whole = codec, whole
        self._copies: dict[int, torch.Tensor] = {}
        """By partner; none before the first message to it has been answered."""
        self._own = torch.empty(0)
        """The decoded message of this turn."""

    def clear(self) -> None:
        """Forget all copies, because a message was lost or parameters have other shapes."""
        self._copies.clear()

    def encode(self, partner: int, weights: torch.Tensor, message: torch.Tensor) -> int:
        """Write the message for a partner; return its length in bytes.

        Args:
            partner: any number that both ranks of a pair mean each other by.
            weights: this rank's; shape (entries,).
        """
        copy = self._copies.get(partner)
        left = weights if copy is None else weights - copy
        codec = self._codec_of(partner)
        used = codec.encode(left, torch.zeros_like(weights), message)
        self._own = torch.zeros_like(weights)
        codec.add(message[:used], self._own)
        return used

    def add(self, partner: int, message: torch.Tensor, into: torch.Tensor) -> None:
        """Set `into` to this rank's move towards the partner, and move the copy.

        Call it after `encode` of the same turn. Raises CommError for a damaged message.
        """
        self._codec_of(partner).add(message, into.zero_())
        # The sum is the same to the last bit on both ranks.
        both = (into + self._own) * 0.5
        copy = self._copies.get(partner)
        self._copies[partner] = both if copy is None else copy.add_(both)
        into -= self._own
        into *= 0.5

    def state(self) -> dict[str, torch.Tensor]:
        """The copies, for a checkpoint, by partner."""
        return {str(partner): copy.cpu() for partner, copy in self._copies.items()}

    def load_state(self, state: Mapping[str, torch.Tensor], like: torch.Tensor) -> None:
        """Restore `state`, into memory of the kind of `like`.

        Copies of another form, those of checkpoints of earlier versions, begin anew.
        """
        self.clear()
        for partner, weights in state.items():
            if partner.isdecimal():
                self._copies[int(partner)] = weights.to(like.device, copy=True)

    def _codec_of(self, partner: int) -> TensorCodec:
        return self._codec if partner in self._copies else self._whole
