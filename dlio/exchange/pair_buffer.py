"""The messages of one bucket of weights or gradients between pairs of ranks."""

from typing import Final

import torch

from dlio.comm import Request
from dlio.exchange.buckets import Bucket, Named
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.compress.message_layout import pieces_of
from dlio.exchange.consensus import ConsensusMomentum
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.nccl.tensor_codec import TensorCodec
from dlio.exchange.pair_copies import PairCopies
from dlio.exchange.slow_weights import SlowWeights

_DECAY: Final = 0.8
"""Of the consensus momentum, per step: less than the momentum of optimizers, 0.9, so that ranks do
not swing about their mean when messages hold a small part of a difference."""


class PairBuffer:
    """The messages of one bucket, and what it keeps between them.

    Args:
        coasts: the consensus momentum acts at every step, not only at those that exchange.
    """

    def __init__(
        self, group: Named, setting: ExchangeContext, place: BufferPlacement, coasts: bool
    ) -> None:
        spec = self._spec = setting.spec
        self.outgoing, self.incoming = place.for_weights(group), place.for_weights(group)
        flat = self.outgoing.flat
        self.requests: list[Request] = []
        self.under_way = False
        """True while messages are awaited."""
        self.merged = False
        """True if `incoming` holds values that parameters do not have yet."""
        pieces = pieces_of(self.outgoing.tensors)
        self.codec: TensorCodec | None = None
        if spec.codec is not None:
            self.codec = place.codec(spec.codec, pieces)
        self.whole: TensorCodec | None = None
        """Compressor of the occasional whole weights, if changes travel otherwise."""
        self.copies: PairCopies | None = None
        """What both ranks of a pair know, if differences to it travel."""
        if spec.payload in ("delta", "difference"):
            self.whole = place.codec("bf16", pieces)
        if spec.payload == "difference" and self.codec is not None and self.whole is not None:
            self.copies = PairCopies(self.codec, self.whole)
        codecs = [codec for codec in (self.codec, self.whole) if codec is not None]
        longest = max([codec.max_bytes for codec in codecs], default=0)
        self.message, self.arrived = (
            torch.empty(longest, dtype=torch.uint8, device=flat.device) for _ in range(2)
        )
        feedback = bool(codecs) and self.copies is None
        self.residual = flat.new_zeros(flat.numel() if feedback else 0)
        self.sends_changes = spec.payload == "delta"
        self.before = flat.new_empty(0)
        """Weights of the last step, relative to which changes are computed."""
        self.own = flat.new_empty(0)
        """Decoded values of this rank's own message; the merge moves weights by half of the
        difference between it and the partner's."""
        self.consensus: ConsensusMomentum | None = None
        if spec.consensus:
            decay = _DECAY if coasts else _DECAY**spec.period
            self.consensus = ConsensusMomentum(flat, spec.consensus, decay)
        self.outer: SlowWeights | None = None
        if spec.merge == "outer-pairs":
            self.read(self.outgoing)
            self.outer = self.outer_of(self.outgoing.flat)

    def outer_of(self, slow: torch.Tensor) -> SlowWeights:
        return SlowWeights(slow, self._spec.rate, self._spec.momentum)

    @staticmethod
    @torch.no_grad()
    def read(bucket: Bucket) -> None:
        """Copy the parameters into a bucket."""
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            view.copy_(parameter)

    @torch.no_grad()
    def coast(self) -> None:
        """Move the parameters by the consensus momentum of a step without an exchange."""
        if self.consensus is None:
            return
        self.outgoing.flat.copy_(self.consensus.coast())
        for parameter, view in zip(self.outgoing.parameters, self.outgoing.views, strict=True):
            parameter.add_(view.to(parameter.device, parameter.dtype))
