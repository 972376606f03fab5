"""GossipGraD (arXiv 1803.05880): at each step a rank averages with one other.

The number of messages per step is constant, while an allreduce needs O(log p). Partners follow a
dissemination pattern: after ceil(log2 p) steps every rank's update has reached all others, and if p
is a power of two the weights are the exact mean. Then the ranks are permuted ("rotation"), so that
a rank does not always have the same neighbours.

Weights are averaged, not gradients: averaging gradients with one partner lets ranks drift apart
without bound. `gossip(gradient)` is that variant. With a sparse compressor a message holds the
change of a rank's weights since the last step, minus the residual. Changes alone let ranks drift
apart, too, so every REFRESH steps whole weights travel as bfloat16.

`noloco` is gossip between random pairs after every `period` steps, whose mean goes to an outer
optimizer (`SlowWeights`). With a sparse compressor, a pair sends differences to a copy that both
have (`PairCopies`, `ConsensusMomentum`); all three are in `pair_buffer`.

Where ranks may be lost, nothing is merged before all messages of a step have arrived. After a loss
messages under way are dropped, and each rank continues with its own weights. Ranks that are behind
exchange nothing until they have made as many steps as the furthest.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dlio.comm import Communicator
from dlio.comm.deadlines import await_end, leave
from dlio.comm.progress_thread import ProgressThread
from dlio.comm.survival.recovery import RecoveryPart
from dlio.errors import PeerLost
from dlio.exchange.buckets import Bucket, Named, gradient_type, in_buckets
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.compress.compressor_base import Bytes
from dlio.exchange.cut import TensorCut, reshape_state
from dlio.exchange.exchange_base import PeerExchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.pair_buffer import PairBuffer, add_message
from dlio.exchange.peer_steps import PeerReport, PeerSteps
from dlio.exchange.traffic import MessageTraffic
from dlio.plan.order import Order

REFRESH: Final = 64
"""Steps between two exchanges of whole weights, if only changes travel in between."""
_CARRIED_TAG: Final = 0
_FIRST_TAG: Final = 1
_ROTATIONS: Final = 64
"""Length of the cycle of permutations."""


@dataclass(frozen=True, slots=True)
class GossipReport(PeerReport):
    """Where gossip stands on a rank."""

    step: int
    """Steps at which the rank has sent, or had no partner."""


class Gossip(PeerExchange, RecoveryPart[GossipReport]):
    """Sends after each step; waits for and merges each bucket before its next use.

    A bucket's message travels while the rank waits for its next batch and while the layers before
    it compute: a module that owns parameters joins their bucket in its forward pre-hook.

    Args:
        modules: modules whose forward passes use the parameters.
        context: all ranks.
        onward: called with each bucket's number and merged values once per step, as soon as they
            are known; parameters take them later, before their next use. The first rank of each
            node then gossips for its node, and its owner takes part in recoveries for it.
        peer_steps: told of the steps that are merged.
        onward_told: called once per step when it has been told of them.
    """

    def __init__(
        self,
        named: Named,
        modules: Iterable[nn.Module],
        context: ExchangeContext,
        onward: Callable[[int, Bucket], None] | None = None,
        peer_steps: PeerSteps | None = None,
        onward_carried: Callable[[], None] = lambda: None,
    ) -> None:
        self._context, self._comm, self._spec = context, context.comm, context.spec
        self._named, self._modules = named, list(modules)
        self._progress = ProgressThread(context.comm)
        self._placement = BufferPlacement(named, context, needs_host=onward is not None)
        self._onward, self._onward_carried = onward, onward_carried
        self._make_pairs()
        self.step = 0
        """Steps at which this rank has sent, or had no partner."""
        self.merged = 0
        """The last of them whose values have been merged."""
        self._resume = 0
        """Steps up to which nothing is exchanged."""
        self._recovery = context.recovery
        self.peer_steps = peer_steps or PeerSteps(context.recovery)
        self._sources: tuple[int, ...] = ()
        """Members whose steps are in the messages under way."""
        self._ours = self._theirs = self.peer_steps.carried()
        """The steps of others that the weights under way hold, which travel next to them."""
        self._find_gossipers()
        if self._recovery is not None and onward is None:
            self._recovery.register(self)
        self._traffic = MessageTraffic()

    def _make_pairs(self) -> None:
        """Create buffers of the parameters in their current shapes, and hooks that join them."""
        self._groups = in_buckets(self._named) if self._comm.size > 1 else []
        coasts = self._onward is None
        self._pairs = [
            PairBuffer(group, self._context, self._placement, coasts) for group in self._groups
        ]
        users = self._modules if self._spec.payload != "gradient" else ()
        self._hooks = join_before_use(users, self._groups, self._join)

    @property
    def values(self) -> list[Bucket]:
        """The values that `onward` was last called with."""
        return [pair.incoming for pair in self._pairs]

    def _find_gossipers(self) -> None:
        """Find those that gossip: ranks, or nodes, of which the first rank sends."""
        ranks = np.arange(self._comm.size, dtype=np.int32)
        nodes = ranks if self._onward is None else self._context.nodes()
        each = dict.fromkeys(nodes.tolist())
        self._gossipers = [np.flatnonzero(nodes == node).tolist() for node in each]
        self._own_index = [each[0] for each in self._gossipers].index(self._comm.rank)

    def before_step(self) -> None:
        # Parameters that no forward pass of this step used have not been joined yet.
        self._join_all()
        if self._onward is None and any(pair.outgoing.is_narrow for pair in self._pairs):
            self.reshape(())
        if self._spec.payload == "gradient":
            self._send(tuple(range(len(self._pairs))), whole=False)
            self._join_all()

    def after_step(self) -> None:
        if self._pairs and self._spec.payload != "gradient":
            self._exchange_weights()
        self._report_contributors()

    def _exchange_weights(self) -> None:
        if (self.step + 1) % self._spec.period:
            self.step += 1
            if self._onward is None:
                for pair in self._pairs:
                    pair.coast()
        else:
            # The first layers are used first, and the last bucket holds them: send it first.
            whole = self._spec.payload != "delta" or self.step % REFRESH == REFRESH - 1
            self._send(tuple(reversed(range(len(self._pairs)))), whole)

    def watch(self, module: nn.Module) -> None:
        self._modules.append(module)
        if self._spec.payload != "gradient":
            self._hooks += join_before_use([module], self._groups, self._join)

    def finish(self) -> None:
        self._join_all()
        self._report_contributors()

    def _join_all(self) -> None:
        self._join(tuple(range(len(self._pairs))))

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        before, state = [pair.outgoing for pair in self._pairs], self.state()
        for hook in self._hooks:
            hook.remove()
        self._make_pairs()
        after = [pair.outgoing for pair in self._pairs]
        # Slow weights begin again at the present ones: the compensation of removed neurons must not
        # count as training.
        self._load(
            reshape_state(state, before, after, cuts, ("owed", "before", "velocity", "consensus"))
        )

    def state(self) -> dict[str, torch.Tensor]:
        self._join_all()
        state = {"step": torch.tensor(self.step)}
        for number, pair in enumerate(self._pairs):
            state.update(pair.state(number))
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._load(state)
        self.peer_steps.begun = self.step

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.step = int(state.get("step", 0))
        for number, pair in enumerate(self._pairs):
            pair.load_state(number, state)

    def statistics(self) -> dict[str, float]:
        return self._traffic.as_dict()

    def report(self) -> GossipReport:
        return GossipReport(self.peer_steps.report(), self.step)

    def reconcile(self, reports: Sequence[GossipReport], comm: Communicator) -> None:
        self.peer_steps.reconcile(reports)
        self.drop()
        self._resume = max(each.step for each in reports)

    def drop(self) -> None:
        """Forget messages that a loss has interrupted, and continue with the survivors."""
        await_end([request for pair in self._pairs for request in pair.requests])
        interrupted = any(pair.under_way for pair in self._pairs)
        # All may have arrived when one of them could not be passed on: nobody knows of their steps.
        interrupted |= self._onward is not None and self.merged < self.step
        for pair in self._pairs:
            if pair.copies is not None:
                # Another rank may have lost its messages, and ranks have other numbers now.
                pair.copies.clear()
            if interrupted:
                pair.requests, pair.under_way, pair.merged = [], False, False
                if pair.sends_changes:
                    pair.before = pair.outgoing.flat.clone()
        self._sources = ()
        self._find_gossipers()
        self._progress.rest()

    def close(self) -> None:
        if self._recovery is not None and self._onward is None:
            self._recovery.unregister(self)
        for hook in self._hooks:
            hook.remove()
        for pair in self._pairs:
            for request in pair.requests:
                if not request.done() and not request.cancel():
                    leave(request, pair, self._ours, self._theirs)
        self._progress.close()
        self._placement.close()
        if self._comm.size > 1:
            self._comm.close()

    def _send(self, numbers: tuple[int, ...], whole: bool) -> None:
        """Post this step's messages: `whole` weights, otherwise gradients or changes."""
        try:
            self._post(numbers, whole)
        except PeerLost as lost:
            self._recover(lost)

    def _recover(self, lost: PeerLost) -> None:
        """Continue after a loss, without the messages under way."""
        if self._recovery is None:
            raise lost
        self._recovery.recover()

    @torch.no_grad()
    def _post(self, numbers: tuple[int, ...], whole: bool) -> None:
        comm, gossipers, own = self._comm, self._gossipers, self._own_index
        there, here = own, own
        # Ranks that a loss found behind catch up alone: their partners of these steps wait for no
        # message any more.
        if self.step >= self._resume:
            seed, topology = self._context.seed, self._spec.topology
            turn = self.step // self._spec.period
            there, here = partners(turn, own, len(gossipers), seed, topology)
        to, source = gossipers[there][0], gossipers[here][0]
        self._sources = self.peer_steps.members(gossipers[here]) if here != own else ()
        self.step += 1
        self._whole, self._pair = whole, own ^ there
        for number in numbers:
            pair = self._pairs[number]
            self._fill(pair)
            if to == comm.rank:
                if self._onward is not None or pair.outer is not None:
                    pair.incoming.flat.copy_(pair.outgoing.flat)
                    if pair.consensus is not None:
                        pair.incoming.flat += pair.consensus.coast()
                    pair.merged = pair.outer is not None
                    self._pass_on(number)
                else:
                    pair.coast()
                if pair.sends_changes:
                    pair.before = pair.outgoing.flat.clone()
                continue
            into, message = self._message(pair, whole)
            tag = _FIRST_TAG + number
            # Receive first: an eager message then goes straight to its place.
            pair.requests = [comm.irecv(into, source, tag), comm.isend(message, to, tag)]
            pair.under_way = True
            self._traffic.sent(1, message.nbytes)
            self._progress.go()
        if to == comm.rank:
            self.merged = self.step
            self._onward_carried()
        elif self._recovery is not None:
            self._ours, self._theirs = self.peer_steps.carried(), np.empty_like(self._ours)
            pair = self._pairs[numbers[0]]
            pair.requests += [
                comm.irecv(self._theirs.view(np.uint8), source, _CARRIED_TAG),
                comm.isend(self._ours.view(np.uint8), to, _CARRIED_TAG),
            ]
            self._traffic.sent(1, self._ours.nbytes)

    def _message(self, pair: PairBuffer, whole: bool) -> tuple[Bytes, Bytes]:
        """Return the memory of a partner's message, and the message of this rank."""
        if pair.copies is not None:
            used = pair.copies.encode(self._pair, pair.outgoing.flat, pair.message)
            return pair.arrived, pair.message[:used]
        codec = pair.whole if whole and pair.whole is not None else pair.codec
        if codec is None:
            return pair.incoming.bytes, pair.outgoing.bytes
        values = self._values(pair, whole)
        # Weights leave no residual: the next message holds whole weights again.
        residual = torch.zeros_like(pair.residual) if whole else pair.residual
        used = codec.encode(values.float().numpy(), residual.numpy(), pair.message)
        pair.own = torch.zeros_like(values)
        add_message(codec, pair.message[:used], pair.own)
        return pair.arrived, pair.message[:used]

    def _fill(self, pair: PairBuffer) -> None:
        """Copy weights or gradients into the outgoing bucket."""
        out = pair.outgoing
        if self._spec.payload != "gradient":
            out.read()
            return
        for parameter, view in zip(out.parameters, out.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def _values(self, pair: PairBuffer, whole: bool) -> torch.Tensor:
        if whole or self._spec.payload != "delta":
            return pair.outgoing.flat
        if not len(pair.before):
            pair.before = pair.outgoing.flat.clone()
        return pair.outgoing.flat - pair.before

    def merge_all(self) -> None:
        """Wait for all buckets and pass them to `onward`; parameters stay as they are."""
        if not any(pair.under_way for pair in self._pairs):
            return
        try:
            for number in reversed(range(len(self._pairs))):
                self._await(number)
            self.peer_steps.note(self._sources, self.step - self.peer_steps.begun)
            self.peer_steps.take_in(self._theirs)
            self.merged = self.step  # Also if its node does not learn of it any more.
            self._onward_carried()
        except PeerLost as lost:
            self._recover(lost)

    def _join(self, numbers: Sequence[int]) -> None:
        """Wait for these buckets' messages, and merge them into the parameters."""
        if self._recovery is not None:
            self.merge_all()
        for number in numbers:
            self._await(number)
            pair = self._pairs[number]
            if pair.merged:
                pair.merged = False
                self._take(pair)
        if self._onward is not None:
            for number in reversed(range(len(self._pairs))):
                pair = self._pairs[number]
                if pair.under_way and not all(request.done() for request in pair.requests):
                    break
                self._await(number)
        if not any(pair.under_way for pair in self._pairs):
            self._progress.rest()

    def _await(self, number: int) -> None:
        pair = self._pairs[number]
        if not pair.under_way:
            return
        with self._traffic.waiting():
            self._comm.wait(pair.requests, "weights of a gossip partner")
        # Merged later, before the next use: attention reads its output layer without calling it,
        # and weights that change between forward and backward are refused by autograd.
        pair.requests, pair.under_way, pair.merged = [], False, True
        if self._onward is not None or pair.outer is not None:
            self._merge(pair, into_parameters=False)
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Call `onward` with a bucket's mean, after the outer optimizer if there is one."""
        pair = self._pairs[number]
        if self._onward is not None:
            if pair.outer is not None:
                pair.outer.step(pair.incoming.flat)
            self._onward(number, pair.incoming)

    @torch.no_grad()
    def _take(self, pair: PairBuffer) -> None:
        """Write merged values into the parameters or their gradients."""
        if self._onward is None and pair.outer is None:
            self._merge(pair, into_parameters=True)
        else:
            if self._onward is None and pair.outer is not None:
                pair.outer.step(pair.incoming.flat)
            for target, view in zip(self._targets(pair), pair.incoming.views, strict=True):
                target.copy_(view)
        if pair.sends_changes:
            self._fill(pair)
            pair.before = pair.outgoing.flat.clone()

    @torch.no_grad()
    def _merge(self, pair: PairBuffer, into_parameters: bool) -> None:
        """Average local and received values, into the parameters or the incoming bucket."""
        codec = pair.whole if self._whole and pair.whole is not None else pair.codec
        bucket = pair.incoming
        if pair.copies is not None:
            pair.copies.add(self._pair, pair.arrived, bucket.flat)
        elif codec is not None:
            # Half of the difference of both decoded messages, not of the received and the own
            # weights: the two ranks' mean then stays the same, whatever compression has lost.
            move = bucket.flat.zero_()
            add_message(codec, pair.arrived, move)
            move -= pair.own
            move *= 0.5
        if pair.consensus is not None:
            pair.consensus.move(bucket.flat)
        for target, view in zip(self._targets(pair), bucket.views, strict=True):
            into, other = (target, view) if into_parameters else (view, target)
            there = other.to(into.device, into.dtype)
            if codec is None:
                into.lerp_(there, 0.5)
            else:
                into += there

    def _targets(self, pair: PairBuffer) -> list[torch.Tensor]:
        """The tensors that are averaged: parameters or their gradients."""
        if self._spec.payload != "gradient":
            return list(pair.incoming.parameters)
        gradients: list[torch.Tensor] = []
        for parameter in pair.incoming.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_type(parameter))
            gradients.append(parameter.grad)
        return gradients


