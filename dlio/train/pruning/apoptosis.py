"""`dlio.Apoptosis`: neurons die while a network trains, and its tensors shrink, on all ranks."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import nn

from dlio.comm import Communicator, world
from dlio.comm.single import SingleCommunicator
from dlio.errors import DlioError, UsageError
from dlio.train.cut import Cut
from dlio.train.exchange.distribute import exchange_around
from dlio.train.pruning.apply import apply
from dlio.train.pruning.find import find_groups
from dlio.train.pruning.groups import Group, PrunableGroups, shrunk
from dlio.train.pruning.model_size import count_parameters
from dlio.train.pruning.pace import Pace, Schedule
from dlio.train.pruning.pruned_layout import PrunedLayout, shrink_to
from dlio.train.pruning.removal import Limits, Removal
from dlio.train.pruning.statistics import Collector
from dlio.train.pruning.trial import PlanTrials, Probe, TrialResult


class Reshapes(Protocol):
    """An exchange, as far as cuts concern it."""

    def finish(self) -> None: ...

    def reshape(self, cuts: Sequence[Cut]) -> None: ...


@dataclass(frozen=True, slots=True)
class Round:
    """What a round did, for reports."""

    step: int
    parameters: int
    """After it."""
    removed: dict[str, int] = field(default_factory=dict)
    """Neurons by kind: dead, constant, twin, unneeded."""
    bounds: dict[str, float] = field(default_factory=dict)
    """By kind the greatest bound of what a removal changes; see `plan` for its unit."""
    widths: dict[str, int] = field(default_factory=dict)
    """Per group that shrank, its neurons after it."""
    undone: tuple[str, ...] = ()
    """Groups whose removals hurt, and were not done."""
    loss_before: float | None = None
    """Of the probe."""
    loss_after: float | None = None
    allowed: float | None = None
    """By how much the probe's loss might rise."""
    seconds: float = 0.0


