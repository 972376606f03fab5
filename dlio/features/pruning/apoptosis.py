"""`dlio.Apoptosis`: remove redundant neurons while a network trains, on all ranks together."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlio.comm import Communicator, world
from dlio.comm.single import SingleCommunicator
from dlio.comm.survival.recovery import uniform
from dlio.errors import DlioError, UsageError
from dlio.exchange.cut import TensorCut
from dlio.exchange.distribute import ExchangeHandle, exchange_around
from dlio.exchange.exchange_base import Exchange
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.input_statistics import StatisticsWindow
from dlio.features.pruning.model_size import count_parameters, widths_for
from dlio.features.pruning.model_surgery import PrunedLayout, apply, shrink_to
from dlio.features.pruning.model_wrappers import (
    check_data_parallel,
    forget_graphs,
    uncompiled,
    without_compiler,
    without_reducer,
)
from dlio.features.pruning.neuron_groups import (
    JsonRecord,
    ModelInput,
    NeuronGroup,
    PrunableGroups,
    shrunk,
)
from dlio.features.pruning.plan_trials import PlanTrials, Probe, TrialResult
from dlio.features.pruning.pruning_pace import TOLERANCE, PruningPace, Schedule
from dlio.features.pruning.pruning_report import Round
from dlio.features.pruning.removal_plan import Limits
from dlio.util.closable import Closable
from dlio.util.units import counted


class ApoptosisState(TypedDict):
    """`Apoptosis.state_dict` as JSON types."""

    layout: JsonRecord
    steps: int
    collected: int
    watching: bool
    pace: dict[str, object]
    rounds: list[JsonRecord]


class Apoptosis(Closable):
    """Remove redundant neurons while a network trains; exported as `dlio.Apoptosis`.

        apoptosis = dlio.Apoptosis(model, optimizer, example=images[:2], steps=total, probe=loss)
        for images, labels in loader:
            ...  # zero_grad, forward, backward
            optimizer.step()
            apoptosis.step()

    Statistics are sampled during ordinary forward passes, in one step of `schedule.every`. When a
    window is full, rank 0 plans removals from the statistics of all ranks, and the plan is tried on
    a copy of the model. Removals that keep the probe's loss low are carried out after the same step
    on all ranks: in the model, the optimizers' state and the exchange, and through `on_cut`.

    Parameters keep their identity. A model that torch.compile has compiled, whole or in parts, is
    compiled again after a round; steps that are sampled run uncompiled. A model in torch's
    DistributedDataParallel goes on in it, with new buckets. Other objects made from shapes do not
    survive a round, such as CUDA graphs; torch's FSDP is refused.

    All methods that change anything are collective: call them on all ranks alike. The object is a
    context manager that closes itself.

    Source: neuron apoptosis (arXiv 1610.00790).

    Args:
        model: the model to prune, or the DistributedDataParallel that it is in.
        optimizer: one or several; gradients are sampled at the step of the first.
        example: input of the model for a few samples.
        probe: return the mean loss of a model on some samples of this rank, or the pair (sum of
            losses, number of samples), with (0, 0) if there are none now. It is called with copies
            of the model, without gradients. If None, rounds are accepted by their bounds alone.
        exchange: by default the exchange of `dlio.distribute` or `dlio run` for these optimizers;
            a DistributedDataParallel needs none.
        steps: optimizer steps of the whole training. Without it, rounds go on until `expect` or
            `stop` is called.
        tolerance: percentage points of held-out accuracy that pruning may cost.
        limits: settings apart from the schedule's: thresholds for constant and twin neurons, frozen
            groups, multiples of widths. The schedule overrides `loss`.
        schedule: when and how much to prune; see `Schedule`.
        on_cut: called with all cuts after each round, to apply `cut.of` to companion tensors.

    If the exchange lets ranks hold different weights (gossip, asgd), constants and bounds are
    computed from rank 0's weights. They are exact on other ranks as far as the weights agree.

    Raises UsageError if torch-pruning is missing, if nothing in the model can be pruned, if there
    are several ranks but no exchange, or if DistributedDataParallel has options that are bound to
    shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        example: ModelInput,
        probe: Probe | None = None,
        exchange: Exchange | ExchangeHandle | None = None,
        steps: int | None = None,
        tolerance: float = TOLERANCE,
        limits: Limits | None = None,
        schedule: Schedule | None = None,
        on_cut: Iterable[Callable[[Sequence[TensorCut]], None]] = (),
    ) -> None:
        model = uncompiled(model)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self.model = model = model if self._ddp is None else self._ddp.module
        self.optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        _check_reshapable(model, self.optimizers)
        around = [exchange] if exchange is not None else map(exchange_around, self.optimizers)
        self._exchanges: Sequence[Exchange | ExchangeHandle] = [
            each for each in dict.fromkeys(around) if each is not None
        ]
        comm = world()
        if self._ddp is not None:
            if self._exchanges:
                raise UsageError(
                    "both DistributedDataParallel and an exchange of dlio's would sum the "
                    "gradients: use one of them (dlio.distribute needs the module without DDP)"
                )
            check_data_parallel(self._ddp, comm)
        elif comm.size > 1 and not self._exchanges:
            raise UsageError(
                f"Apoptosis on {counted(comm.size, 'rank')} needs the exchange that keeps their "
                "weights "
                "together: make it after dlio.distribute, or pass exchange="
            )
        together = self._exchanges or self._ddp is not None
        self._comm: Communicator = comm.dup() if together else SingleCommunicator()
        self._limits, self._on_cut = limits or Limits(), list(on_cut)
        self._probe = probe
        self.schedule = schedule or Schedule(tolerance=tolerance)
        self._pace = PruningPace(self.schedule, steps)
        self.example = example
        with without_compiler():
            prunable = find_groups(model, example)
        self.found: PrunableGroups = prunable
        """Groups of the original model, and the layers left alone, with reasons."""
        self._check_groups()
        self._original = self.found.groups
        self.groups: tuple[NeuronGroup, ...] = self.found.groups
        """Groups of the model as it is now."""
        self._target: Mapping[str, int] = {}
        """Widths by group to which the first round cuts; empty without a target."""
        fraction = self.schedule.target
        if fraction is not None and fraction < 1:
            self._target = widths_for(model, self._original, fraction, self._limits.multiple)
        self.layout = PrunedLayout()
        """The cuts so far."""
        self.parameters_at_first = count_parameters(model)
        self.steps = 0
        """Calls of `step` so far."""
        self.rounds: list[Round] = []
        """All rounds so far."""
        self._rounds_s = 0.0
        self._began = time.perf_counter()
        self._window = StatisticsWindow(model, self.groups, self.schedule.every, self.optimizers[0])

    def close(self) -> None:
        """Remove all hooks; the model stays as it is. Collective."""
        self._window.close()
        self._comm.close()
        self._exchanges = []

    def stop(self, reason: str = "asked to") -> None:
        """Make no more rounds. Call it on all ranks."""
        self._pace.stopped = self._pace.stopped or reason
        self._window.pause()

    def expect(self, steps: int) -> None:
        """Set the number of remaining steps, if it was unknown or has changed.

        Call it on all ranks with the same number.
        """
        self._pace.steps = self.steps + steps
        self._watch()

    def look(self) -> None:
        """Sample the final, unscaled gradients now.

        Call it before clipping gradients. Without this call, gradients are sampled when the first
        optimizer's step begins.
        """
        self._window.look()

    @property
    def stopped(self) -> str:
        """Reason why there will be no more rounds; empty while there may be."""
        return self._pace.stopped

    def due(self, steps: int = 1) -> bool:
        """True if one of the next `steps` calls of `step` makes a round."""
        return any(self._pace.due(self.steps + ahead) for ahead in range(1, steps + 1))

    def step(self) -> Round | None:
        """Count a step, and make a round if one is due; return its record.

        Call it after each step of the optimizers, even one that was skipped. Collective.
        """
        self.steps += 1
        self._window.step_ends()
        done = None
        if self._pace.due(self.steps):
            began = time.perf_counter()
            done = self._round(began)
            self._rounds_s += time.perf_counter() - began
            if done is not None:
                self.rounds.append(done)
        self._watch()
        return done

    def held_out(self, accuracy: float, training: float | None = None) -> None:
        """Report accuracies, as fractions of 1, so that pruning adapts.

        Pruning slows down when the held-out accuracy falls by more than the tolerance, and stops
        when that happens twice in a row. If the accuracy on training data exceeds it by more than
        the tolerance, more neurons may be removed. Call it on all ranks with the same numbers.

        Raises UsageError for numbers outside 0 to 1.
        """
        for number in (accuracy, training):
            if number is not None and not 0 <= number <= 1:
                raise UsageError(f"held_out({number}): give the share of right answers, 0 to 1")
        self._pace.held_out(accuracy, self.steps, training)
        self._watch()

    def overhead(self) -> dict[str, float]:
        """Cost on this rank: `steps` sampled; `share` and `rounds_share`, the fractions of all time
        since construction spent on sampling and on rounds."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        return {
            "steps": float(self._window.looks),
            "share": self._window.seconds / seconds,
            "rounds_share": self._rounds_s / seconds,
        }

    def state_dict(self) -> ApoptosisState:
        """Layout, schedule and history as JSON types; equal on all ranks."""
        return {
            "layout": self.layout.to_json(),
            "steps": self.steps,
            "collected": self._window.looks_before,
            "watching": not self._window.paused,
            "pace": self._pace.to_json(),
            "rounds": [each.to_json() for each in self.rounds],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's window of statistics, to save along with `state_dict`; later steps may
        overwrite the tensors."""
        return self._window.collector.state()

    def take_layout(self, layout: PrunedLayout) -> None:
        """Cut the unpruned model to a saved layout.

        Afterwards load the weights and the optimizers' state, then call `load_state_dict`.
        Collective. Raises DlioError if the model has already been pruned.
        """
        if self.layout.version:
            raise DlioError(
                "the model has been pruned already: make a new one to apply a saved layout to"
            )
        forget_graphs()
        with without_reducer(self._ddp):
            cuts = shrink_to(self.model, layout, self.optimizers)
        self.layout = layout
        self.groups = shrunk(self._original, layout.groups)
        self._publish(cuts)
        self._window.restart(self.groups)

    def load_state_dict(
        self, state: ApoptosisState, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Continue from a saved state, after `take_layout`.

        Without `tensors`, this rank's window of statistics, a new window begins.

        Raises DlioError if `take_layout` was not called with this state's layout.
        """
        if PrunedLayout.from_json(state["layout"]).version != self.layout.version:
            raise DlioError("the state belongs to another layout: call take_layout first")
        self.steps = int(state["steps"])
        self._pace = PruningPace.from_json(self.schedule, self._pace.steps, state["pace"])
        self.rounds = [Round.from_json(each) for each in state["rounds"]]
        self._window.load_state(int(state["collected"]), tensors or {})
        if not state["watching"]:
            self._window.pause()

    def _check_groups(self) -> None:
        widths = [[group.name, group.width] for group in self.found.groups]
        if any(other != widths for other in self._comm.allgather(widths)):
            raise DlioError(
                "ranks have different groups of neurons: make the same model on all of them"
            )
        if not widths:
            reasons = "; ".join(map(str, self.found.left_alone[:3]))
            raise UsageError(f"nothing in the model can be pruned: {reasons or 'it has no layers'}")

    def _watch(self) -> None:
        """Sample statistics as long as rounds may follow; after a pause, in a new window."""
        if self._pace.over(self.steps):
            self._window.pause()
        elif self._window.paused:
            self._pace.restart(self.steps)
            self._window.restart(self.groups)

    def _round(self, began: float) -> Round | None:
        """Plan, try, and carry out an acceptable plan.

        Returns None if all groups are left alone, or if the probe has no samples.
        """
        pace = self._pace
        alone = pace.limits(self._limits, None).frozen
        if all(group.name in alone for group in self.groups):
            pace.next_round(self.steps)
            return None
        with without_compiler():
            tried = uniform(self._comm, self._tried)
        if tried is None:
            pace.skipped(self.steps)
            return None
        result, allowed, pace.first_loss = tried
        pace.hurt(result.hurt)
        if result.plan.keep:
            self._carry_out(result, allowed)
        else:
            pace.nothing(self.steps, bool(result.hurt))
        return self._record(result, allowed, began)

    def _tried(self) -> tuple[TrialResult, float | None, float | None] | None:
        """Return (an acceptable plan, the rise of the loss that is allowed, the first loss).

        None if the probe has no samples. Collective. Changes nothing, so that it can be done again
        when a rank is lost.
        """
        pace = replace(self._pace)
        for exchange in self._exchanges:
            exchange.finish()
        probe = None if self._target else self._probe
        trials = PlanTrials(
            self.model, self.groups, self._window.collector.statistics(), probe, self._comm
        )
        if self._target:
            limits = replace(self._limits, loss=math.inf, share=1.0, least=self._target)
            return trials.round(limits, 0.0), None, None
        if trials.before is not None and not math.isfinite(trials.before):
            return None
        allowed = None if trials.before is None else pace.allowed(trials.before)
        least = {each.name: math.ceil(pace.keep * each.width) for each in self._original}
        limits = replace(pace.limits(self._limits, allowed), least={**least, **self._limits.least})
        return trials.round(limits, allowed or 0.0), allowed, pace.first_loss

    def _carry_out(self, result: TrialResult, allowed: float | None) -> None:
        """Cut the model, its optimizers and exchanges, and begin a new window."""
        forget_graphs()
        with without_reducer(self._ddp):
            applied = apply(
                self.model,
                self.groups,
                result.plan,
                self.optimizers,
                self.layout,
                aligned=(self._publish,),
            )
        self.groups, self.layout = applied.groups, applied.layout
        rise = 0.0 if result.after is None else result.after - (result.before or 0.0)
        has_probe = result.before is not None
        easily = not result.hurt and rise <= (allowed or 0.0) / 2 and has_probe
        self._pace.succeeded(self.steps, result.plan.keep, easily, result.gently, rise)
        self._window.restart(self.groups)
        if self._target and all(each.width <= self._target[each.name] for each in self.groups):
            self.stop("the target is reached")

    def _publish(self, cuts: Sequence[TensorCut]) -> None:
        for exchange in self._exchanges:
            exchange.reshape(cuts)
        for callback in self._on_cut:
            callback(cuts)

    def _record(self, result: TrialResult, allowed: float | None, began: float) -> Round:
        bounds: dict[str, float] = {}
        for removal in result.plan.removals:
            bounds[removal.kind] = max(removal.bound, bounds.get(removal.kind, 0.0))
        return Round(
            step=self.steps,
            parameters=count_parameters(self.model),
            removed=dict(Counter(removal.kind for removal in result.plan.removals)),
            bounds=bounds,
            widths={name: len(keep) for name, keep in result.plan.keep.items()},
            undone=result.hurt,
            loss_before=result.before,
            loss_after=result.after,
            allowed=allowed,
            seconds=time.perf_counter() - began,
        )


def _check_reshapable(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise UsageError for wrappers and optimizers whose state cannot be cut."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise UsageError(
                f"Apoptosis cannot cut a part of a model in torch's {type(module).__name__}: give "
                "a model that is in DistributedDataParallel as a whole, or use dlio.distribute"
            )
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise UsageError(
            "Apoptosis cannot cut parameters of which ranks have parts (FSDP, tensor_parallel): "
            "distribute the model with dlio.distribute"
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise UsageError(
            "Apoptosis cannot reshape the state of LBFGS, which flattens all parameters into one "
            "row: choose an optimizer whose state has the shape of its parameters"
        )
