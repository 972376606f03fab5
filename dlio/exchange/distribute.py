"""`dlio.distribute`: a hand-written training loop on many ranks, by one line.

The trainer, `dlio run`, the Lightning strategy and the benchmarks start their exchanges here, too.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlio.comm import Communicator, world
from dlio.comm.deadlines import tell_position
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.errors import UsageError
from dlio.exchange.batch_weights import BatchWeights
from dlio.exchange.buckets import Named, broadcast_state, broadcast_tensors, has_shape
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_base import Exchange
from dlio.exchange.exchange_factory import start_exchange
from dlio.exchange.exchange_spec import ExchangeSpec, parse_exchange
from dlio.exchange.loss_watch import BatchCount, LossWatch, TensorsOf
from dlio.exchange.peer_steps import PeerSteps
from dlio.exchange.step_values import StepValues
from dlio.exchange.step_watch import StepWatch
from dlio.util.arguments import named as named_as
from dlio.util.arguments import whole_number
from dlio.util.closable import Closable
from dlio.util.printable import log_line
from dlio.util.units import counted

_around: "WeakKeyDictionary[torch.optim.Optimizer, ExchangeHandle]" = WeakKeyDictionary()
"""Exchanges that are called around an optimizer's steps."""
_distributed: "WeakSet[ExchangeHandle]" = WeakSet()
"""Those of `distribute`."""
OF_SAMPLES: Final = "_dlio_of_samples"
"""Attribute of tensors with a part for each sample of a rank's batch: nobody else has them."""
_Closure = Callable[[], torch.Tensor | float | None]
_Naming = Callable[[Sequence[nn.Parameter]], Named]
_IGNORES_LOSS: Final = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
)
"""Optimizers that return a closure's loss, and do not look at it."""


class _OptimizerHook(Protocol):
    def remove(self) -> None: ...


@dataclass(slots=True)
class _OptimizerExchanges:
    """An optimizer, as it was at its last step."""

    exchanges: list[Exchange]
    """Those of its parameters, and those that were made for it."""
    requiring: list[int] = field(default_factory=list)
    """`id` of each parameter of its groups that requires gradients."""
    has_others: bool = False
    """True if some of these are not trained, or not yet."""