class Apoptosis:
    """Removes neurons that a network can do without, while it trains: exported as
    `dlio.Apoptosis`.

        apoptosis = dlio.Apoptosis(model, optimizer, example=images[:2], steps=total, probe=loss)
        for images, labels in loader:
            ...  # zero_grad, forward, backward
            optimizer.step()
            apoptosis.step()

    Statistics ride along with forward passes, a step in `every`. When a window is full, rank 0
    plans what may go, from what all ranks have seen; the plan is tried on a copy; and only what
    does not hurt is done, at the same step on all ranks, the exchange, the optimizers' state and
    `on_cut` included. Parameters stay the objects that they were. What must not be held on to is
    what was made of their shapes: torch's DDP, compiled graphs, CUDA graphs.

    Made, stepped, saved and closed on all ranks alike. A `with` closes it.

    Args:
        optimizer: one or several. The first one's step is where gradients are looked at.
        example: input of the model, a few samples: a tensor, a tuple or a dictionary.
        probe: the mean loss of a model on some samples of this rank, a number, or the pair (sum of
            losses, samples), (0, 0) where there is none now; called with copies of the model,
            without gradients. None: rounds are taken at their computed bounds.
        exchange: by default what `dlio.distribute` or `dlio run` keeps the optimizers' ranks
            together with.
        steps: of the optimizer in the whole training, whose last part prunes nothing. Without it
            `expect()` or `stop()` says when that is.
        tolerance: points of held-out accuracy that pruning may cost.
        limits: what may go beside the schedule's say: constant and twin neurons, frozen groups,
            multiples of widths; `loss` is the schedule's.
        schedule: when and how much; see `Schedule`.
        on_cut: called with all cuts after each round, to have `cut.of` tensors that lie beside.

    Where the exchange lets ranks have weights of their own (gossip, asgd), constants are folded
    and bounds computed with rank 0's: they hold for the others as far as weights agree.

    Raises UsageError where torch-pruning is missing, nothing of the model can be pruned, or ranks
    have no exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        example: Any,
        probe: Callable[[nn.Module], float | torch.Tensor | tuple[float, float]] | None = None,
        exchange: Reshapes | None = None,
        steps: int | None = None,
        tolerance: float = 0.5,
        limits: Limits | None = None,
        schedule: Schedule | None = None,
        on_cut: Iterable[Callable[[Sequence[Cut]], None]] = (),
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise UsageError(
                "Apoptosis cannot reshape what torch's DistributedDataParallel holds of a model: "
                "distribute it with dlio.distribute"
            )
        self.model = model
        self.optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        self._exchanges: list[Reshapes] = (
            [exchange] if exchange is not None else _around(self.optimizers)
        )
        if any(isinstance(each, torch.optim.LBFGS) for each in self.optimizers):
            raise UsageError(
                "Apoptosis cannot reshape what LBFGS remembers of all parameters in one row: "
                "choose an optimizer whose state has the shape of its parameters"
            )
        comm = world()
        if comm.size > 1 and not self._exchanges:
            raise UsageError(
                f"Apoptosis on {comm.size} ranks wants the exchange that keeps them together, or "
                "each cuts neurons of its own: make it after dlio.distribute, or give exchange="
            )
        self._comm: Communicator = comm.dup() if self._exchanges else SingleCommunicator()
        self._limits, self._on_cut = limits or Limits(), list(on_cut)
        self._weighed_probe = None if probe is None else _weighed(probe)
        self.schedule = schedule or Schedule(tolerance=tolerance)
        self._pace = Pace(self.schedule, steps)
        self.example = example
        self.found: PrunableGroups = find_groups(model, example)
        """What of the model as it was made can be pruned, and what is left alone, and why."""
        self._check_found()
        self._original = self.found.groups
        self.groups: tuple[Group, ...] = self.found.groups
        """Of the model as it is."""
        self.layout = PrunedLayout()
        self.parameters_at_first = count_parameters(model)
        self.steps = 0
        self.rounds: list[Round] = []
        self.collected = 0
        """Steps that have been looked at."""
        self._looking_s = self._rounds_s = 0.0
        self._began = time.perf_counter()
        self._collector = self._collecting()
        self._looked = False
        """Whether this step's gradients have been looked at before the optimizer's step."""
        self._hook = self.optimizers[0].register_step_pre_hook(self._before_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks away; the model stays as it is. Collective."""
        self._hook.remove()
        self._collector.close()
        self._comm.close()
        self._exchanges = []

    def stop(self, reason: str = "asked to") -> None:
        """No more rounds. To be called on all ranks."""
        self._pace.stopped = self._pace.stopped or reason
        self._collector.close()

    def expect(self, steps: int) -> None:
        """So many steps are left of the training, where that was not known or has changed. To be
        called on all ranks with the same number."""
        self._pace.steps = self.steps + steps
        self._watch()

    def look(self) -> None:
        """Gradients are final and not scaled any more; to be called before they are clipped, where
        they are. Otherwise they are looked at when the first optimizer's step begins."""
        self._collector.step()
        self._looked = True

    @property
    def stopped(self) -> str:
        """Why there will be no more rounds; empty while there may be."""
        return self._pace.stopped

    def due(self, steps: int = 1) -> bool:
        """Whether one of the next calls of `step`, so many, makes a round."""
        return any(self._pace.due(self.steps + ahead) for ahead in range(1, steps + 1))

    def step(self) -> Round | None:
        """After each step of the optimizers, also one that was left out; what was done, if it was
        time for a round. Collective."""
        self.steps += 1
        self._looked = False
        made = None
        if self._pace.due(self.steps):
            began = time.perf_counter()
            made = self._round(began)
            self._rounds_s += time.perf_counter() - began
            if made is not None:
                self.rounds.append(made)
        self._watch()
        return made

    def held_out(self, accuracy: float, training: float | None = None) -> None:
        """What held-out data say, as a part of 1, when somebody has looked: pruning slows down
        where it has fallen by more than the tolerance, and ends when that happens again. Where
        `training`, the accuracy in training, is above it, more neurons may go. To be called on all
        ranks with the same numbers. Raises UsageError for numbers that are no parts of 1."""
        for number in (accuracy, training):
            if number is not None and not 0 <= number <= 1:
                raise UsageError(f"held_out({number}): give the share of right answers, 0 to 1")
        self._pace.held_out(accuracy, self.steps, training)
        self._watch()

    def overhead(self) -> dict[str, float]:
        """Of this rank: `steps` looked at, the `share` of all time since the start that went into
        looking, and the one that went into rounds."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        looked = self._looking_s + self._collector.seconds
        return {
            "steps": float(self.collected + self._collector.looks),
            "share": looked / seconds,
            "rounds_share": self._rounds_s / seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Layout, schedule and history, of JSON's types; the same on all ranks."""
        return {
            "layout": self.layout.to_json(),
            "steps": self.steps,
            "collected": self.collected,
            "watching": not self._collector.closed,
            "pace": self._pace.to_json(),
            "rounds": [asdict(each) for each in self.rounds],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's window of statistics, beside `state_dict`."""
        return self._collector.state()

    def take_layout(self, layout: PrunedLayout) -> None:
        """Cut the model, as it was made, to the shapes of one that was saved; its weights and the
        optimizers' state are to be loaded after this, then `load_state_dict`. Collective."""
        if self.layout.version:
            raise DlioError("the model has been pruned: a layout goes onto one that was not")
        cuts = shrink_to(self.model, layout, self.optimizers)
        self.layout = layout
        self.groups = shrunk(self._original, layout.groups)
        self._tell(cuts)
        self._collect_anew()

    def load_state_dict(
        self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Go on from a saved state, whose layout has been taken.

        Args:
            tensors: this rank's; without them the window begins anew.
        """
        if PrunedLayout.from_json(state["layout"]).version != self.layout.version:
            raise DlioError("the state is of another layout: call take_layout first")
        self.steps, self.collected = int(state["steps"]), int(state["collected"])
        self._pace = Pace.from_json(self.schedule, self._pace.steps, dict(state["pace"]))
        self.rounds = [
            Round(**{**each, "undone": tuple(each["undone"])}) for each in state["rounds"]
        ]
        if tensors:
            self._collector.load_state(tensors)
        if not state["watching"]:
            self._collector.close()

    def _check_found(self) -> None:
        told = [[group.name, group.width] for group in self.found.groups]
        if any(other != told for other in self._comm.allgather(told)):
            raise DlioError("ranks found other groups of neurons: is the model the same on all?")
        if not told:
            reasons = "; ".join(map(str, self.found.left_alone[:3]))
            raise UsageError(f"nothing of the model can be pruned: {reasons or 'it has no layers'}")

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._looked:
            # Torch's scaler leaves it to a fused optimizer to take its scale off.
            scale = getattr(optimizer, "grad_scale", None)
            self._collector.step(1.0 if scale is None else scale)

    def _watch(self) -> None:
        """Look at neurons as long as there may be rounds; after a pause, in a window of its own."""
        if self._pace.over(self.steps):
            self._collector.close()
        elif self._collector.closed:
            self._pace.anew(self.steps)
            self._collect_anew()

    def _collecting(self) -> Collector:
        return Collector(self.model, self.groups, self.schedule.every)

    def _collect_anew(self) -> None:
        self._collector.close()
        self._looking_s += self._collector.seconds
        self.collected += self._collector.looks
        self._collector = self._collecting()

    def _round(self, began: float) -> Round | None:
        """Plan, try, and do what does not hurt. None where the probe has nothing to say yet, or
        all groups are left alone."""
        pace = self._pace
        alone = pace.limits(self._limits, None).frozen
        if all(group.name in alone for group in self.groups):
            pace.rested(self.steps)
            return None
        for exchange in self._exchanges:
            exchange.finish()
        trier = PlanTrials(
            self.model, self.groups, self._collector.statistics(), self._weighed_probe, self._comm
        )
        if trier.before is not None and not math.isfinite(trier.before):
            pace.skipped(self.steps)
            return None
        allowed = None if trier.before is None else pace.allowed(trier.before)
        least = {each.name: math.ceil(pace.keep * each.width) for each in self._original}
        limits = replace(pace.limits(self._limits, allowed), least={**least, **self._limits.least})
        tried = trier.round(limits, allowed or 0.0)
        pace.hurt(tried.hurt)
        if tried.plan.keep:
            applied = apply(
                self.model,
                self.groups,
                tried.plan,
                self.optimizers,
                self.layout,
                aligned=(self._tell,),
            )
            self.groups, self.layout = applied.groups, applied.layout
            rise = 0.0 if tried.after is None else tried.after - (tried.before or 0.0)
            easily = not tried.hurt and rise <= (allowed or 0.0) / 2 and trier.before is not None
            pace.succeeded(self.steps, tried.plan.keep, easily, tried.gently, rise)
            self._collect_anew()
        else:
            pace.nothing(self.steps, bool(tried.hurt))
        return self._told(tried, allowed, began)

    def _tell(self, cuts: Sequence[Cut]) -> None:
        for exchange in self._exchanges:
            exchange.reshape(cuts)
        for callback in self._on_cut:
            callback(cuts)

    def _told(self, tried: TrialResult, allowed: float | None, began: float) -> Round:
        by_kind: dict[str, list[Removal]] = {}
        for removal in tried.plan.removals:
            by_kind.setdefault(removal.kind, []).append(removal)
        return Round(
            step=self.steps,
            parameters=count_parameters(self.model),
            removed=dict(Counter(removal.kind for removal in tried.plan.removals)),
            bounds={kind: max(r.bound for r in those) for kind, those in by_kind.items()},
            widths={name: len(keep) for name, keep in tried.plan.keep.items()},
            undone=tried.hurt,
            loss_before=tried.before,
            loss_after=tried.after,
            allowed=allowed,
            seconds=time.perf_counter() - began,
        )


def _around(optimizers: Sequence[torch.optim.Optimizer]) -> list[Reshapes]:
    """Their exchanges, each once."""
    found: list[Reshapes] = []
    for optimizer in optimizers:
        exchange = exchange_around(optimizer)
        if exchange is not None and all(exchange is not other for other in found):
            found.append(exchange)
    return found


def _weighed(probe: Callable[[nn.Module], float | torch.Tensor | tuple[float, float]]) -> Probe:
    """Ranks' means count alike, where a probe does not say of how many samples its losses are."""

    def weighed(model: nn.Module) -> tuple[float, float]:
        told = probe(model)
        return told if isinstance(told, tuple) else (float(told), 1.0)

    return weighed
