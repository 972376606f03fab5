"""Gossip between nodes, with the mean within each node (GossipGraD, arXiv 1803.05880).

Gossip saves traffic on the links between nodes. Within a node, ranks average their gradients during
backward, as `allreduce` does. The first rank of each node, its leader, gossips with the leaders of
other nodes and forwards the merged weights to its node as whole float32, whatever compressor is
used between nodes. So the ranks of a node hold bit-identical weights, and gossip sees nodes in
place of ranks.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from dlio.comm import Communicator, Request
from dlio.comm.waiting import leave
from dlio.train.cut import Cut
from dlio.train.exchange.buckets import Bucket, Named, in_buckets
from dlio.train.exchange.gossip import Gossip
from dlio.train.exchange.gradients import Synchronous
from dlio.train.exchange.joining import join_before_use
from dlio.train.exchange.setting import Setting
from dlio.train.exchange_spec import parse_exchange

__all__ = ["NodeGossip"]

_FIRST_TAG: Final = 1


class NodeGossip:
    """Gossip of several nodes, at least one of which has several ranks.

    A step's gradient is the mean of the node's ranks, weighted by their samples; between nodes each
    node counts as one, however many ranks it has.

    The leader merges messages from other nodes and forwards them bucket by bucket as they arrive;
    the other ranks join a bucket where the leader does, before its next use. All ranks of a node
    must therefore call `finish`.

    Args:
        modules: modules whose forward passes use the parameters.
        setting: its communicator, of all ranks, is split and not kept.
    """

    alike = False

    def __init__(self, named: Named, modules: Iterable[nn.Module], setting: Setting) -> None:
        comm, spec = setting.comm, setting.spec
        self._node = node = comm.split(int(setting.node_of[comm.rank]))
        group = int(setting.node_of[comm.rank])
        leaders = comm.split(0 if node.rank == 0 else 1)
        self._gradients = spec.payload == "gradient"
        self._forwarder: _Forwarder | None = None
        self._between: Gossip | None = None
        self._follower: _Follower | None = None
        if node.rank == 0:
            self._forwarder = _Forwarder(node)
            between = setting.over(spec, leaders, node.rank)
            self._between = Gossip(named, modules, between, self._forwarder)
        else:
            leaders.close()  # The split of all other ranks, which exchange nothing between nodes.
            self._follower = _Follower(named, modules, node, self._gradients)
        # Others may wait in their forward pass for buckets that this rank is to forward.
        before_wait = None if self._between is None else self._between.merge_all
        within = setting.over(parse_exchange("allreduce"), node, group)
        self._within = Synchronous(named, within, before_wait)

    def before_backward(self, samples: int, planned: int) -> None:
        # All ranks divide their sums by the same number, so the node's mean weighs samples alike.
        self._within.before_backward(1, self._node.size)

    def weigh(self, samples: float) -> None:
        self._within.weigh(samples)

    def hold(self, held: bool) -> None:
        self._within.hold(held)

    def before_step(self) -> None:
        # First complete buckets that others may wait for: a rank without samples joined none.
        self.finish()
        self._within.before_step()
        if not self._gradients:
            return
        if self._follower is not None:
            self._follower.expect()
        if self._between is not None and self._forwarder is not None:
            self._forwarder.wait()
            self._between.before_step()
        self.finish()

    def after_step(self) -> None:
        if self._gradients:
            return
        if self._follower is not None:
            self._follower.expect()
        if self._between is not None and self._forwarder is not None:
            self._forwarder.wait()
            self._between.after_step()

    def watch(self, module: nn.Module) -> None:
        for each in (self._between, self._follower):
            if each is not None:
                each.watch(module)

    def finish(self) -> None:
        if self._between is not None:
            self._between.finish()
        if self._follower is not None:
            self._follower.join_all()

    def reshape(self, cuts: Sequence[Cut]) -> None:
        if self._forwarder is not None:
            self._forwarder.wait()
        for each in (self._between, self._follower, self._within):
            if each is not None:
                each.reshape(cuts)

    def state(self) -> dict[str, torch.Tensor]:
        self.finish()
        return {} if self._between is None else self._between.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._between is not None:
            self._between.load_state(state)

    def statistics(self) -> dict[str, float]:
        """Totals as of any exchange; `between_messages` and `between_bytes` are the part that this
        rank sent to other nodes."""
        within = self._within.statistics()
        parts = [each for each in (self._forwarder, self._follower) if each is not None]
        others = [each.statistics() for each in parts]
        between = {} if self._between is None else self._between.statistics()
        totals = {
            key: sum(each.get(key, 0.0) for each in (within, between, *others))
            for key in ("wait_s", "messages", "bytes")
        }
        totals["between_messages"] = between.get("messages", 0.0)
        totals["between_bytes"] = between.get("bytes", 0.0)
        return totals

    def close(self) -> None:
        for each in (self._forwarder, self._follower, self._between, self._within):
            if each is not None:
                each.close()


class _Forwarder:
    """The leader's messages to its node: merged buckets."""

    def __init__(self, node: Communicator) -> None:
        self._node = node
        self._sends: list[tuple[Request, Bucket]] = []
        self._wait_s = 0.0
        self._messages = self._bytes = 0

    def __call__(self, number: int, bucket: Bucket) -> None:
        for peer in range(1, self._node.size):
            send = self._node.isend(bucket.bytes, peer, _FIRST_TAG + number)
            self._sends.append((send, bucket))
            self._messages += 1
            self._bytes += bucket.bytes.nbytes

    def wait(self) -> None:
        """Return once the buckets may be overwritten."""
        started = time.perf_counter()
        self._node.wait([send for send, _ in self._sends], "this node's ranks to take weights")
        self._wait_s += time.perf_counter() - started
        self._sends = []

    def statistics(self) -> dict[str, float]:
        return {
            "wait_s": self._wait_s,
            "messages": float(self._messages),
            "bytes": float(self._bytes),
        }

    def close(self) -> None:
        for send, bucket in self._sends:
            if not send.done():
                leave(send, bucket)
        self._sends = []


