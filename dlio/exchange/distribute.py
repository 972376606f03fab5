"""`dlio.distribute`: a hand-written training loop on many ranks, by one line.

The trainer, `dlio run`, the Lightning strategy and the benchmarks start their exchanges here, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dlio.comm import Communicator, world
from dlio.comm.survival.recovery import recovery_of
from dlio.errors import UsageError
from dlio.exchange.buckets import Named, broadcast_state
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_base import Exchange
from dlio.exchange.exchange_factory import start_exchange
from dlio.exchange.exchange_spec import ExchangeSpec, parse_exchange
from dlio.exchange.peer_steps import PeerSteps
from dlio.util.arguments import named as named_as
from dlio.util.arguments import whole_number
from dlio.util.closable import Closable

_around: "WeakKeyDictionary[torch.optim.Optimizer, Exchange]" = WeakKeyDictionary()
"""Exchanges that are called around an optimizer's steps."""


class _OptimizerHook(Protocol):
    def remove(self) -> None: ...


class ExchangeHandle(Closable):
    """The exchanges of some optimizers, one each. `close`, or leaving `with`, ends them on all
    ranks.

    Args:
        spec: the exchange of each optimizer.
        comm: all ranks.
        seed: seeds the choice of partners.
        pretend_nodes: behave as if the ranks were on that many nodes.
        follow_steps: have the optimizers call `before_step` and `after_step`.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        comm: Communicator,
        seed: int = 0,
        pretend_nodes: int | None = None,
        follow_steps: bool = True,
    ) -> None:
        self._spec, self._comm = spec, comm
        self._seed, self._pretend_nodes = seed, pretend_nodes
        self._follow_steps = follow_steps
        self._of_optimizer: dict[torch.optim.Optimizer, Exchange] = {}
        self._hooks: list[_OptimizerHook] = []

    def add(
        self, optimizer: torch.optim.Optimizer, named: Named, modules: Iterable[nn.Module] = ()
    ) -> Exchange:
        """Start the exchange of an optimizer, with its parameters, except those of another
        exchange, in the same order on all ranks, and the modules whose forward passes use them.
        Collective.
        """
        exchange = start_exchange(
            self._spec, named, modules, self._comm, self._seed, self._pretend_nodes
        )
        self._of_optimizer[optimizer] = exchange
        if self._follow_steps:
            _around[optimizer] = exchange
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_: exchange.before_step()),
                optimizer.register_step_post_hook(lambda *_: exchange.after_step()),
            ]
        return exchange

    @property
    def exchanges(self) -> list[Exchange]:
        """One exchange per optimizer."""
        return list(self._of_optimizer.values())

    def exchange_of(self, optimizer: torch.optim.Optimizer) -> Exchange | None:
        """Return an optimizer's exchange, None if it has none."""
        return self._of_optimizer.get(optimizer)

    def weigh(self, samples: float, whole: float | None = None) -> None:
        """Announce that the next losses of this rank are means over `samples` samples, of a batch
        of `whole` samples on all ranks, if that is known.

        Ranks then count in proportion to their samples; without a call all ranks count alike. Call
        it before each backward, those that are held included.
        """
        for exchange in self.exchanges:
            exchange.weigh(samples, whole)

    def before_backward(self, samples: int, planned: int) -> None:
        """Announce, in place of `weigh`, that the next loss is a sum over this rank's `samples`,
        divided by `planned / ranks`, with the samples of all ranks.
        """
        for exchange in self.exchanges:
            exchange.before_backward(samples, planned)

    def hold(self, held: bool) -> None:
        """While held, backward leaves gradients local.

        Hold all but the last of the batches that a step accumulates, to send gradients once.
        """
        for exchange in self.exchanges:
            exchange.hold(held)

    def before_step(self) -> None:
        """Return once gradients are final. Optimizers call it if their steps are followed."""
        for exchange in self.exchanges:
            exchange.before_step()

    def after_step(self) -> None:
        """Exchange weights after the optimizers have changed them, or skipped a step."""
        for exchange in self.exchanges:
            exchange.after_step()

    def finish(self) -> None:
        """Complete messages under way, before weights are inspected."""
        for exchange in self.exchanges:
            exchange.finish()

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        """Adapt to parameters that have been cut in the same way on all ranks. Collective."""
        for exchange in self.exchanges:
            exchange.reshape(cuts)

    @property
    def alike(self) -> bool:
        """True if all ranks have bit-identical weights after every step."""
        return all(exchange.alike for exchange in self.exchanges)

    @property
    def peer_steps(self) -> PeerSteps | None:
        """The steps of other ranks that have reached this one; None if all ranks step together."""
        return self.exchanges[0].peer_steps

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that later steps depend on besides weights; see `Exchange.state`."""
        return {
            f"{number}/{name}": tensor
            for number, exchange in enumerate(self.exchanges)
            for name, tensor in exchange.state().items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state` after weights were loaded; an empty one starts afresh."""
        for number, exchange in enumerate(self.exchanges):
            exchange.load_state(
                {
                    name.removeprefix(f"{number}/"): tensor
                    for name, tensor in state.items()
                    if name.startswith(f"{number}/")
                }
            )

    def statistics(self) -> dict[str, float]:
        """Totals of this rank since the start: `wait_s`, `messages` and `bytes` sent, and more of
        some exchanges."""
        totals: dict[str, float] = {}
        for exchange in self.exchanges:
            for key, value in exchange.statistics().items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def close(self) -> None:
        """Finish, and remove all hooks. Collective."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        for optimizer, exchange in self._of_optimizer.items():
            if _around.get(optimizer) is exchange:
                del _around[optimizer]
            exchange.close()
        self._hooks, self._of_optimizer = [], {}


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    exchange: str = "allreduce",
    *,
    seed: int = 0,
    pretend_nodes: int | None = None,
    follow_steps: bool = True,
) -> ExchangeHandle:
    """Train one model together on all ranks (of mpirun, srun or torchrun). Collective.

    Parameters and buffers become rank 0's. From then on `backward` leaves the mean of all ranks'
    gradients in `.grad`, so that clipping, accumulation, schedulers and scalers work as before. An
    exchange of weights runs after each `step` instead. All ranks must call `backward` and `step`
    alike, each on its own share of the data, with losses that are means. Exported as
    `dlio.distribute`.

    Args:
        optimizer: one or several optimizers of the model's parameters.
        exchange: as in `dlio train --exchange`; see `dlio.exchange.exchange_spec`.
        seed: seeds the choice of partners (gossip, asgd).
        pretend_nodes: behave as if the ranks were on that many nodes.
        follow_steps: have the optimizers call `before_step` and `after_step`. Otherwise the caller
            calls them at every step, including those that a scaler skips.

    Raises UsageError for an unknown exchange.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"{named_as('model', model)}: give a torch.nn.Module")
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(several, list | tuple) or not all(
        isinstance(each, torch.optim.Optimizer) for each in several
    ):
        raise UsageError(
            f"{named_as('optimizer', optimizer)}: give an optimizer of torch, or a list of them"
        )
    if pretend_nodes is not None:
        whole_number("pretend_nodes", pretend_nodes, 1, None, "nodes")
    return connect(
        model,
        optimizer,
        parse_exchange(exchange),
        seed=whole_number("seed", seed),
        pretend_nodes=pretend_nodes,
        are_alike=False,
        follow_steps=follow_steps,
    )


def connect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    spec: ExchangeSpec,
    *,
    seed: int,
    pretend_nodes: int | None,
    are_alike: bool,
    follow_steps: bool,
    comm: Communicator | None = None,
) -> ExchangeHandle:
    """Do as `distribute`, among the ranks `comm`, or those of the job. Collective.

    If the models are alike, or soon will be, nobody gets rank 0's.
    """
    comm = world() if comm is None else comm
    if spec.fragments > 1 and recovery_of(comm) is not None:
        raise UsageError(f"exchange {spec}: does not survive lost ranks; leave the fragments out")
    if not are_alike:
        broadcast_state(model, comm)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    ranks = ExchangeHandle(spec, comm, seed, pretend_nodes, follow_steps)
    names = {parameter: name for name, parameter in model.named_parameters()}
    # In the model's order, which is about backward's reversed, however an optimizer groups them.
    places = {parameter: place for place, parameter in enumerate(names)}
    taken: set[nn.Parameter] = set()
    for each in optimizers:
        of_each = sorted(parameters_of(each), key=lambda p: places.get(p, -1))
        named = [(names.get(p, f"parameter {k}"), p) for k, p in enumerate(of_each)]
        named = [(name, p) for name, p in named if p not in taken and p.requires_grad]
        taken |= {parameter for _, parameter in named}
        ranks.add(each, named, model.modules())
    return ranks


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters in the order of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def exchange_around(optimizer: torch.optim.Optimizer) -> Exchange | None:
    """Return the exchange that `dlio.distribute` or `dlio run` calls around an optimizer's steps,
    None if there is none."""
    return _around.get(optimizer)
