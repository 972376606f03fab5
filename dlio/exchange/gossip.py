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
optimizer; see `slow_weights`. With a sparse compressor, a pair sends differences to a copy that
both have; see `copies` and `consensus`.

Where ranks may be lost, nothing is merged before all messages of a step have arrived. After a loss
messages under way are dropped, and each rank goes on with its own weights. Ranks that are behind
exchange nothing until they have made as many steps as the furthest.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.comm.deadlines import await_end, leave
from dlio.comm.progress_thread import ProgressThread
from dlio.comm.survival.recovery import RecoveryPart
from dlio.errors import PeerLost
from dlio.exchange.buckets import Bucket, Named, in_buckets
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.join_hooks import join_before_use
from dlio.exchange.pair_buffer import PairBuffer
from dlio.exchange.partners import partners
from dlio.exchange.peer_steps import PeerReport, PeerSteps
from dlio.exchange.state_cuts import reshape_state

REFRESH: Final = 64
"""Steps between two exchanges of whole weights, if only changes travel in between."""
_FIRST_TAG: Final = 1


@dataclass(frozen=True, slots=True)
class GossipReport(PeerReport):
    """Where gossip stands on a rank."""

    step: int
    """Steps at which the rank has sent, or had no partner."""


class Gossip(RecoveryPart[GossipReport]):
    """Sends after each step; waits for and merges each bucket before its next use.

    A bucket's message travels while the rank waits for its next batch and while the layers before
    it compute: a module that owns parameters joins their bucket in its forward pre-hook.

    Args:
        modules: modules whose forward passes use the parameters.
        setting: all ranks.
        onward: called with each bucket's number and merged values once per step, as soon as they
            are known; parameters take them later, before their next use. The first rank of each
            node then gossips for its node, and its owner takes part in recoveries for it.
        hearing: told of the steps that are merged.
    """

    alike = False

    def __init__(
        self,
        named: Named,
        modules: Iterable[nn.Module],
        setting: ExchangeContext,
        onward: Callable[[int, Bucket], None] | None = None,
        hearing: PeerSteps | None = None,
    ) -> None:
        self._setting, self._comm, self._spec = setting, setting.comm, setting.spec
        self._named, self._modules = named, list(modules)
        self._progress = ProgressThread(setting.comm)
        self._place = BufferPlacement(named, setting, needs_host=onward is not None)
        self._onward = onward
        self._make_lanes()
        self.step = 0
        """Steps at which this rank has sent, or had no partner."""
        self.merged = 0
        """The last of them whose values have been merged."""
        self._resume = 0
        """Steps up to which nothing is exchanged."""
        self._recovery = setting.recovery
        self.hearing = hearing or PeerSteps(setting.recovery)
        self._sources: tuple[int, ...] = ()
        """Members whose steps are in the messages under way."""
        self._find_places()
        if self._recovery is not None and onward is None:
            self._recovery.register(self)
        self._wait_s = 0.0
        self._messages = self._bytes = 0

    def _make_lanes(self) -> None:
        """Create lanes of the parameters in their current shapes, and the hooks that join them."""
        self._groups = in_buckets(self._named) if self._comm.size > 1 else []
        coasts = self._onward is None
        self._lanes = [
            PairBuffer(group, self._setting, self._place, coasts) for group in self._groups
        ]
        users = self._modules if self._spec.payload != "gradient" else ()
        self._hooks = join_before_use(users, self._groups, self._join)

    @property
    def counted(self) -> tuple[int, ...]:
        """Members that go on; the steps of lost ones count up to `Recovery.last_counted`."""
        return () if self._recovery is None else self._recovery.membership.members

    @property
    def values(self) -> list[Bucket]:
        """The values that `onward` was last called with."""
        return [lane.incoming for lane in self._lanes]

    def _find_places(self) -> None:
        """Find those that gossip: ranks, or nodes, of which the first rank sends."""
        ranks = np.arange(self._comm.size, dtype=np.int32)
        nodes = ranks if self._onward is None else self._setting.nodes()
        each = dict.fromkeys(nodes.tolist())
        self._places = [np.flatnonzero(nodes == node).tolist() for node in each]
        self._own_place = [each[0] for each in self._places].index(self._comm.rank)

    def before_step(self) -> None:
        # Parameters that no forward pass of this step used have not been joined yet.
        self.finish()
        if self._spec.payload == "gradient":
            self._send(tuple(range(len(self._lanes))), whole=False)
            self.finish()

    def after_step(self) -> None:
        if not self._lanes or self._spec.payload == "gradient":
            return
        if (self.step + 1) % self._spec.period:
            self.step += 1
            if self._onward is None:
                for lane in self._lanes:
                    lane.coast()
        else:
            # The first layers are used first, and the last bucket holds them: send it first.
            whole = self._spec.payload != "delta" or self.step % REFRESH == REFRESH - 1
            self._send(tuple(reversed(range(len(self._lanes)))), whole)

    def watch(self, module: nn.Module) -> None:
        self._modules.append(module)
        if self._spec.payload != "gradient":
            self._hooks += join_before_use([module], self._groups, self._join)

    def finish(self) -> None:
        self._join(tuple(range(len(self._lanes))))

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        before, state = [lane.outgoing for lane in self._lanes], self.state()
        for hook in self._hooks:
            hook.remove()
        self._make_lanes()
        after = [lane.outgoing for lane in self._lanes]
        # Slow weights begin anew: what makes up for removed neurons must not count as training.
        self._load(
            reshape_state(state, before, after, cuts, ("owed", "before", "velocity", "consensus"))
        )

    def state(self) -> dict[str, torch.Tensor]:
        self.finish()
        state = {"step": torch.tensor(self.step)}
        for number, lane in enumerate(self._lanes):
            if len(lane.residual):
                state[f"owed/{number}"] = lane.residual.cpu()
            if lane.codec is not None:
                state[f"codec/{number}"] = lane.codec.state()
            if lane.copies is not None:
                for name, copy in lane.copies.state().items():
                    state[f"copy/{number}/{name}"] = copy
            if len(lane.before):
                state[f"before/{number}"] = lane.before.cpu()
            if lane.outer is not None:
                state[f"slow/{number}"] = lane.outer.slow.cpu()
                state[f"velocity/{number}"] = lane.outer.velocity.cpu()
            if lane.consensus is not None:
                state[f"consensus/{number}"] = lane.consensus.velocity.cpu()
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._load(state)
        self.hearing.begun = self.step

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.step = int(state.get("step", 0))
        for number, lane in enumerate(self._lanes):
            if f"owed/{number}" in state:
                lane.residual.copy_(state[f"owed/{number}"])
            if lane.codec is not None and f"codec/{number}" in state:
                lane.codec.load_state(state[f"codec/{number}"])
            if lane.copies is not None:
                mine = f"copy/{number}/"
                copies = {name[len(mine) :]: each for name, each in state.items() if mine in name}
                lane.copies.load_state(copies, lane.outgoing.flat)
            before = state.get(f"before/{number}", torch.empty(0))
            lane.before = before.to(lane.outgoing.flat.device, copy=True)
            if lane.outer is not None:
                lane.read(lane.outgoing)
                outer = lane.outer_of(state.get(f"slow/{number}", lane.outgoing.flat))
                outer.velocity.copy_(state.get(f"velocity/{number}", outer.velocity))
                lane.outer = outer
            if lane.consensus is not None and f"consensus/{number}" in state:
                lane.consensus.velocity.copy_(state[f"consensus/{number}"])

    def statistics(self) -> dict[str, float]:
        return {
            "wait_s": self._wait_s + self._place.waited_s,
            "messages": float(self._messages),
            "bytes": float(self._bytes),
        }

    def report(self) -> GossipReport:
        return GossipReport(self.hearing.report(), self.step)

    def reconcile(self, reports: Sequence[GossipReport], comm: Communicator) -> None:
        self.hearing.reconcile(reports)
        self.drop()
        self._resume = max(each.step for each in reports)

    def drop(self) -> None:
        """Forget messages that a loss has interrupted, and go on with the ranks that are left."""
        await_end([request for lane in self._lanes for request in lane.requests])
        interrupted = any(lane.under_way for lane in self._lanes)
        for lane in self._lanes:
            if lane.copies is not None:
                # Another rank may have lost its messages, and ranks have other numbers now.
                lane.copies.clear()
            if interrupted:
                lane.requests, lane.under_way, lane.merged = [], False, False
                if lane.sends_changes:
                    lane.before = lane.outgoing.flat.clone()
        self._sources = ()
        self._find_places()
        self._progress.rest()

    def close(self) -> None:
        if self._recovery is not None and self._onward is None:
            self._recovery.unregister(self)
        for hook in self._hooks:
            hook.remove()
        for lane in self._lanes:
            for request in lane.requests:
                if not request.done() and not request.cancel():
                    leave(request, lane.incoming, lane.outgoing, lane.message, lane.arrived)
        self._progress.close()
        self._place.close()
        if self._comm.size > 1:
            self._comm.close()

    def _send(self, numbers: tuple[int, ...], whole: bool) -> None:
        """Post this step's messages.

        Args:
            whole: send weights; otherwise gradients or changes.
        """
        try:
            self._post(numbers, whole)
        except PeerLost:
            self._recover()

    def _recover(self) -> None:
        """Go on after a loss, without the messages under way."""
        if self._recovery is None:
            raise
        self._recovery.recover()

    @torch.no_grad()
    def _post(self, numbers: tuple[int, ...], whole: bool) -> None:
        comm, places, own = self._comm, self._places, self._own_place
        there, here = own, own
        if self.step >= self._resume:
            seed, topology = self._setting.seed, self._spec.topology
            turn = self.step // self._spec.period
            there, here = partners(turn, own, len(places), seed, topology)
        to, source = places[there][0], places[here][0]
        self._sources = self.hearing.members(places[here]) if here != own else ()
        self.step += 1
        self._whole, self._pair = whole, own ^ there
        for number in numbers:
            lane = self._lanes[number]
            self._fill(lane)
            if to == comm.rank:
                if self._onward is not None or lane.outer is not None:
                    lane.incoming.flat.copy_(lane.outgoing.flat)
                    if lane.consensus is not None:
                        lane.incoming.flat += lane.consensus.coast()
                    lane.merged = lane.outer is not None
                    self._pass_on(number)
                else:
                    lane.coast()
                if lane.sends_changes:
                    lane.before = lane.outgoing.flat.clone()
                continue
            with self._place.aside():
                into, message = self._message(lane, whole)
                lane.requests = self._place.swap(message, to, into, source, _FIRST_TAG + number)
            lane.under_way = True
            self._messages += 1
            self._bytes += message.nbytes
            self._progress.go()
        if to == comm.rank:
            self.merged = self.step

    def _message(self, lane: PairBuffer, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of a partner's message, and the message of this rank."""
        if lane.copies is not None:
            used = lane.copies.encode(self._pair, lane.outgoing.flat, lane.message)
            return lane.arrived[: self._arriving(lane, used)], lane.message[:used]
        codec = lane.whole if whole and lane.whole is not None else lane.codec
        if codec is None:
            return lane.incoming.flat, lane.outgoing.flat
        values = self._values(lane, whole)
        # Weights leave no residual: the next message holds whole weights again.
        residual = torch.zeros_like(values) if whole else lane.residual
        used = codec.encode(values, residual, lane.message)
        lane.own = torch.zeros_like(values)
        codec.add(lane.message, lane.own)
        return lane.arrived[: self._arriving(lane, used)], lane.message[:used]

    def _arriving(self, lane: PairBuffer, sent: int) -> int:
        """Return the room for a message: messages of a device have the length of its own."""
        return len(lane.arrived) if self._place.group is None else sent

    def _fill(self, lane: PairBuffer) -> None:
        """Copy weights or gradients into the outgoing bucket."""
        out = lane.outgoing
        if self._spec.payload != "gradient":
            lane.read(out)
            return
        for parameter, view in zip(out.parameters, out.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def _values(self, lane: PairBuffer, whole: bool) -> torch.Tensor:
        if whole or self._spec.payload != "delta":
            return lane.outgoing.flat
        if not len(lane.before):
            lane.before = lane.outgoing.flat.clone()
        return lane.outgoing.flat - lane.before

    def merge_all(self) -> None:
        """Wait for all buckets and pass them to `onward`; parameters stay as they are."""
        if not any(lane.under_way for lane in self._lanes):
            return
        try:
            for number in reversed(range(len(self._lanes))):
                self._await(number)
            self.hearing.note(self._sources, self.step - self.hearing.begun)
            self.merged = self.step
        except PeerLost:
            self._recover()

    def _join(self, numbers: Sequence[int]) -> None:
        """Wait for these buckets' messages, and merge them into the parameters."""
        if self._recovery is not None:
            self.merge_all()
        for number in numbers:
            self._await(number)
            lane = self._lanes[number]
            if lane.merged:
                lane.merged = False
                self._take(lane)
        if self._onward is not None:
            for number in reversed(range(len(self._lanes))):
                lane = self._lanes[number]
                if lane.under_way and not all(request.done() for request in lane.requests):
                    break
                self._await(number)
        if not any(lane.under_way for lane in self._lanes):
            self._progress.rest()

    def _await(self, number: int) -> None:
        lane = self._lanes[number]
        if not lane.under_way:
            return
        started = time.perf_counter()
        self._place.wait(lane.requests, "weights of a gossip partner")
        self._wait_s += time.perf_counter() - started
        lane.requests, lane.under_way, lane.merged = [], False, True
        if self._onward is not None or lane.outer is not None:
            self._merge(lane, into_parameters=False)
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Call `onward` with a bucket's mean, after the outer optimizer if there is one."""
        lane = self._lanes[number]
        if self._onward is not None:
            if lane.outer is not None:
                lane.outer.step(lane.incoming.flat)
            self._onward(number, lane.incoming)

    @torch.no_grad()
    def _take(self, lane: PairBuffer) -> None:
        """Write merged values into the parameters or their gradients."""
        if self._onward is None and lane.outer is None:
            self._merge(lane, into_parameters=True)
        else:
            if self._onward is None and lane.outer is not None:
                lane.outer.step(lane.incoming.flat)
            for target, view in zip(self._targets(lane), lane.incoming.views, strict=True):
                target.copy_(view)
        if lane.sends_changes:
            self._fill(lane)
            lane.before = lane.outgoing.flat.clone()

    @torch.no_grad()
    def _merge(self, lane: PairBuffer, into_parameters: bool) -> None:
        """Average local and received values, into the parameters or the incoming bucket."""
        codec = lane.whole if self._whole and lane.whole is not None else lane.codec
        bucket = lane.incoming
        if lane.copies is not None:
            lane.copies.add(self._pair, lane.arrived, bucket.flat)
        elif codec is not None:
            # Both ranks move by half of the difference of their decoded messages.
            move = bucket.flat.zero_()
            codec.add(lane.arrived, move)
            move -= lane.own
            move *= 0.5
        if lane.consensus is not None:
            lane.consensus.move(bucket.flat)
        for target, view in zip(self._targets(lane), bucket.views, strict=True):
            if not into_parameters:
                mine = target.to(view.device, view.dtype)
                if codec is None:
                    view.lerp_(mine, 0.5)
                else:
                    view += mine
                continue
            there = view.to(target.device, target.dtype)
            if codec is None:
                target.lerp_(there, 0.5)
            else:
                target += there

    def _targets(self, lane: PairBuffer) -> list[torch.Tensor]:
        """The tensors that are averaged: parameters or their gradients."""
        if self._spec.payload != "gradient":
            return list(lane.incoming.parameters)
        gradients: list[torch.Tensor] = []
        for parameter in lane.incoming.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients
