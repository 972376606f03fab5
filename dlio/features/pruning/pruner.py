"""Connect `dlio.Apoptosis` to a run of `dlio train`: probe, reports and checkpoints."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from dlio.exchange.cut import TensorCut
from dlio.exchange.distribute import ExchangeHandle
from dlio.features.pruning.apoptosis import Apoptosis, ApoptosisState
from dlio.features.pruning.model_size import count_parameters, flops_per_sample, parameters_by_layer
from dlio.features.pruning.pruned_layout import PrunedLayout
from dlio.features.pruning.pruning_pace import TOLERANCE, Schedule
from dlio.train.config import TrainConfig
from dlio.train.precision import Precision
from dlio.train.report import PruningReport
from dlio.train.tasks.task_base import TrainingTask

_BATCHES: Final = 4
"""Number of batches in a probe: the last ones before a round."""
_MOST: Final = 256
"""Most samples in a probe."""
_EXAMPLES: Final = 2
_EVERY: Final = 2
"""Steps between two samplings with --prune-target: its only round is best early."""
_IMAGE_DIMENSIONS: Final = 4


class PrunerState(ApoptosisState):
    """`Pruner.state_dict` as JSON types."""

    told: int
    """Number of rounds reported so far."""
    batches: int
    """Number of batches in the probe."""


class Pruner:
    """The pruning of one rank. Owns the Apoptosis; `close` is collective.

    Args:
        steps: optimizer steps in the whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: ExchangeHandle,
        precision: Precision,
        task: TrainingTask,
        steps: int,
    ) -> None:
        self._precision, self._task = precision, task
        self._batches: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_BATCHES)
        self._cuts: Sequence[TensorCut] = []
        self._reported = 0
        """Number of rounds reported so far."""
        generator = torch.Generator().manual_seed(0)
        self.apoptosis = Apoptosis(
            model,
            optimizer,
            example=task.example(_EXAMPLES, generator)[0],
            probe=self._probe,
            exchange=exchange,
            steps=steps,
            schedule=_schedule(config),
            on_cut=(self._keep_cuts,),
        )
        self._flops_at_first = flops_per_sample(model, self.apoptosis.example)
        self._flops = 0, self._flops_at_first
        """(version of the layout, FLOPs per sample)."""

    def close(self) -> None:
        """Close the Apoptosis. Collective."""
        self.apoptosis.close()

    def add_batch(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep a batch for the probe if a round is near.

        Args:
            images: input of the model; shape (n, ...).
            labels: targets of the task; shape (n, ...).
        """
        if len(images) and self.apoptosis.due(_BATCHES):
            self._batches.append((images, labels))

    def step(self) -> Sequence[TensorCut]:
        """Return the cuts of this step; call it after each optimizer step. Collective."""
        self._cuts = []
        if self.apoptosis.due():
            self.apoptosis.step()
            self._batches.clear()
        else:
            self.apoptosis.step()
        return self._cuts

    def report(self) -> PruningReport:
        """Size of the model now, and the rounds since the last report."""
        apoptosis, model = self.apoptosis, self.apoptosis.model
        rounds, self._reported = apoptosis.rounds[self._reported :], len(apoptosis.rounds)
        if self._flops[0] != apoptosis.layout.version:
            flops = flops_per_sample(model, apoptosis.example)
            self._flops = apoptosis.layout.version, flops
        return {
            "parameters": count_parameters(model),
            "parameters_at_first": apoptosis.parameters_at_first,
            "layers": parameters_by_layer(model),
            "flops_per_sample": self._flops[1],
            "flops_at_first": self._flops_at_first,
            "rounds": [each.to_json() for each in rounds],
            "undone": sum(bool(each.undone) for each in rounds),
            "statistics": apoptosis.overhead(),
            "stopped": apoptosis.stopped,
            "left_alone": [str(each) for each in apoptosis.found.left_alone],
        }

    def state_dict(self) -> PrunerState:
        """State as JSON types; equal on all ranks."""
        state = self.apoptosis.state_dict()
        return {**state, "told": self._reported, "batches": len(self._batches)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's window of statistics and probe batches, to save with `state_dict`."""
        tensors = {f"window/{name}": each for name, each in self.apoptosis.tensors().items()}
        for number, (images, labels) in enumerate(self._batches):
            tensors[f"images/{number}"], tensors[f"labels/{number}"] = images, labels
        return tensors

    def take_layout(self, state: PrunerState) -> None:
        """Cut the model to the saved layout; call it before loading weights. Collective."""
        self.apoptosis.take_layout(PrunedLayout.from_json(state["layout"]))

    def load_state_dict(self, state: PrunerState, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state; call it after loading weights.

        Args:
            tensors: this rank's tensors; empty if the number of ranks has changed.
        """
        window = {
            name.removeprefix("window/"): each
            for name, each in tensors.items()
            if name.startswith("window/")
        }
        self.apoptosis.load_state_dict(state, window)
        self._reported = int(state["told"])
        self._batches.clear()
        device = next(self.apoptosis.model.parameters()).device
        number = 0
        while f"images/{number}" in tensors:
            images = tensors[f"images/{number}"].to(device)
            if images.ndim == _IMAGE_DIMENSIONS:
                images = images.contiguous(memory_format=torch.channels_last)
            self._batches.append((images, tensors[f"labels/{number}"].to(device)))
            number += 1

    def _keep_cuts(self, cuts: Sequence[TensorCut]) -> None:
        self._cuts = cuts

    def _probe(self, model: nn.Module) -> tuple[float, float]:
        """Return (sum of losses, number of samples) of the last batches."""
        if not self._batches:
            return 0.0, 0.0
        images = torch.cat([images for images, _ in self._batches])[-_MOST:]
        labels = torch.cat([labels for _, labels in self._batches])[-_MOST:]
        if len(images) < _EXAMPLES:
            return 0.0, 0.0  # A batch norm in training mode needs two samples.
        with self._precision.casting():
            losses = self._task.losses(model(images), labels).sum()
        return float(losses), float(len(images))


def _schedule(config: TrainConfig) -> Schedule:
    if config.prune_target is not None:
        return Schedule(target=config.prune_target, begin=0.0, every=_EVERY)
    return Schedule(TOLERANCE if config.prune_tolerance is None else config.prune_tolerance)


def make_pruner(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    exchange: ExchangeHandle,
    precision: Precision,
    task: TrainingTask,
    batches: int,
) -> Pruner | None:
    """Make the pruner of `--prune`; None without it. Collective.

    Args:
        batches: batches of this rank in an epoch.
    """
    if config.prune != "apoptosis":
        return None
    steps = config.epochs * math.ceil(batches / config.accumulate)
    return Pruner(config, model, optimizer, exchange, precision, task, steps)
