"""`dlio.distribute`: a hand-written training loop on many ranks, by one line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dlio.comm import Communicator, world
from dlio.train.cut import Cut
from dlio.train.exchange import Exchange, ExchangeSpec, exchange_of, parse_exchange
from dlio.train.exchange.buckets import broadcast_state

_followed: "WeakKeyDictionary[torch.optim.Optimizer, Exchange]" = WeakKeyDictionary()
"""Exchanges that are called around an optimizer's steps."""


class Distributed:
    """What `distribute` has set up. `close` takes it away, on all ranks; as does `with`."""

    def __init__(self, exchanges: Sequence[Exchange], hooks: Sequence[Any]) -> None:
        self.exchanges = list(exchanges)
        """One for each optimizer."""
        self._hooks = list(hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def weigh(self, samples: float) -> None:
        """The next losses of this rank are means over so many samples: ranks then count by their
        samples. Without it all count alike."""
        for exchange in self.exchanges:
            exchange.weigh(samples)

    def before_backward(self, samples: int, planned: int) -> None:
        """In place of `weigh`: the next loss is this rank's sum over `samples`, divided by
        `planned / ranks`, where all ranks together were to have `planned`."""
        for exchange in self.exchanges:
            exchange.before_backward(samples, planned)

    def hold(self, held: bool) -> None:
        """While held, backward leaves gradients to this rank: held for all but the last of the
        batches that a step accumulates, they are sent once."""
        for exchange in self.exchanges:
            exchange.hold(held)

    def before_step(self) -> None:
        """Gradients are final when this returns. Called by the optimizers, where they are
        followed."""
        for exchange in self.exchanges:
            exchange.before_step()

    def after_step(self) -> None:
        """The optimizers have changed the weights, or left a step out."""
        for exchange in self.exchanges:
            exchange.after_step()

    def finish(self) -> None:
        """Join what is under way: before weights are looked at, of an exchange that sends them."""
        for exchange in self.exchanges:
            exchange.finish()

    def reshape(self, cuts: Sequence[Cut]) -> None:
        """Parameters have been cut, on all ranks alike; see `Exchange.reshape`. Collective."""
        for exchange in self.exchanges:
            exchange.reshape(cuts)

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same weights after every step, byte by byte."""
        return all(exchange.alike for exchange in self.exchanges)

    def state(self) -> dict[str, torch.Tensor]:
        """What the next steps depend on besides weights; see `Exchange.state`."""
        return {
            f"{number}/{name}": tensor
            for number, exchange in enumerate(self.exchanges)
            for name, tensor in exchange.state().items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`, after weights have been loaded; without one, afresh."""
        for number, exchange in enumerate(self.exchanges):
            exchange.load_state(
                {
                    name.removeprefix(f"{number}/"): tensor
                    for name, tensor in state.items()
                    if name.startswith(f"{number}/")
                }
            )

    def statistics(self) -> dict[str, float]:
        """This rank's sums since the beginning: `wait_s`, `messages` and `bytes` sent, and more of
        some exchanges."""
        told: dict[str, float] = {}
        for exchange in self.exchanges:
            for key, value in exchange.statistics().items():
                told[key] = told.get(key, 0.0) + value
        return told

    def close(self) -> None:
        """Finish, and remove all hooks. Collective."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        for optimizer, exchange in list(_followed.items()):
            if any(exchange is ours for ours in self.exchanges):
                del _followed[optimizer]
        for exchange in self.exchanges:
            exchange.close()
        self._hooks, self.exchanges = [], []


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    exchange: str = "allreduce",
    *,
    seed: int = 0,
    pretend_nodes: int | None = None,
    follow_steps: bool = True,
) -> Distributed:
    """Train on all ranks (of mpirun, srun or torchrun) what each of them trains: exported as
    `dlio.distribute`. Collective.

    Parameters and buffers become rank 0's. From then on `backward` leaves the mean of all ranks'
    gradients in `.grad`, so clipping, accumulation, schedulers and scalers go on as before; or, of
    an exchange that sends weights, `step` is followed by it. Ranks are to call `backward` and
    `step` alike, each on its own share of the data, with losses that are means.

    Args:
        optimizer: one or several, over parameters of `model`.
        exchange: as `dlio train --exchange` has it, see `dlio.train.exchange_spec`.
        seed: of whom gossip and asgd talk to.
        pretend_nodes: behave as if the ranks were on that many nodes.
        follow_steps: have `before_step` and `after_step` called by the optimizers. Without, the
            caller does, at every step, also at those that a scaler leaves out.

    Raises UsageError for an exchange that is none.
    """
    spec = parse_exchange(exchange)
    comm = world()
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    broadcast_state(model, comm)
    exchanges = exchanges_of(spec, model, optimizers, comm, seed, pretend_nodes)
    hooks: list[Any] = []
    if follow_steps:
        for each, made in zip(optimizers, exchanges, strict=True):
            hooks += follow(each, made)
    return Distributed(exchanges, hooks)


def exchanges_of(
    spec: ExchangeSpec,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    seed: int,
    pretend_nodes: int | None,
) -> list[Exchange]:
    """One for each optimizer; of a parameter that several have, the first one's. Collective."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    # As backward will come to them, whatever groups an optimizer has.
    places = {parameter: place for place, parameter in enumerate(names)}
    taken: set[nn.Parameter] = set()
    made: list[Exchange] = []
    for each in optimizers:
        of_each = sorted(parameters_of(each), key=lambda p: places.get(p, -1))
        named = [(names.get(p, f"parameter {k}"), p) for k, p in enumerate(of_each)]
        named = [(name, p) for name, p in named if p not in taken and p.requires_grad]
        taken |= {parameter for _, parameter in named}
        made.append(exchange_of(spec, named, model.modules(), comm, seed, pretend_nodes))
    return made


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """In the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def follow(optimizer: torch.optim.Optimizer, exchange: Exchange) -> Iterable[Any]:
    """Have an exchange called around an optimizer's steps; the hooks."""
    _followed[optimizer] = exchange
    return (
        optimizer.register_step_pre_hook(lambda *_: exchange.before_step()),
        optimizer.register_step_post_hook(lambda *_: exchange.after_step()),
    )


def exchange_around(optimizer: torch.optim.Optimizer) -> Exchange | None:
    """The exchange that `distribute` or `dlio run` has called around an optimizer's steps."""
    return _followed.get(optimizer)
