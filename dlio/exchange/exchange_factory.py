"""A running exchange, as training loops see it, and the one way to start it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.comm.job_nodes import find_nodes
from dlio.comm.survival.recovery import Recovery, recovery_of
from dlio.exchange.buckets import Named, check_real
from dlio.exchange.buffer_placement import find_path
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_base import (
    DeferredExchange,
    Exchange,
    GradientExchange,
    JoinsBeforeUse,
    PostStepExchange,
    PreStepExchange,
)
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.exchange_spec import ExchangeSpec
from dlio.exchange.peer_steps import PeerSteps


class ExchangeCalls:
    """One exchange with the calls of all places in a step.

    Calls that the exchange does not implement do nothing; see `dlio.exchange.exchange_base` for
    their meaning.
    """

    def __init__(self, exchange: Exchange, recovery: Recovery | None = None) -> None:
        self.exchange, self._recovery = exchange, recovery
        self._gradients = exchange if isinstance(exchange, GradientExchange) else None
        self._before = exchange if isinstance(exchange, PreStepExchange) else None
        self._after = exchange if isinstance(exchange, PostStepExchange) else None
        self._deferred = exchange if isinstance(exchange, DeferredExchange) else None
        self._joins = exchange if isinstance(exchange, JoinsBeforeUse) else None

    @property
    def alike(self) -> bool:
        """True if all ranks have bit-identical weights after every step."""
        return self.exchange.alike

    @property
    def hearing(self) -> PeerSteps | None:
        """The steps of other ranks that have reached this one; None if all ranks step together."""
        hearing: PeerSteps | None = getattr(self.exchange, "hearing", None)
        return hearing

    @property
    def counted(self) -> tuple[int, ...] | None:
        """Numbers of the ranks, when the job began, whose samples the last step has used.

        None if that is not settled yet; a later step then settles it for all steps since.
        """
        counted: tuple[int, ...] | None = getattr(self.exchange, "counted", ())
        return counted

    def before_backward(self, samples: int, planned: int) -> None:
        """Announce a backward whose loss is a sum, divided by `planned / ranks`."""
        if self._gradients is not None:
            self._gradients.before_backward(samples, planned)

    def weigh(self, samples: float) -> None:
        """Announce a backward whose loss is the mean over `samples` samples of this rank."""
        if self._gradients is not None:
            self._gradients.weigh(samples)

    def hold(self, held: bool) -> None:
        """While held, leave gradients local, to accumulate several backwards."""
        if self._gradients is not None:
            self._gradients.hold(held)

    def before_step(self) -> None:
        """Return once gradients are final on all ranks, and weights may change."""
        if self._before is not None:
            self._before.before_step()

    def after_step(self) -> None:
        """Exchange weights, or start to, after the optimizer has changed them."""
        if self._after is not None:
            self._after.after_step()
        self._close_steps()

    def finish(self) -> None:
        """Complete all messages under way: weights are then as the next step uses them."""
        if self._deferred is not None:
            self._deferred.finish()
            self._close_steps()

    def _close_steps(self) -> None:
        """Tell which members the last steps have used, if that is settled."""
        if self._recovery is not None and (counted := self.counted) is not None:
            self._recovery.commit_step(counted)

    def watch(self, module: nn.Module) -> None:
        """Add a module that was created after the exchange and uses its parameters."""
        if self._joins is not None:
            self._joins.watch(module)

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        """Adapt to parameters that have been cut in the same way on all ranks. Collective."""
        self.exchange.reshape(cuts)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that later steps depend on besides weights."""
        return self.exchange.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, after weights were loaded."""
        self.exchange.load_state(state)

    def statistics(self) -> dict[str, float]:
        """Totals since the start: `wait_s`, `messages`, `bytes` and more of some exchanges."""
        return self.exchange.statistics()

    def close(self) -> None:
        """Remove all hooks and close the communicator. Collective."""
        self.exchange.close()


def start_exchange(
    spec: ExchangeSpec,
    named: Named,
    modules: Iterable[nn.Module],
    comm: Communicator,
    seed: int = 0,
    pretend_nodes: int | None = None,
) -> ExchangeCalls:
    """Start the exchange of some parameters. Collective.

    Args:
        named: parameters with their names, in the same order on all ranks.
        modules: modules whose forward passes use the parameters.
        comm: all ranks; duplicated or split.
        seed: seeds the choice of partners.
        pretend_nodes: behave as if the ranks were on that many nodes.

    Raises UsageError for complex parameters, unless there is one rank.
    """
    recovery = recovery_of(comm)
    if comm.size > 1 or recovery is not None:
        check_real(named)
    node_of = find_nodes(comm, pretend_nodes).node_of
    members = () if recovery is None else recovery.membership.members
    setting = ExchangeContext(spec, comm, node_of, seed, recovery=recovery, members=members)
    return ExchangeCalls(make_exchange(setting, named, modules), recovery)


def make_exchange(setting: ExchangeContext, named: Named, modules: Iterable[nn.Module]) -> Exchange:
    """Create the exchange that a spec describes. Collective.

    Args:
        setting: its communicator is duplicated or split, not kept.
        named: parameters with their names, in the same order on all ranks.
        modules: modules whose forward passes use the parameters.
    """
    from dlio.exchange.asgd import Asgd
    from dlio.exchange.gossip import Gossip
    from dlio.exchange.local_sgd import LocalSgd
    from dlio.exchange.node_gossip import NodeGossip
    from dlio.exchange.synchronous_sgd import SynchronousSgd

    spec = setting.spec
    nodes = len(set(setting.node_of.tolist()))
    if spec.pairwise and not spec.flat and 1 < nodes < setting.comm.size:
        return NodeGossip(named, modules, setting)
    own = replace(setting, comm=setting.comm.dup())
    if spec.pairwise:
        # With one node, or one rank per node, gossip is between ranks.
        return Gossip(named, modules, own)
    if spec.merge == "parzen":
        if own.comm.size > 1 and named:
            # It has no other path than the host's; a GPU's user finds the reason in the log.
            find_path([p.device for _, p in named], spec, own.comm, own.recovery is not None)
        return Asgd(named, own)
    if spec.payload == "delta":
        return LocalSgd(named, own)
    return SynchronousSgd(named, own)
