"""Gossip between nodes, with the mean within each node (GossipGraD, arXiv 1803.05880).

Gossip saves traffic on the links between nodes. Within a node, ranks average their gradients during
backward, as `allreduce` does. The first rank of each node, its leader, gossips with the leaders of
other nodes and forwards the merged weights to its node uncompressed, whatever compressor is
used between nodes. So the ranks of a node hold bit-identical weights, and gossip sees nodes in
place of ranks.

After a loss a node's first rank that is left is its leader. Values that all of a node's ranks were
to take over are given to those that lack them, if any of them has all; otherwise all go on without.
Ranks that are behind exchange nothing until they have made as many steps as the furthest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import await_end, leave
from dlio.comm.survival.recovery import RecoveryPart
from dlio.errors import PeerLost
from dlio.exchange.buckets import Bucket, Named, gradient_type, in_buckets
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_base import PeerExchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.exchange_spec import parse_exchange
from dlio.exchange.gossip import Gossip, join_before_use
from dlio.exchange.peer_steps import PeerReport, PeerSteps
from dlio.exchange.synchronous_sgd import SynchronousSgd
from dlio.exchange.traffic import MessageTraffic

_CARRIED_TAG: Final = 0
_FIRST_TAG: Final = 1


@dataclass(frozen=True, slots=True)
class NodeGossipReport(PeerReport):
    """Where gossip between nodes stands on a rank."""

    step: int
    merged: int
    """The last step whose values this rank has, whole."""
    group: int
    """Number of the rank's node."""


