"""Other ways to prune a network while it trains, as callbacks of `dlio train`.

torch-pruning chooses neurons on a copy of the model. dlio cuts them, so that the optimizer keeps
its state, which torch-pruning's own cuts discard.
"""

import gc
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_size import count_parameters
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import GroupMember, Indices, NeuronGroup
from dlio.features.pruning.removal_plan import RemovalPlan
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.model_copies import bare_copy
from dlio.train.report import EpochReport
from dlio.util.input_files import as_usage, read_json
from dlio_bench.prune.removal_case import by_chance

_LITTLE: Final = 1e-6
"""Widths are rounded down; this much less is removed, so that whole numbers stay as they are."""
_RATIO: Final = 0.5
"""Share of each layer's channels that torch-pruning removes."""
_ROUNDS: Final = {0.02: 0.5, 0.3: 1.0}
"""Of it, the part that is removed by each round, by the fraction of the training before."""
_ONCE: Final = 0.3
"""Fraction of the training before a single cut."""
_LASSO: Final = 0.25
"""Share of the lasso in the first loss; the authors take 0.2 to 0.25."""


class CpuTime(Callback):
    """Report, as `cpu_s` of each epoch, the CPU seconds of rank 0's process since the first step.

    They include evaluation and, on several ranks, the time that MPI waits.
    """

    _began = 0.0

    def begins(self, run: Run) -> None:
        self._began = time.process_time()

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        report.features["cpu_s"] = time.process_time() - self._began


class NetworkCutter(Callback):
    """Cut a network, its optimizer and its exchange on all ranks alike.

    The report of each epoch gets `cut`: the `parameters` of the network at its end, and the
    `widths` of its groups, in the model's order.
    """

    groups: tuple[NeuronGroup, ...] = ()
    """Groups of the network as it is."""
    example = torch.zeros(0)
    """Input of the network; shape (2, 3, side, side)."""

    def begins(self, run: Run) -> None:
        side = run.config.model.image_size
        self.example = torch.zeros(2, 3, side, side)
        self.groups = find_groups(run.model, self.example).groups

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        widths = [group.width for group in self.groups]
        report.features["cut"] = {"parameters": count_parameters(run.model), "widths": widths}

    def cut(self, run: Run, keep: Mapping[str, Indices]) -> None:
        """Keep these neurons, by group; groups that are missing stay whole. Call it on all ranks
        with the same neurons."""
        plan = RemovalPlan(dict(keep))
        applied = apply(
            run.model, self.groups, plan, [run.optimizer], aligned=(run.exchange.reshape,)
        )
        if applied.cuts:
            self.groups = applied.groups
            run.reshaped()


class Chance(NetworkCutter):
    """Remove neurons by chance: as many as somebody else's rounds did, after the same steps.

    The file `rounds` is a list in JSON, with `step` and `widths` of each round.
    """

    def __init__(self, rounds: str, seed: int) -> None:
        with as_usage(rounds, "give the rounds of another run"):
            stored: Any = read_json(rounds)
            self._widths = {each["step"]: each["widths"] for each in stored if each["widths"]}
        self._generator = np.random.default_rng(seed)

    def after_step(self, run: Run) -> None:
        if run.updates in self._widths:
            widths = self._widths[run.updates]
            self.cut(run, by_chance(self.groups, widths, self._generator).keep)


class PruneTrain(NetworkCutter):
    """PruneTrain: lasso on the weights of each input and each output channel from the start, and
    periodic cuts of channels that reach zero.

    Source: Lym et al., arXiv 1901.09290.

    The lasso's part of each step is a proximal one, which reaches zero exactly, where the authors
    add its gradient and cut below a threshold. The size of the batch stays.
    """

    _penalty = 0.0

    def begins(self, run: Run) -> None:
        super().begins(run)
        classes = [each.out_features for each in run.model.modules() if isinstance(each, nn.Linear)]
        total = sum(
            float(norms(run.model, member).sum())
            for group in self.groups
            for member in (*group.producers, *group.consumers)
        )
        first_loss = math.log(classes[-1])
        self._penalty = _LASSO / (1 - _LASSO) * first_loss / total

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        settings = run.optimizer.param_groups[0]
        step = settings["lr"] * self._penalty / (1 - settings.get("momentum", 0.0))
        for group in self.groups:
            for member in (*group.producers, *group.consumers):
                shrink(run.model, member, step)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        keep = {group.name: remaining(run.model, group) for group in self.groups}
        self.cut(run, {name: left for name, left in keep.items() if len(left)})
        super().epoch_ends(run, report)


def norms(model: nn.Module, member: GroupMember) -> torch.Tensor:
    """Norm of each neuron's weights on one side of one layer; shape (width,)."""
    weight = model.get_submodule(member.module).get_parameter("weight").detach()
    rows = weight.movedim(member.dim, 0).flatten(1).square().sum(1)
    channels = torch.from_numpy(member.channels).to(rows.device)
    return rows[channels].sum(1).sqrt()


