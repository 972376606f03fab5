"""The one way to start an exchange: `dlio.distribute`, the trainer and the suites all use it."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from dlio.comm import Communicator
from dlio.comm.job_nodes import find_nodes
from dlio.comm.survival.recovery import recovery_of
from dlio.exchange.buckets import Named, check_real
from dlio.exchange.buffer_placement import find_path
from dlio.exchange.exchange_base import Exchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.exchange_spec import ExchangeSpec
from dlio.exchange.lone_steps import note_exchange
from dlio.exchange.step_values import StepValues


def start_exchange(
    spec: ExchangeSpec,
    named: Named,
    modules: Iterable[nn.Module],
    comm: Communicator,
    seed: int = 0,
    pretend_nodes: int | None = None,
    takes_assigned: bool = False,
    values: StepValues | None = None,
) -> Exchange:
    """Start the exchange of some parameters. Collective.

    Args:
        named: parameters with their names, in the same order on all ranks.
        modules: modules whose forward passes use the parameters.
        comm: all ranks; duplicated or split.
        seed: seeds the choice of partners.
        pretend_nodes: behave as if the ranks were on that many nodes.
        takes_assigned: average gradients, too, that somebody has assigned to `.grad`.
        values: numbers that travel with gradients, if gradients are summed over all ranks.

    Raises UsageError for complex parameters, if there are several ranks and they do not exchange
    gradients by allreduce.
    """
    recovery = recovery_of(comm)
    sums = spec.alike and spec.compressor is None
    if not sums and (comm.size > 1 or recovery is not None):
        check_real(named)
    node_of = find_nodes(comm, pretend_nodes).node_of
    members = () if recovery is None else recovery.membership.members
    context = ExchangeContext(
        spec,
        comm,
        node_of,
        seed,
        recovery=recovery,
        members=members,
        takes_assigned=takes_assigned,
        values=values,
    )
    exchange = make_exchange(context, named, modules)
    exchange.reports_to = recovery
    return exchange


def make_exchange(context: ExchangeContext, named: Named, modules: Iterable[nn.Module]) -> Exchange:
    """Create the exchange that a spec describes, for parameters that are in the same order on all
    ranks, and modules whose forward passes use them. Collective.

    The context's communicator is duplicated or split, not kept.
    """
    from dlio.exchange.asgd import Asgd
    from dlio.exchange.gossip import Gossip
    from dlio.exchange.local_sgd import LocalSgd
    from dlio.exchange.node_gossip import NodeGossip
    from dlio.exchange.synchronous_sgd import SynchronousSgd

    note_exchange()
    spec = context.spec
    nodes = len(set(context.node_of.tolist()))
    if spec.pairwise and not spec.flat and 1 < nodes < context.comm.size:
        return NodeGossip(named, modules, context)
    own = replace(context, comm=context.comm.dup())
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