def partners(
    step: int, rank: int, ranks: int, seed: int, topology: str = "dissemination"
) -> tuple[int, int]:
    """Return (rank to send to, rank to receive from) at a step; both `rank` if it has no partner.

    Dissemination with rotation, arXiv 1803.05880. In a `hypercube` both are the same rank; unless
    the number of ranks is a power of two, some ranks have no partner at some steps. `pairs` of a
    power of two are those of a hypercube without rotation, so that any log2(ranks) steps one after
    another mix the weights of all ranks; of other numbers, they are random ones at each step, as in
    arXiv 2506.10911, and of an odd number one rank has none. `fixed-pairs` are those of a hypercube
    without rotation for any number of ranks, so that a rank has few partners.
    """
    if ranks == 1:
        return rank, rank
    # Random pairs of a power of two mix more slowly: the dimensions of a hypercube in turn reach
    # all ranks in log2(ranks) exchanges.
    if topology == "fixed-pairs" or (topology == "pairs" and ranks & (ranks - 1) == 0):
        peer = rank ^ 1 << step % (ranks - 1).bit_length()
        return (peer, peer) if peer < ranks else (rank, rank)
    period = 1 if topology == "pairs" else max(1, math.ceil(math.log2(ranks)))
    rotation = step // period % _ROTATIONS
    permutation = Order(ranks, seed, rotation).samples(np.arange(ranks, dtype=np.int64))
    place = int(np.flatnonzero(permutation == rank)[0])
    distance = 2 ** (step % period)
    if topology in ("hypercube", "pairs"):
        other = place ^ distance
        peer = int(permutation[other]) if other < ranks else rank
        return peer, peer
    return (
        int(permutation[(place + distance) % ranks]),
        int(permutation[(place - distance) % ranks]),
    )


def join_before_use(
    modules: Iterable[nn.Module], groups: Sequence[Named], join: Callable[[Sequence[int]], None]
) -> list[RemovableHandle]:
    """Call `join` before a module's forward pass with the numbers of its parameters' groups.

    A module is assumed to use its own parameters, and to call its children for theirs. torch's
    attention is the exception: it reads its output layer's parameters without calling the layer.

    Returns the registered hooks.
    """
    number_of = {p: number for number, group in enumerate(groups) for _, p in group}
    hooks = []
    for module in modules:
        reads_children = isinstance(module, nn.MultiheadAttention)
        parameters = module.parameters(recurse=reads_children)
        used = sorted({number_of[p] for p in parameters if p in number_of})
        if used:
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _module, _inputs, used=tuple(used): join(used)
                )
            )
    return hooks