class NodeGossip(PeerExchange, RecoveryPart[NodeGossipReport]):
    """Gossip of several nodes, at least one of which has several ranks.

    A step's gradient is the mean of the node's ranks, weighted by their samples; between nodes each
    node counts as one, however many ranks it has.

    The leader merges messages from other nodes and forwards them bucket by bucket as they arrive;
    the other ranks join a bucket where the leader does, before its next use, by the forward passes
    of `modules`. All ranks of a node must therefore call `finish`.

    The context's communicator, of all ranks, is split and duplicated, not kept.
    """

    def __init__(
        self, named: Named, modules: Iterable[nn.Module], context: ExchangeContext
    ) -> None:
        self._named, self._modules = named, list(modules)
        self._group = int(context.node_of[context.comm.rank])
        self._node = context.comm.split(self._group)
        self._ranks = self._node.size
        """Ranks of the node at the beginning."""
        self._context = replace(context, comm=context.comm.dup())
        self._gradients = context.spec.payload == "gradient"
        self._recovery = context.recovery
        self.peer_steps = PeerSteps(context.recovery)
        self._step = self._resume = 0
        """Steps so far, and those up to which nothing is exchanged between nodes."""
        self._forwarder: _Forwarder | None = None
        self._between: Gossip | None = None
        self._follower: _Follower | None = None
        self._take_role()
        within = context.over(parse_exchange("allreduce"), self._node, self._group)
        self._within = SynchronousSgd(named, within, self._merge_all)
        if self._recovery is not None:
            self._recovery.register(self)

    def _take_role(self) -> None:
        """Lead the node as its first rank, or follow it."""
        if self._node.rank > 0:
            if self._follower is None:
                recover = None if self._recovery is None else self._recovery.recover
                self._follower = _Follower(
                    self._named,
                    self._modules,
                    self._node,
                    self._gradients,
                    recover,
                    self.peer_steps,
                )
        elif self._between is None:
            merged = self._merged()
            if self._follower is not None:
                self._follower.close()
                self._follower = None
            self._forwarder = _Forwarder(self._node, self.peer_steps)
            self._between = Gossip(
                self._named,
                self._modules,
                self._context,
                self._forwarder,
                self.peer_steps,
                self._forwarder.tell,
            )
            self._between.merged = merged

    def _merge_all(self) -> None:
        # Others may wait in their forward pass for buckets that this rank is to forward.
        if self._between is not None:
            self._between.merge_all()

    def before_backward(self, samples: int, planned: int) -> None:
        # All ranks divide their sums by the same number, so the node's mean weighs samples alike.
        self._within.before_backward(1, self._ranks)

    def weigh(self, samples: float) -> None:
        self._within.weigh(samples)

    def hold(self, held: bool) -> None:
        self._within.hold(held)

    def take_assigned(self) -> None:
        self._within.take_assigned()

    def expect_changes(self) -> None:
        self._within.expect_changes()

    def settle_assigned(self) -> None:
        self._within.settle_assigned()

    def before_step(self) -> None:
        # First complete buckets that others may wait for: a rank without samples joined none.
        self._join_all()
        if any(bucket.is_narrow for bucket in self._values()):
            self.reshape(())
        self._within.before_step()
        if self._gradients:
            self._exchange()
            self._join_all()

    def after_step(self) -> None:
        if not self._gradients:
            if (self._step + 1) % self._context.spec.period:
                self._step += 1
            else:
                self._exchange()
        self._report_contributors()

    def _exchange(self) -> None:
        """Begin to send values between nodes, and to receive them."""
        self._step += 1
        if self._step <= self._resume:
            self._take_given()
            return
        try:
            if self._follower is not None:
                self._follower.expect(self._step)
            if self._forwarder is not None:
                self._forwarder.wait()
        except PeerLost:
            if self._recovery is None:
                raise
            self._recovery.recover()
            return  # The others leave out this step, too.
        if self._between is not None:
            self._between.step = self._step - 1
            if self._gradients:
                self._between.before_step()
            else:
                self._between.after_step()

    def _take_given(self) -> None:
        """Take over values that another rank has given, once this rank has made their step."""
        follower = self._follower
        if follower is not None and follower.merged < follower.given <= self._step:
            follower.take(follower.given)

    def report(self) -> NodeGossipReport:
        self._note_mates()
        return NodeGossipReport(self.peer_steps.report(), self._step, self._merged(), self._group)

    def reconcile(self, reports: Sequence[NodeGossipReport], comm: Communicator) -> None:
        self.peer_steps.reconcile(reports)
        for each in (self._forwarder, self._follower, self._between):
            if each is not None:
                each.drop()
        self._resume = max(each.step for each in reports)
        ours = [each for each in reports if each.group == self._group]
        merged = [each.merged for each in ours]
        newest = max(merged)
        if min(merged) < newest:
            self.peer_steps.take_in(ours[merged.index(newest)].heard)
            for bucket in self._values():
                self._node.bcast(bucket.array, merged.index(newest))
            if self._follower is not None and self._follower.merged < newest:
                self._follower.given = newest
                self._take_given()
        self._take_role()

    def _note_mates(self) -> None:
        """Note the steps of this node's ranks whose gradients are in this rank's mean."""
        recovery, closed = self._recovery, self._within.closed
        if recovery is not None and closed:
            began = zip(self._context.members, self._context.node_of.tolist(), strict=True)
            mates = {member for member, node in began if node == self._group}
            self.peer_steps.note(sorted(mates & set(self._within.contributors)), closed)

    def _merged(self) -> int:
        """The last step whose values this rank has, whole."""
        if self._between is not None:
            return self._between.merged
        return 0 if self._follower is None else self._follower.merged

    def _values(self) -> list[Bucket]:
        """The values of the last step that this rank has merged or was to take over."""
        if self._between is not None:
            return self._between.values
        return [] if self._follower is None else self._follower.buckets

    def watch(self, module: nn.Module) -> None:
        for each in (self._between, self._follower):
            if each is not None:
                each.watch(module)

    def finish(self) -> None:
        self._join_all()
        self._report_contributors()

    def _join_all(self) -> None:
        if self._between is not None:
            self._between.finish()
        if self._follower is not None:
            self._follower.join_all()

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        if self._forwarder is not None:
            self._forwarder.wait()
        for each in (self._between, self._follower, self._within):
            if each is not None:
                each.reshape(cuts)

    def state(self) -> dict[str, torch.Tensor]:
        self._join_all()
        between = {} if self._between is None else self._between.state()
        # Any rank may lead its node one day, and must then be at the step of the other leaders.
        return {**between, "step": torch.tensor(self._step)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._step = self.peer_steps.begun = int(state.get("step", 0))
        if self._between is not None:
            self._between.load_state(state)

    def statistics(self) -> dict[str, float]:
        """Totals as of any exchange; `between_messages` and `between_bytes` are the part that this
        rank sent to other nodes."""
        within = self._within.statistics()
        parts = [each for each in (self._forwarder, self._follower) if each is not None]
        others = [each.traffic.as_dict() for each in parts]
        between = {} if self._between is None else self._between.statistics()
        totals = {
            key: sum(each.get(key, 0.0) for each in (within, between, *others))
            for key in ("wait_s", "messages", "bytes")
        }
        totals["between_messages"] = between.get("messages", 0.0)
        totals["between_bytes"] = between.get("bytes", 0.0)
        return totals

    def close(self) -> None:
        if self._recovery is not None:
            self._recovery.unregister(self)
        for each in (self._forwarder, self._follower, self._between):
            if each is not None:
                each.close()
        if self._between is None:
            self._context.comm.close()
        self._within.close()


class _Forwarder:
    """The leader's messages to its node: merged buckets."""

    def __init__(self, node: Communicator, peer_steps: PeerSteps) -> None:
        self._node, self._peer_steps = node, peer_steps
        self._sends: list[tuple[Request, object]] = []
        self.traffic = MessageTraffic()

    def __call__(self, number: int, bucket: Bucket) -> None:
        for peer in range(1, self._node.size):
            send = self._node.isend(bucket.bytes, peer, _FIRST_TAG + number)
            self._sends.append((send, bucket))
            self.traffic.sent(1, bucket.bytes.nbytes)

    def tell(self) -> None:
        """Send the steps that the step's values hold, where ranks may be lost."""
        carried = self._peer_steps.carried()
        for peer in range(1, self._node.size) if len(carried) else ():
            self._sends.append(
                (self._node.isend(carried.view(np.uint8), peer, _CARRIED_TAG), carried)
            )
            self.traffic.sent(1, carried.nbytes)

    def wait(self) -> None:
        """Return once the buckets may be overwritten."""
        with self.traffic.waiting():
            self._node.wait([send for send, _ in self._sends], "this node's ranks to take weights")
        self._sends = []

    def drop(self) -> None:
        """Forget messages that a loss has interrupted."""
        await_end(send for send, _ in self._sends)
        self._sends = []

    def close(self) -> None:
        for send, bucket in self._sends:
            if not send.done():
                leave(send, bucket)
        self._sends = []


class _Follower:
    """A rank that takes over the values, gradients or weights, that its node's leader has merged.

    `recover` is called on PeerLost; None if the job ends with any rank.
    """

    def __init__(
        self,
        named: Named,
        modules: Iterable[nn.Module],
        node: Communicator,
        gradients: bool,
        recover: Callable[[], None] | None,
        peer_steps: PeerSteps,
    ) -> None:
        self._recover, self._peer_steps = recover, peer_steps
        self._carried = peer_steps.carried()
        self._hearing: list[Request] = []
        """The receive of the steps that the expected values hold."""
        self._node, self._gradients, self._named = node, gradients, named
        self._modules = list(modules)
        self._receives: dict[int, Request] = {}
        self.given = 0
        """The step whose values the buckets hold since a loss."""
        self._expected = self.merged = 0
        """The step whose values are expected, and the last one whose values were taken over."""
        self._make_buckets()
        self.traffic = MessageTraffic()

    def _make_buckets(self) -> None:
        self._groups = in_buckets(self._named)
        self.buckets = [Bucket(group) for group in self._groups]
        users = self._modules if not self._gradients else ()
        self._hooks: list[Any] = join_before_use(users, self._groups, self._join)

    def watch(self, module: nn.Module) -> None:
        self._modules.append(module)
        if not self._gradients:
            self._hooks += join_before_use([module], self._groups, self._join)

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._make_buckets()

    def expect(self, step: int) -> None:
        self._expected = step
        # Before the leader has merged anything: its messages then go straight to the buckets.
        for number, bucket in enumerate(self.buckets):
            self._receives[number] = self._node.irecv(bucket.bytes, 0, _FIRST_TAG + number)
        if len(self._carried):
            self._carried = np.empty_like(self._carried)
            self._hearing = [self._node.irecv(self._carried.view(np.uint8), 0, _CARRIED_TAG)]

    def join_all(self) -> None:
        """Wait for all buckets and take them over."""
        self._join(tuple(self._receives))

    def take(self, step: int) -> None:
        """Take over the values of a step that the buckets hold."""
        for number in range(len(self.buckets)):
            self._take(number)
        self.merged = step

    def drop(self) -> None:
        """Forget messages that a loss has interrupted."""
        await_end([*self._receives.values(), *self._hearing])
        self._receives, self._hearing = {}, []

    def _join(self, numbers: Sequence[int]) -> None:
        # Where ranks may be lost, nothing is taken over before all has arrived.
        wanted = [number for number in numbers if number in self._receives]
        if self._recover is not None and wanted:
            wanted = list(self._receives)
        try:
            with self.traffic.waiting():
                for number in wanted:
                    self._node.wait([self._receives[number]], "weights of this node's first rank")
                if wanted and self._hearing:  # Of the last message, as all are awaited.
                    self._node.wait(self._hearing, "steps of this node's first rank")
                    self._hearing = []
                    self._peer_steps.take_in(self._carried)
        except PeerLost:
            if self._recover is None:
                raise
            self._recover()
            return
        for number in wanted:
            del self._receives[number]
            self._take(number)
        if not self._receives:
            self.merged = self._expected

    @torch.no_grad()
    def _take(self, number: int) -> None:
        bucket = self.buckets[number]
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if not self._gradients:
                parameter.copy_(view)
            elif parameter.grad is None:
                kind = gradient_type(parameter)
                parameter.grad = view.to(parameter.device, kind, copy=True)
            else:
                parameter.grad.copy_(view)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for number, receive in self._receives.items():
            if not receive.done() and not receive.cancel():
                leave(receive, self.buckets[number])
        for receive in self._hearing:
            if not receive.done() and not receive.cancel():
                leave(receive, self._carried)
        self._receives, self._hearing = {}, []
