"""The messages of one bucket of weights or gradients between pairs of ranks."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from dlio.comm import Request
from dlio.exchange.buckets import Named
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.compress import Compressor, make_compressor
from dlio.exchange.compress.compressor_base import Bytes
from dlio.exchange.compress.message_layout import pieces_of
from dlio.exchange.exchange_context import ExchangeContext

_DECAY: Final = 0.8
"""Of the consensus momentum, per step: less than the momentum of optimizers, 0.9, so that ranks do
not swing about their mean when messages hold a small part of a difference."""


class PairBuffer:
    """The messages of one bucket, and what it keeps between them. It `coasts` if the consensus
    momentum acts at every step, not only at those that exchange.
    """

    def __init__(
        self, group: Named, context: ExchangeContext, placement: BufferPlacement, coasts: bool
    ) -> None:
        spec = self._spec = context.spec
        self.outgoing, self.incoming = placement.for_weights(group), placement.for_weights(group)
        flat = self.outgoing.flat
        self.requests: list[Request] = []
        self.under_way = False
        """True while messages are awaited."""
        self.merged = False
        """True if `incoming` holds values that parameters do not have yet."""
        pieces = pieces_of(self.outgoing.tensors)
        self.codec: Compressor | None = None
        if spec.codec is not None:
            self.codec = make_compressor(spec.codec, pieces, context.scratch)
        self.whole: Compressor | None = None
        """Compressor of the occasional whole weights, if changes travel otherwise."""
        self.copies: PairCopies | None = None
        """The weights that both ranks of a pair know, if differences to them travel."""
        if spec.payload in ("delta", "difference"):
            self.whole = make_compressor("bf16", pieces, context.scratch)
        if spec.payload == "difference" and self.codec is not None and self.whole is not None:
            self.copies = PairCopies(self.codec, self.whole)
        codecs = [codec for codec in (self.codec, self.whole) if codec is not None]
        longest = max([codec.max_bytes for codec in codecs], default=0)
        self.message, self.arrived = (np.empty(longest, np.uint8) for _ in range(2))
        # No residual next to copies: the next difference to a copy holds what a message left out.
        feedback = bool(codecs) and self.copies is None
        self.residual = torch.zeros(flat.numel() if feedback else 0, dtype=torch.float32)
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
            self.outgoing.read()
            self.outer = self.outer_of(self.outgoing.flat)

    def outer_of(self, slow: torch.Tensor) -> "SlowWeights":
        return SlowWeights(slow, self._spec.rate, self._spec.momentum)

    @torch.no_grad()
    def coast(self) -> None:
        """Move the parameters by the consensus momentum of a step without an exchange."""
        if self.consensus is None:
            return
        self.outgoing.flat.copy_(self.consensus.coast())
        for parameter, view in zip(self.outgoing.parameters, self.outgoing.views, strict=True):
            parameter.add_(view.to(parameter.device, parameter.dtype))

    def state(self, number: int) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint, as entries `<name>/<number>`."""
        state = {}
        if len(self.residual):
            state[f"owed/{number}"] = self.residual
        if self.codec is not None:
            state[f"codec/{number}"] = torch.from_numpy(self.codec.state())
        if self.copies is not None:
            for name, copy in self.copies.state().items():
                state[f"copy/{number}/{name}"] = copy
        if len(self.before):
            state[f"before/{number}"] = self.before
        if self.outer is not None:
            state[f"slow/{number}"] = self.outer.slow
            state[f"velocity/{number}"] = self.outer.velocity
        if self.consensus is not None:
            state[f"consensus/{number}"] = self.consensus.velocity
        return state

    def load_state(self, number: int, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the entries of `state` that are present; those of others are left alone."""
        if f"owed/{number}" in state:
            self.residual.copy_(state[f"owed/{number}"])
        if self.codec is not None and f"codec/{number}" in state:
            self.codec.load_state(state[f"codec/{number}"].numpy())
        if self.copies is not None:
            mine = f"copy/{number}/"
            copies = {name[len(mine) :]: each for name, each in state.items() if mine in name}
            self.copies.load_state(copies)
        self.before = state.get(f"before/{number}", torch.empty(0)).clone()
        if self.outer is not None:
            self.outgoing.read()
            slow = state.get(f"slow/{number}", self.outgoing.flat)
            self.outer = self.outer_of(slow.to(self.outgoing.flat.dtype))
            velocity = self.outer.velocity
            velocity.copy_(state.get(f"velocity/{number}", velocity))
        if self.consensus is not None and f"consensus/{number}" in state:
            self.consensus.velocity.copy_(state[f"consensus/{number}"])


def add_message(codec: Compressor, message: Bytes, into: torch.Tensor) -> None:
    """Add the decoded values of a message to `into`, shape (entries,), of any type.

    Raises CommError for a damaged message.
    """
    if into.dtype == torch.float32:
        codec.add(message, into.numpy())
        return
    decoded = np.zeros(len(into), np.float32)
    codec.add(message, decoded)
    into += torch.from_numpy(decoded)


class PairCopies:
    """Weights that both ranks of a pair know: gossip of differences, after CHOCO-SGD (Koloskova et
    al., arXiv 1902.00340).

    Weights compress badly to a few bits, and changes of weights alone let ranks drift apart. So the
    two ranks of a pair keep the same copy a of weights near to theirs. Each rank sends q, its
    compressed difference to the copy, moves by half of the difference of the two messages, and adds
    the mean of both to the copy:

        q_i = compressed(w_i - a),    w_i <- w_i + (q_j - q_i) / 2,    a <- a + (q_i + q_j) / 2.

    The mean of the pair's weights stays. Afterwards, w_i - a is what the message left out: error
    feedback without a residual, whatever share of the difference a message holds.

    CHOCO-SGD has a copy of each rank's weights. Such copies do not take part in the averaging, so
    that the next messages have to repeat it; with a compressor that leaves out most of a
    difference, weights then swing ever further.

    The first message to a partner holds whole weights as bfloat16. A rank keeps a copy for each of
    its partners, of which it has log2(ranks).

    Args:
        codec: compressor of differences.
        whole: compressor of whole weights.
    """

    def __init__(self, codec: Compressor, whole: Compressor) -> None:
        self._codec, self._whole = codec, whole
        self._copies: dict[int, torch.Tensor] = {}
        """By partner; none before the first message to it has been answered."""
        self._own = torch.empty(0)
        """The decoded message of this turn."""

    def clear(self) -> None:
        """Forget all copies, because a message was lost or parameters have other shapes."""
        self._copies.clear()

    def encode(self, partner: int, weights: torch.Tensor, message: Bytes) -> int:
        """Write the message for a partner, any number that both ranks of a pair mean each other by;
        return its length in bytes.
        """
        copy = self._copies.get(partner)
        left = weights if copy is None else weights - copy
        codec = self._codec_of(partner)
        used = codec.encode(left.float().numpy(), np.zeros(len(left), np.float32), message)
        self._own = torch.zeros_like(weights)
        add_message(codec, message[:used], self._own)
        return used

    def add(self, partner: int, message: Bytes, into: torch.Tensor) -> None:
        """Set `into` to this rank's move towards the partner, and move the copy.

        Call it after `encode` of the same turn. Raises CommError for a damaged message.
        """
        add_message(self._codec_of(partner), message, into.zero_())
        # The sum is the same to the last bit on both ranks: float addition commutes.
        both = (into + self._own) * 0.5
        copy = self._copies.get(partner)
        self._copies[partner] = both if copy is None else copy.add_(both)
        into -= self._own
        into *= 0.5

    def state(self) -> dict[str, torch.Tensor]:
        """The copies, for a checkpoint, by partner."""
        return {str(partner): copy for partner, copy in self._copies.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`. Copies of another form, those of checkpoints of earlier versions, begin
        again."""
        self.clear()
        for partner, weights in state.items():
            if partner.isdecimal():
                self._copies[int(partner)] = weights.clone()

    def _codec_of(self, partner: int) -> Compressor:
        return self._codec if partner in self._copies else self._whole


class SlowWeights:
    """NoLoCo's outer optimizer (arXiv 2506.10911): Nesterov momentum over pairs of ranks.

    A rank keeps slow weights, from which it trains for a period. With the fast weights f and the
    slow weights s of this rank and its partner j, the paper's step is

        v <- a v + b mean(f - s) - g (s - mean(s)),    s <- s + v,

    where means are over the pair, and g between a and 2 + a keeps the ranks together. Here g = b,
    so that the slow weights of the partner cancel out, and only fast weights travel:

        v <- a v + b (mean(f) - s),    s <- s + v.

    Args:
        weights: the weights at the beginning; shape (entries,). Copied.
        rate: b above.
        momentum: a above.
    """

    def __init__(self, weights: torch.Tensor, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum
        self.slow = weights.clone()
        self.velocity = torch.zeros_like(weights)

    def step(self, mean: torch.Tensor) -> None:
        """Move the slow weights towards the fast ones, whose mean over a pair of ranks is `mean`,
        and write them into it.
        """
        mean -= self.slow
        self.velocity.mul_(self._momentum).add_(mean, alpha=self._rate)
        self.slow += self.velocity
        mean.copy_(self.slow)


class ConsensusMomentum:
    """Momentum of the moves that bring ranks together.

    The momentum of a rank's own optimizer holds gradients of earlier steps that no other rank has
    seen. It goes on moving the rank away after its weights have been averaged, by as much as ten
    more steps. Averaging momentum, too, would double the messages. But the difference that an
    exchange finds was made by the momentum, and so the move towards the partner goes into a
    momentum, as well:

        w <- w + c + u,    u <- b (u + g c),

    where c is the move of an exchange. NoLoCo's modified Nesterov momentum (arXiv 2506.10911) has
    this term, too, for the momentum of its outer optimizer; here it is for that of the steps
    themselves, and no optimizer has to give access to it.

    Args:
        like: a tensor of the kind and shape of the weights, (entries,).
        share: total further move, relative to the move of an exchange. 1.2 with b = 0.8 keeps pairs
            together; 1.8 with b = 0.9 loses accuracy, and with 2.7 weights swing (docs/LOG.md).
        decay: b above, over the steps between two calls; 0 < b < 1.
    """

    def __init__(self, like: torch.Tensor, share: float, decay: float) -> None:
        self._decay = decay
        self._gain = share * (1 - decay) / decay
        self.velocity = torch.zeros_like(like)

    def move(self, change: torch.Tensor) -> None:
        """Add the momentum to the move of an exchange, in place; shape (entries,)."""
        later = self.velocity.add(change, alpha=self._gain).mul_(self._decay)
        change += self.velocity
        self.velocity = later

    def coast(self) -> torch.Tensor:
        """Return the move of a step without an exchange; shape (entries,)."""
        move = self.velocity.clone()
        self.velocity *= self._decay
        return move
