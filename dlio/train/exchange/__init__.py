"""What is done with gradients or weights between ranks, selected by one word.

An exchange has three places in a training step: while backward makes gradients, before the
optimizer's step, and after it. It owns a communicator of its own, and the hooks that it sets.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.comm.nodes import find_nodes
from dlio.train.cut import Cut
from dlio.train.exchange.buckets import Named, trainable
from dlio.train.exchange_spec import NAMES, ExchangeSpec, parse_exchange

__all__ = ["NAMES", "Exchange", "ExchangeSpec", "exchange_of", "make_exchange", "parse_exchange"]


class Exchange(Protocol):
    """Keeps the ranks' models together. Owner: whoever made it, who closes it."""

    alike: bool
    """Whether all ranks have the same weights after every step, byte by byte."""

    def before_backward(self, samples: int, planned: int) -> None:
        """A step begins: this rank has `samples` of the global batch's `planned`, and divides its
        summed loss by `planned / ranks`. Gradients, averaged over ranks, are then those of the
        global batch, however unevenly its samples are shared."""

    def weigh(self, samples: float) -> None:
        """In place of `before_backward`, where a rank's loss is the mean over its samples."""

    def hold(self, held: bool) -> None:
        """While held, backward leaves each rank its own gradients, which the next backward that is
        not held, or the step, adds to: for accumulation that spares messages."""

    def before_step(self) -> None:
        """Gradients are final, here and on the other ranks, when this returns."""

    def after_step(self) -> None:
        """The optimizer has changed the weights."""

    def watch(self, module: nn.Module) -> None:
        """A module whose forward passes use parameters, found after the exchange was made."""

    def finish(self) -> None:
        """Join what is under way: weights are as they will be used next."""

    def reshape(self, cuts: Sequence[Cut]) -> None:
        """Parameters have been cut so, on all ranks alike: buckets are made anew, and what is kept
        beside parameters (what is owed, averages, momentum) is cut with them. Between two steps,
        after `finish`, at the same step everywhere. Collective."""

    def state(self) -> dict[str, torch.Tensor]:
        """What the next steps depend on besides weights, as tensors on the host, which later steps
        may overwrite; joins what is under way. Between two steps. Of those named `owed/...` the
        sum over ranks is what counts; the others are good for the same number of ranks only."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`, or from those of it that are there; weights have been loaded."""

    def statistics(self) -> dict[str, float]:
        """Since the beginning: `wait_s` seconds spent waiting, `messages`, `bytes` sent."""

    def close(self) -> None:
        """Remove hooks, give the communicator back. Collective."""


def make_exchange(
    name: str, model: nn.Module, comm: Communicator, seed: int, pretend_nodes: int | None = None
) -> Exchange:
    """The exchange of a model. Collective. Raises UsageError for a name that is none."""
    spec = parse_exchange(name)
    return exchange_of(spec, trainable(model), model.modules(), comm, seed, pretend_nodes)


def exchange_of(
    spec: ExchangeSpec,
    named: Named,
    modules: Iterable[nn.Module],
    comm: Communicator,
    seed: int,
    pretend_nodes: int | None = None,
) -> Exchange:
    """The exchange of some parameters. Collective.

    Args:
        named: the same on all ranks.
        modules: whose forward passes use them.
        comm: duplicated.
    """
    from dlio.train.exchange.asgd import Asgd
    from dlio.train.exchange.gossip import Gossip
    from dlio.train.exchange.gradients import GradientExchange
    from dlio.train.exchange.node_gossip import NodeGossip
    from dlio.train.exchange.periodic import Periodic

    node_of = find_nodes(comm, pretend_nodes).node_of.tolist()
    if spec.merge == "half" and not spec.flat and 1 < len(set(node_of)) < comm.size:
        return NodeGossip(named, modules, comm, spec, seed, node_of)
    own = comm.dup()
    if spec.merge == "half":
        # One node, or one rank on each: whoever asks for gossip has it between ranks.
        return Gossip(named, modules, own, spec, seed)
    if spec.merge == "parzen":
        return Asgd(named, own, spec, seed)
    if spec.payload == "delta":
        return Periodic(named, own, spec, node_of)
    return GradientExchange(named, own, spec, node_of)