class _Follower:
    """A rank that takes over the values that its node's leader has merged.

    Args:
        gradients: the values are gradients, not weights.
    """

    def __init__(
        self, named: Named, modules: Iterable[nn.Module], node: Communicator, gradients: bool
    ) -> None:
        self._node, self._gradients, self._named = node, gradients, named
        self._modules = list(modules)
        self._receives: dict[int, Request] = {}
        self._make_buckets()
        self._wait_s = 0.0

    def _make_buckets(self) -> None:
        self._groups = in_buckets(self._named)
        self._buckets = [Bucket(group) for group in self._groups]
        users = self._modules if not self._gradients else ()
        self._hooks: list[Any] = join_before_use(users, self._groups, self._join)

    def watch(self, module: nn.Module) -> None:
        self._modules.append(module)
        if not self._gradients:
            self._hooks += join_before_use([module], self._groups, self._join)

    def reshape(self, cuts: Sequence[Cut]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._make_buckets()

    def expect(self) -> None:
        """Post this step's receives."""
        for number, bucket in enumerate(self._buckets):
            self._receives[number] = self._node.irecv(bucket.bytes, 0, _FIRST_TAG + number)

    def join_all(self) -> None:
        """Wait for all buckets and take them over."""
        self._join(tuple(self._receives))

    @torch.no_grad()
    def _join(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            receive = self._receives.pop(number, None)
            if receive is None:
                continue
            started = time.perf_counter()
            self._node.wait([receive], "weights of this node's first rank")
            self._wait_s += time.perf_counter() - started
            bucket = self._buckets[number]
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if not self._gradients:
                    parameter.copy_(view)
                elif parameter.grad is None:
                    parameter.grad = view.to(parameter.device, parameter.dtype, copy=True)
                else:
                    parameter.grad.copy_(view)

    def statistics(self) -> dict[str, float]:
        return {"wait_s": self._wait_s}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for number, receive in self._receives.items():
            if not receive.done() and not receive.cancel():
                leave(receive, self._buckets[number])
        self._receives = {}
