"""The contract of a task, and the parts that tasks share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.train.model import make_model
from dlio.train.tasks.metrics import Sums
from dlio.train.train_options import ModelOptions

Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Outputs of a model; some models return with them tensors that they are compared with."""
Convert: TypeAlias = Callable[[BatchData, torch.device], tuple[torch.Tensor, torch.Tensor]]
"""Converts a batch of a loader to (input of the model, targets) on a device; both of shape
(n, ...)."""


class TaskObjective(ABC):
    """Loss and metrics of a network's outputs and targets. It holds no state of the training."""

    outputs: int
    """Outputs of the network for each sample, or for each element of a dense one."""
    sum_count: int
    """Number of integers that `sums` returns."""
    kind: torch.dtype = torch.int64
    """Type of the targets."""
    watch: str = "loss"
    """The metric by which models are compared, a name in `metrics.METRICS`."""
    has_accuracy: bool = False
    """True if `correct` counts right answers."""

    @abstractmethod
    def losses(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample; shape (n,)."""

    def correct(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the share of right answers of each sample, 0 to 1; shape (n,)."""
        return torch.zeros(len(targets), device=targets.device)

    @abstractmethod
    def sums(self, outputs: Outputs, targets: torch.Tensor) -> Sums:
        """Return sums over some samples, which ranks add up; shape (sum_count,)."""

    @abstractmethod
    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of sums over all samples, by names in `metrics.METRICS`."""


class TrainingTask(ABC):
    """The purpose of a training: a network's inputs and targets, and their objective.

    The same on all ranks. It holds no state of the training.
    """

    name: str
    """Value of `--task`."""
    objective: TaskObjective
    is_dense: bool = False
    """True if targets have the spatial extents of the inputs."""
    notes: tuple[str, ...] = ()
    """Remarks on the data, for the report."""

    @abstractmethod
    def converter(self, data: Dataset) -> Convert:
        """Return the conversion of a data set's batches.

        Raises UsageError for a data set that lacks something that the task needs.
        """

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make the model of `--model`. Raises UsageError if it does not suit the task."""

    @abstractmethod
    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random (inputs, targets) of some samples, to time or trace a model with."""


class ImageTask(TrainingTask):
    """A task on images; the model maps float32 (n, 3, size, size) to the objective's outputs."""

    def __init__(self, options: ModelOptions, objective: TaskObjective) -> None:
        self._options, self.objective = options, objective

    def make_model(self) -> nn.Module:
        return make_model(self._options.model, self.objective.outputs, self._options.image_size)

    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sides = (self._options.image_size,) * 2
        images = torch.randn(samples, 3, *sides, generator=generator)
        shape = (samples, *sides) if self.is_dense else (samples,)
        return images, torch.zeros(shape, dtype=self.objective.kind)


def batch_size(data: BatchData) -> int:
    """Return the number of samples in a batch of a loader: the length of its first part."""
    while True:
        if isinstance(data, Mapping):
            data = next(iter(data.values()))
        elif isinstance(data, tuple) or (
            isinstance(data, list) and data and isinstance(data[0], torch.Tensor | list)
        ):
            data = data[0]
        else:
            return len(data)
