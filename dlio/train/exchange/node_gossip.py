"""Gossip of nodes: the mean within each node, gossip between nodes (Daily et al., 2018).

The links between nodes are what gossip spares. Within a node ranks average their gradients while
backward makes them, as `allreduce` does; the first rank of each node gossips with those of other
nodes; and tells its node what has become of the weights, of whole float32, whatever travels between
nodes. So the ranks of a node hold the same weights, to the last bit, and nodes are what gossip
takes for ranks.
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
from dlio.train.exchange.gradients import GradientExchange
from dlio.train.exchange.joining import join_before_use
from dlio.train.exchange_spec import ExchangeSpec, parse_exchange

_FIRST_TAG: Final = 1


class NodeGossip:
    """Of more than one node, of which one has more than one rank at least.

    A step's gradient is the mean of the node's ranks, weighted by their samples; between nodes each
    counts as one, however many ranks it has.

    What comes from another node is merged by the node's first rank and handed on bucket by bucket,
    as it arrives; other ranks join a bucket where the first one does, before its next use. So
    `finish` is called by all ranks of a node.

    Args:
        comm: of all ranks; split, not kept.
        modules: whose forward passes use the parameters.
        node_of: node number of each rank, by first appearance.
    """

    alike = False

    def __init__(
        self,
        named: Named,
        modules: Iterable[nn.Module],
        comm: Communicator,
        spec: ExchangeSpec,
        seed: int,
        node_of: Sequence[int],
    ) -> None:
        self._node = node = comm.split(node_of[comm.rank])
        first_ranks = comm.split(0 if node.rank == 0 else 1)
        self._gradients = spec.payload == "gradient"
        self._hand_on: _HandOn | None = None
        self._between: Gossip | None = None
        self._told: _Told | None = None
        if node.rank == 0:
            self._hand_on = _HandOn(node)
            self._between = Gossip(named, modules, first_ranks, spec, seed, self._hand_on)
        else:
            first_ranks.close()  # Of the others, who have nothing to say.
            self._told = _Told(named, modules, node, self._gradients)
        # Others may wait in their forward pass for what this rank is to hand on.
        before_wait = None if self._between is None else self._between.merge_all
        self._within = GradientExchange(
            named, node, parse_exchange("allreduce"), [0] * node.size, before_wait
        )

    def before_backward(self, samples: int, planned: int) -> None:
        # Each rank's sum is divided by the same number: their mean counts samples alike.
        self._within.before_backward(1, self._node.size)

    def weigh(self, samples: float) -> None:
        self._within.weigh(samples)

    def hold(self, held: bool) -> None:
        self._within.hold(held)

    def before_step(self) -> None:
        # First what others may be waiting for: a rank without samples has joined nothing yet.
        self.finish()
        self._within.before_step()
        if not self._gradients:
            return
        if self._told is not None:
            self._told.expect()
        if self._between is not None and self._hand_on is not None:
            self._hand_on.wait()
            self._between.before_step()
        self.finish()

    def after_step(self) -> None:
        self._within.after_step()
        if self._gradients:
            return
        if self._told is not None:
            self._told.expect()
        if self._between is not None and self._hand_on is not None:
            self._hand_on.wait()
            self._between.after_step()

    def watch(self, module: nn.Module) -> None:
        for each in (self._between, self._told):
            if each is not None:
                each.watch(module)

    def finish(self) -> None:
        if self._between is not None:
            self._between.finish()
        if self._told is not None:
            self._told.join_all()

    def reshape(self, cuts: Sequence[Cut]) -> None:
        if self._hand_on is not None:
            self._hand_on.wait()
        for each in (self._between, self._told, self._within):
            if each is not None:
                each.reshape(cuts)

    def state(self) -> dict[str, torch.Tensor]:
        self.finish()
        return {} if self._between is None else self._between.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._between is not None:
            self._between.load_state(state)

    def statistics(self) -> dict[str, float]:
        """Also `between_messages` and `between_bytes`, of `messages` and `bytes` those that this
        rank sent to other nodes."""
        within = self._within.statistics()
        others = [each.statistics() for each in (self._hand_on, self._told) if each is not None]
        between = {} if self._between is None else self._between.statistics()
        told = {
            key: sum(each.get(key, 0.0) for each in (within, between, *others))
            for key in ("wait_s", "messages", "bytes")
        }
        told["between_messages"] = between.get("messages", 0.0)
        told["between_bytes"] = between.get("bytes", 0.0)
        return told

    def close(self) -> None:
        for each in (self._hand_on, self._told, self._between, self._within):
            if each is not None:
                each.close()


class _HandOn:
    """A node's first rank tells the others what a bucket has become."""

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
        """Until the buckets may be written again."""
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


class _Told:
    """A rank that takes over what its node's first rank has merged.

    Args:
        gradients: whether that is gradients, not weights.
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