class ExchangeHandle(Closable):
    """The exchanges of some optimizers, one each, and one more for parameters that come later.
    `close`, or leaving `with`, ends them on all ranks.

    Args:
        spec: the exchange of each optimizer.
        comm: all ranks.
        seed: seeds the choice of partners.
        pretend_nodes: behave as if the ranks were on that many nodes.
        follow_steps: have the optimizers call `before_step` and `after_step`.
        naming: puts an optimizer's parameters into an order that is the same on all ranks, with
            names. Parameters that an optimizer gets, or that begin to require gradients, are
            exchanged then from its next step on, starting from rank 0's. Without it they are not.
        added: called with each exchange of such parameters.
        values: numbers that travel with gradients, if they are summed over all ranks.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        comm: Communicator,
        seed: int = 0,
        pretend_nodes: int | None = None,
        follow_steps: bool = True,
        naming: _Naming | None = None,
        added: Callable[[Exchange], None] | None = None,
        values: StepValues | None = None,
    ) -> None:
        self._spec, self._comm = spec, comm
        self._seed, self._pretend_nodes = seed, pretend_nodes
        self._follow_steps = follow_steps
        self._naming, self._added, self._values = naming, added, values
        self._followed: dict[torch.optim.Optimizer, _OptimizerExchanges] = {}
        self._of_parameter: dict[torch.Tensor, Exchange] = {}
        self._announce: Callable[[Exchange], None] | None = None
        """Repeats the last call about the next losses."""
        self._held = False
        self.samples = 1.0
        """This rank's weight in a closure's loss."""
        self._weighed = 0.0
        """Samples of losses since the last metric."""
        self.clipped: Callable[[], Iterable[torch.Tensor]] = tuple
        """Returns the parameters that may be clipped together."""
        self._without_gradient: list[_OptimizerHook] = []
        """Hooks of parameters that get no gradient, while this rank has no samples."""
        self._modules: list[nn.Module] = []
        self.exchanges: list[Exchange] = []
        """All of them, in the order in which they were made."""
        self._hooks: list[_OptimizerHook] = []
        if follow_steps and naming is not None:
            self._hooks.append(register_optimizer_step_pre_hook(self._any_steps))
        self.batches: BatchWeights | None = None
        """Weighs by a loader's batches, until the caller weighs."""
        self._has_told_metric = self._has_told_unlike = False
        self._watch: StepWatch | None = None
        self._losses: LossWatch | None = None

    def watch_steps(self) -> None:
        """Have a line tell if ranks part that are to have the same weights. Not on a device, where
        each look would wait for it."""
        assert self._naming is not None
        naming = self._naming
        if self._comm.size > 1 and self._follow_steps:
            self._values = self._watch = StepWatch(self._comm, lambda: naming(self._trained))
            tell_position(self._watch.position, self._watch.in_vain)

    def watch_losses(self) -> None:
        """Have lines tell of losses whose gradients are not to be averaged."""

        def weighing() -> BatchCount:
            if self.batches is not None:
                return self.batches.weighing
            return BatchCount(None, self.samples, is_even=False)

        def counted_as(line: str, counts: str) -> None:
            if self._watch is not None:
                self._watch.count_elements(line, counts)

        if self._comm.size > 1:
            is_first = self._comm.rank == 0
            self._losses = LossWatch(
                self._comm.size, is_first, self._of_parameter, weighing, counted_as
            )

    def look_at(self, tensors: TensorsOf, gradients: TensorsOf | None) -> None:
        """Look at the losses on which backward is about to be called."""
        if self._watch is not None:
            self._watch.begin_backward(0 if self.batches is None else self.batches.number)
        if self._losses is not None and self.alike:
            self._losses.look(tensors, gradients)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._of_parameter if isinstance(p, nn.Parameter)]

    def weigh_by_batches(self, model: nn.Module) -> None:
        """Have ranks count by the samples that a `dlio.DataLoader` hands out, until `weigh`."""
        if self._comm.size > 1:
            self.batches = BatchWeights(model, lambda: self.exchanges)

    def add(
        self, optimizer: torch.optim.Optimizer, named: Named, modules: Iterable[nn.Module] = ()
    ) -> Exchange | None:
        """Start the exchange of an optimizer, with its parameters, except those of another
        exchange, in the same order on all ranks, and the modules whose forward passes use them.
        Collective.

        None if all parameters have an exchange already, which then follows this optimizer, too.
        """
        self._modules = list(modules)
        exchange = self._begin(named) if named or not self.exchanges else None
        known = dict.fromkeys(
            self._of_parameter[p] for p in parameters_of(optimizer) if p in self._of_parameter
        )
        made = [] if exchange is None or exchange in known else [exchange]
        self._followed[optimizer] = _OptimizerExchanges([*known, *made])
        if self._follow_steps:
            _around[optimizer] = self
            self._hooks += [
                optimizer.register_step_pre_hook(self._step_begins),
                optimizer.register_step_post_hook(self._step_ends),
            ]
        return exchange

    def _begin(self, named: Named) -> Exchange:
        exchange = start_exchange(
            self._spec,
            named,
            self._modules,
            self._comm,
            self._seed,
            self._pretend_nodes,
            takes_assigned=self._naming is not None,
            values=self._values,
        )
        self.exchanges.append(exchange)
        self._of_parameter.update((parameter, exchange) for _, parameter in named)
        return exchange

    def exchanges_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Exchange]:
        """Return the exchanges of an optimizer's parameters, none if it was not added. Collective
        if some of them have none yet."""
        followed = self._followed.get(optimizer)
        if followed is None:
            return ()
        if self._naming is not None:
            # Twice a step, for all parameters: no call for each of them.
            requiring = [
                id(p)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.requires_grad
            ]
            if requiring != followed.requiring or followed.has_others:
                trained = trained_by(optimizer)
                followed.requiring = requiring
                followed.has_others = len(trained) < len(requiring)
                self._look_again(followed, trained, self._naming)
        return followed.exchanges

    def _look_again(
        self, followed: _OptimizerExchanges, trained: Sequence[nn.Parameter], naming: _Naming
    ) -> None:
        """Find the exchanges of an optimizer whose parameters have changed."""
        fresh = [p for p in trained if p not in self._of_parameter]
        if fresh:
            self._begin_later(naming(fresh))
        mine = [self._of_parameter[p] for p in trained]
        followed.exchanges = list(dict.fromkeys([*followed.exchanges, *mine]))

    def _begin_later(self, named: Named) -> None:
        computed = [(p, p.detach().clone()) for _, p in named if p.grad is not None]
        uniform(self._comm, lambda: broadcast_tensors([p for _, p in named], self._comm))
        self._tell_unlike(any(not torch.equal(p, before) for p, before in computed))
        exchange = self._begin(named)
        exchange.hold(self._held)
        if self._announce is not None:
            self._announce(exchange)
        if self.batches is not None:
            self.batches.use_again()
        if self._added is not None:
            self._added(exchange)

    def _tell_unlike(self, mine: bool) -> None:
        """Tell once, by rank 0, if ranks have computed gradients by other values of parameters that
        came later. `mine` is true if this rank's values were not rank 0's. Collective."""
        everyone: list[bool] = uniform(self._comm, lambda: self._comm.allgather(mine))
        if any(everyone) and not self._has_told_unlike:
            self._has_told_unlike = True
            if self._comm.rank == 0:
                log_line(
                    logging.WARNING,
                    "distribute: parameters that an optimizer got later had other values on each "
                    "rank. They are rank 0's from now on, but the gradients of this step come from "
                    "each rank's own: have all ranks make them from the same seed",
                )

    def take_clipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have the gradients of some parameters be the mean before they are clipped together: also
        assigned ones, and those of parameters that no optimizer has. Collective."""
        self._take_unowned(parameters)
        self.take_assigned()

    def _take_unowned(self, parameters: Iterable[torch.Tensor]) -> None:
        if self.alike and self._naming is not None:
            known = self._of_parameter
            fresh = [p for p in parameters if p.grad is not None and p not in known]
            leaves = [p for p in fresh if p.is_leaf and isinstance(p, nn.Parameter)]
            if leaves:
                self._begin_later(self._naming(leaves))

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """All parameters that have an exchange, in an order that is the same on all ranks."""
        return list(self._of_parameter)

    def exchange_of(self, parameter: torch.Tensor) -> Exchange | None:
        """Return a parameter's exchange, None if it has none."""
        return self._of_parameter.get(parameter)

    def _any_steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Follow an optimizer that was made later for known parameters, from its first step on."""
        if optimizer not in self._followed and optimizer not in _around:
            known = self._of_parameter
            if any(p in known for p in parameters_of(optimizer)):
                self.add(optimizer, [], self._modules)

    def _step_begins(
        self, optimizer: torch.optim.Optimizer, args: Any, options: Any
    ) -> tuple[Any, Any] | None:
        """Called by torch before a step; returns the step's arguments if they are to be others."""
        self.before_step(optimizer)
        if self._watch is not None:
            self._watch.check()
        closure = args[1] if len(args) > 1 else options.get("closure")
        # A script's own optimizer may take another argument first.
        if not callable(closure) or (agreed := self.agreed(optimizer, closure)) is closure:
            return None
        if len(args) > 1:
            return (args[0], agreed, *args[2:]), options
        return args, {**options, "closure": agreed}

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.after_step(optimizer)
        if self._watch is not None:
            self._watch.stepped(optimizer)

    def agreed(self, optimizer: torch.optim.Optimizer, closure: _Closure) -> _Closure:
        """Return a closure that has all ranks' mean loss where an optimizer decides by it, such as
        LBFGS, so that it takes the same way on all ranks."""
        # Its gradients are means only where each backward ends with all ranks' sum.
        if isinstance(optimizer, _IGNORES_LOSS) or self._comm.size == 1 or not self.alike:
            return closure

        def mean(*args: Any, **options: Any) -> torch.Tensor | float | None:
            loss = closure(*args, **options)
            if not isinstance(loss, float) and not (
                isinstance(loss, torch.Tensor) and loss.numel() == 1
            ):
                return loss  # Not a loss.
            value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            samples = self.samples if self.batches is None else self.batches.weight
            sums = np.array([value * samples if samples else 0.0, samples])
            self._comm.wait([self._comm.iallreduce(sums)], "the ranks' mean loss")
            value = sums[0] / sums[1]
            return torch.full_like(loss, value) if isinstance(loss, torch.Tensor) else value

        return mean

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer's parameters are exchanged."""
        return optimizer in self._followed

    def mean_metric(self, metric: float) -> float:
        """Return the ranks' mean of a metric that learning rates follow, which have to be the same
        on all ranks; the rank's own if ranks have weights of their own. Ranks count by their
        samples since the last call, alike where none are known. Says so, once, by rank 0.
        Collective."""
        samples = self._weighed if self.batches is None else self.batches.take_samples()
        self._weighed = 0.0
        mean = metric
        if self.alike and self._comm.size > 1:

            def gather() -> np.ndarray[Any, Any]:
                each = np.zeros((self._comm.size, 2))
                each[self._comm.rank] = metric, samples
                flat = each.reshape(-1)
                self._comm.wait([self._comm.iallreduce(flat)], "the metric of ReduceLROnPlateau")
                return each

            metrics, weights = uniform(self._comm, gather).T
            if (metrics == metrics[0]).all():
                return metric
            weights = weights if weights.any() else np.ones(len(weights))
            counts = weights > 0  # The metric of no samples may be NaN.
            mean = float(np.average(metrics[counts], weights=weights[counts]))
        if self._comm.size > 1 and not self._has_told_metric:
            self._has_told_metric = True
            gets = "gets their mean" if self.alike else "follows each rank's own"
            if self._comm.rank == 0:
                log_line(
                    logging.WARNING,
                    "distribute: ranks may step ReduceLROnPlateau with other metrics (%s on rank "
                    "0), and it %s; give it a metric of all samples, such as one that is summed "
                    "over the ranks",
                    f"{metric:g}",
                    gets,
                )
        return mean

    def weigh(self, samples: float) -> None:
        """Announce that the next losses of this rank are means over `samples` samples.

        Ranks then count in proportion to their samples. Without a call they count by the samples
        that a `dlio.DataLoader` hands out, and alike with other loaders. With 0 a rank's gradients
        count nothing: if all ranks have none, those of earlier backwards of the step stay.
        Gradients that were assigned to `.grad` since the last call are averaged now. Collective.
        """
        self._weigh_no_more()
        for exchange in self.exchanges:
            exchange.settle_assigned()
        self._leave_out(not samples)
        self.samples = samples
        self._weighed += samples
        self._announced(lambda exchange: exchange.weigh(samples))

    def _leave_out(self, leaves_out: bool) -> None:
        # Else each rank keeps its own in a step of which no rank has samples.
        if leaves_out == bool(self._without_gradient) or not self.alike:
            return
        for hook in self._without_gradient:
            hook.remove()
        every: Any = self._of_parameter if leaves_out else ()  # torch does not annotate the method.
        self._without_gradient = [
            each.register_hook(torch.zeros_like) for each in every if each.requires_grad
        ]

    def _announced(self, announce: Callable[[Exchange], None]) -> None:
        self._announce = announce
        for exchange in self.exchanges:
            announce(exchange)

    def before_backward(self, samples: int, planned: int) -> None:
        """Announce, in place of `weigh`, that the next loss is a sum over this rank's `samples`,
        divided by `planned / ranks`, with the samples of all ranks.
        """
        self._weigh_no_more()
        self._losses = None
        self._announced(lambda exchange: exchange.before_backward(samples, planned))

    def hold(self, held: bool) -> None:
        """While held, backward leaves gradients local.

        Hold all but the last of the batches that a step accumulates, to send gradients once.
        """
        self._held = held
        if self.batches is not None:
            self.batches.hold(held)
        for exchange in self.exchanges:
            exchange.hold(held)

    def _weigh_no_more(self) -> None:
        if self.batches is not None:
            self.batches.close()
            self.batches = None

    def follow(self) -> None:
        """Begin to exchange the parameters that optimizers have got, before a backward computes
        gradients of them that the caller may read. Collective."""
        self._around_step(None)

    def take_assigned(self) -> None:
        """Average gradients that were assigned to `.grad`, the first ones of parameters that came
        later, and those of parameters of the model that no optimizer has, before the step does.
        Collective."""
        if self._comm.size > 1:
            self._take_unowned(self.clipped())
        for exchange in self._around_step(None):
            exchange.take_assigned()

    def expect_changes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Learn that the gradients of some tensors are computed without a backward: those of
        parameters may be added to means in place."""
        for exchange in {self._of_parameter.get(each) for each in parameters}:
            if exchange is not None:
                exchange.expect_changes()

    def before_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Return once the gradients of an optimizer, or of all of them, are final. Optimizers call
        it if their steps are followed."""
        for exchange in self._around_step(optimizer):
            exchange.before_step()

    def after_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Exchange weights after an optimizer, or all of them, has changed them, or skipped a
        step."""
        exchanges: Sequence[Exchange] = self.exchanges
        if optimizer is not None:  # `before_step` has looked at its parameters.
            followed = self._followed.get(optimizer)
            exchanges = () if followed is None else followed.exchanges
        for exchange in exchanges:
            exchange.after_step()
        if self.batches is not None:
            self.batches.stepped()

    def _around_step(self, optimizer: torch.optim.Optimizer | None) -> Sequence[Exchange]:
        if optimizer is not None:
            return self.exchanges_of(optimizer)
        for each in self._followed:
            self.exchanges_of(each)
        return self.exchanges

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

    def join(self) -> None:
        """See `Exchange.join`."""
        for exchange in self.exchanges:
            exchange.join()

    def statistics(self) -> dict[str, float]:
        """Totals of this rank since the start: `wait_s`, `messages` and `bytes` sent, and more of
        some exchanges."""
        totals: dict[str, float] = {}
        for exchange in self.exchanges:
            for key, value in exchange.statistics().items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def __exit__(self, *raised: object) -> None:
        error = raised[1] if len(raised) > 1 else None
        if isinstance(error, BaseException) and self._watch is not None:
            self._watch.end_by(error)
        self.close()

    def close(self) -> None:
        """Finish, and remove all hooks. Collective."""
        self.finish()
        if self._watch is not None:
            tell_position(None)
            self._watch.close()
        self._weigh_no_more()
        self._leave_out(False)
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._followed:
            if _around.get(optimizer) is self:
                del _around[optimizer]
        for exchange in self.exchanges:
            exchange.close()
        self._hooks, self._followed, self.exchanges, self._of_parameter = [], {}, [], {}


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

    Parameters and buffers become rank 0's, and so do parameters that an optimizer gets later, or
    that begin to require gradients: they are exchanged from its next step on. `backward` leaves the
    mean of all ranks' gradients in `.grad`, so that clipping, accumulation, schedulers and scalers
    work as before. Gradients that are assigned to `.grad`, and the first ones of parameters that
    come later, are averaged before the step: call `take_assigned` before they are clipped, also
    where parameters that no optimizer has are clipped with them. Hooks on
    parameters see this rank's gradients, before the mean: clip those that `backward` leaves. An
    exchange of weights runs after each `step` instead. All ranks must call `backward` and `step`
    alike, each on its own share of the data, with losses that are means over samples; others are
    told. Gradients of different steps are an error, but for those on a GPU. Ranks count by the
    samples that a `dlio.DataLoader` hands out, until `weigh` is called; a loss of batches of
    several loaders with other shares is told. `ReduceLROnPlateau` gets the ranks' mean metric, by
    their samples, with a warning where theirs differ. Learning rates, and weights that are to be
    the same (compared after steps 1, 2, 4, 8, ...), are told once they differ by rank; not on a
    GPU. Exported as `dlio.distribute`.

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
    ranks = connect(
        model,
        optimizer,
        parse_exchange(exchange),
        seed=whole_number("seed", seed),
        pretend_nodes=pretend_nodes,
        are_alike=False,
        follow_steps=follow_steps,
        follow_parameters=True,
    )
    _tell_unowned(model, ranks)
    ranks.clipped = model.parameters
    ranks.weigh_by_batches(model)
    ranks.watch_losses()
    _distributed.add(ranks)
    _wrap(ReduceLROnPlateau, "step", _agree_on_plateaus)
    _wrap(torch.autograd, "grad", _follow_grad)
    _wrap(torch.autograd, "backward", _follow_backward)
    return ranks


def _wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Put a function around another one, once."""
    original = getattr(owner, name)
    if not getattr(original, "_is_dlios", False):
        wrapped = wraps(original)(around(original))
        vars(wrapped)["_is_dlios"] = True
        setattr(owner, name, wrapped)


def _follow_grad(original: Any) -> Any:
    """Have distributed exchanges learn of the calls of `torch.autograd.grad`."""

    def grad(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        several = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        for ranks in tuple(_distributed):
            ranks.expect_changes(each for each in several if isinstance(each, torch.Tensor))
        return original(outputs, inputs, *args, **options)

    return grad


def _follow_backward(original: Any) -> Any:
    """Have distributed exchanges look at losses."""

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        # A backward inside another one is that of a checkpoint.
        if torch._C._current_graph_task_id() < 0 and not torch.compiler.is_compiling():
            for ranks in tuple(_distributed):
                ranks.look_at(tensors, grad_tensors)
        original(tensors, grad_tensors, *args, **options)

    return backward


def _agree_on_plateaus(original: Any) -> Any:
    """Have schedules of distributed optimizers that follow a metric get the ranks' mean."""

    def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **options: Any) -> None:
        for ranks in tuple(_distributed):
            if ranks.follows(scheduler.optimizer):
                metrics = ranks.mean_metric(float(metrics))
        original(scheduler, metrics, *args, **options)

    return step


def _tell_unowned(model: nn.Module, ranks: ExchangeHandle) -> None:
    """Warn of parameters that get gradients and have no optimizer: nobody exchanges them."""
    names = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and has_shape(each) and ranks.exchange_of(each) is None
    ]
    comm = world()
    if names and comm.size > 1 and comm.rank == 0:
        more = f" and {counted(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""
        log_line(
            logging.WARNING,
            "distribute: %s%s require gradients, and no optimizer has them: ranks exchange them "
            "from their first step of an optimizer on; before that, a change by hand differs on "
            "each rank, and so does a norm that is clipped over them, unless take_assigned is "
            "called first",
            names[0],
            more,
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
    follow_parameters: bool = False,
    comm: Communicator | None = None,
) -> ExchangeHandle:
    """Do as `distribute`, among the ranks `comm`, or those of the job. Collective.

    If the models are alike, or soon will be, nobody gets rank 0's. Unless the exchanges follow
    them, the optimizers' parameters stay those of now.
    """
    comm = world() if comm is None else comm
    if spec.fragments > 1 and recovery_of(comm) is not None:
        raise UsageError(f"exchange {spec}: does not survive lost ranks; leave the fragments out")
    if not are_alike:
        broadcast_state(model, comm)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)

    def naming(parameters: Sequence[nn.Parameter]) -> Named:
        # In the model's order, which is about backward's reversed, however an optimizer groups
        # them.
        of_model = {parameter: name for name, parameter in model.named_parameters()}
        places = {parameter: place for place, parameter in enumerate(of_model)}
        ordered = sorted(parameters, key=lambda p: places.get(p, -1))
        return [(of_model.get(p, f"parameter {k}"), p) for k, p in enumerate(ordered)]

    follow = naming if follow_parameters else None
    ranks = ExchangeHandle(spec, comm, seed, pretend_nodes, follow_steps, follow)
    if follow_parameters and not any(p.is_cuda for p in model.parameters()):
        ranks.watch_steps()
    for each in optimizers:
        mine = [p for p in trained_by(each) if ranks.exchange_of(p) is None]
        ranks.add(each, naming(mine), model.modules())
    return ranks


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters in the order of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters of the optimizer's groups that require gradients, but for those of lazy modules
    that have not computed yet, and tensors of a rank's own samples."""
    return [
        p
        for p in parameters_of(optimizer)
        if p.requires_grad and has_shape(p) and not getattr(p, OF_SAMPLES, False)
    ]


def exchange_around(optimizer: torch.optim.Optimizer) -> ExchangeHandle | None:
    """Return the exchanges that `dlio.distribute` or `dlio run` calls around an optimizer's steps,
    None if there are none."""
    return _around.get(optimizer)