def shrink(model: nn.Module, member: GroupMember, step: float) -> None:
    """Shorten each neuron's weights by `step`, to zero at least."""
    weight = model.get_submodule(member.module).get_parameter("weight")
    factors = (1 - step / norms(model, member).clamp(min=1e-30)).clamp(min=0)
    each = torch.ones(weight.shape[member.dim], device=weight.device)
    each[torch.from_numpy(member.channels).to(weight.device)] = factors[:, None]
    weight.mul_(each.view([-1 if dim == member.dim else 1 for dim in range(weight.ndim)]))


def remaining(model: nn.Module, group: NeuronGroup, multiple: int = 8) -> Indices:
    """Return the neurons that stay: all that some producer computes and some consumer reads.

    Rounded up to a multiple by the largest of the others; `multiple` at least.
    """
    made = _largest(model, group.producers)
    read = _largest(model, group.consumers)
    alive = np.minimum(made, read)
    count = max(multiple, -(-int((alive > 0).sum()) // multiple) * multiple)
    order = np.argsort(-alive, kind="stable")[: min(count, group.width)]
    return np.sort(order).astype(np.int64)


def _largest(model: nn.Module, members: Sequence[GroupMember]) -> npt.NDArray[np.float32]:
    largest = torch.stack([norms(model, member) for member in members]).amax(0)
    return largest.cpu().numpy().astype(np.float32)


class GroupMagnitude(NetworkCutter):
    """torch-pruning's BasePruner with GroupMagnitudeImportance: cut in rounds of equal size.

    Source: Fang et al., "DepGraph", arXiv 2301.12900.
    """

    def begins(self, run: Run) -> None:
        super().begins(run)
        steps = _steps_of(run)
        self._left = {max(1, int(at * steps)): 1 - _RATIO * part for at, part in _ROUNDS.items()}
        """Fraction of the channels that is left, by step."""
        self._whole = {group.name: group.width for group in self.groups}

    def after_step(self, run: Run) -> None:
        left = self._left.get(run.updates)
        if left is not None:
            gone = {
                group.name: 1 - left * self._whole[group.name] / group.width
                for group in self.groups
            }
            self.cut(run, chosen(run.model, self.groups, self.example, max(gone.values())))


class GroupNorm(NetworkCutter):
    """torch-pruning's GroupNormPruner: regularise groups of weights first, then cut once."""

    _pruner: Any = None

    def begins(self, run: Run) -> None:
        super().begins(run)
        self._at = int(_ONCE * _steps_of(run))
        training = run.model.training
        self._pruner = _pruner("GroupNormPruner", run.model, self.example, _RATIO)
        run.model.train(training)

    def before_step(self, run: Run) -> bool:
        if self._pruner is not None:
            self._pruner.regularize(run.model)
        return True

    def after_step(self, run: Run) -> None:
        if run.updates == self._at:
            self._pruner = None
            gc.collect()  # It is part of cycles that hold on to the parameters.
            self.cut(run, chosen(run.model, self.groups, self.example, _RATIO))


def _steps_of(run: Run) -> int:
    return run.config.optimizer.epochs * len(run.loader)


def chosen(
    model: nn.Module, groups: Sequence[NeuronGroup], example: torch.Tensor, ratio: float
) -> dict[str, Indices]:
    """Return the neurons of each group that torch-pruning keeps, by the norm of their weights, if
    it removes a fraction of each layer's channels."""
    copy = bare_copy(model)
    for parameter in copy.parameters():
        parameter.requires_grad_(True)
    names = {id(module): name for name, module in copy.named_modules()}
    by_producer = {member.module: (group, member) for group in groups for member in group.producers}
    keep: dict[str, Indices] = {}
    for coupled in _pruner("BasePruner", copy, example, ratio).step(interactive=True):
        dependency, channels = coupled[0]
        name = names[id(dependency.target.module)]
        if name not in by_producer:
            continue
        group, member = by_producer[name]
        gone = np.isin(member.channels, np.asarray(channels)).any(1)
        if not gone.all():
            keep[group.name] = np.flatnonzero(~gone).astype(np.int64)
    return keep


def _pruner(kind: str, model: nn.Module, example: torch.Tensor, ratio: float) -> Any:
    """A pruner of torch-pruning that leaves the classifier alone."""
    import torch_pruning

    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.enable_grad():  # Callbacks run without gradients, which it traces.
        return getattr(torch_pruning.pruner, kind)(
            model,
            example,
            importance=torch_pruning.importance.GroupMagnitudeImportance(),
            pruning_ratio=ratio - _LITTLE,
            ignored_layers=[last],
        )
