"""Regression: the squared error of standardised targets; RMSE and others in the targets' units."""

import math
from typing import Final

import numpy as np
import torch

from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.train.model import normalised
from dlio.train.tasks.metrics import REAL, UNIT, Sums, mean_of, real_sums
from dlio.train.tasks.task_base import Convert, ImageTask, Outputs, TaskObjective
from dlio.train.train_options import ModelOptions

_PARTS: Final = 4
"""Means: squared error, absolute error, target, squared target."""
_FARTHEST: Final = 2.0**20
"""Targets of more standard deviations have no metrics: sums of their squares would overflow."""


class Numbers(TaskObjective):
    """Loss and metrics of outputs (n, 1) and targets (n,), both standardised by this mean and
    scale, the standard deviation in the targets' units."""

    outputs = 1
    sum_count = 1 + _PARTS * REAL
    kind = torch.float32
    watch = "rmse"

    def __init__(self, scale: float, mean: float = 0.0) -> None:
        self.scale, self.mean = scale, mean

    def losses(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Squared error of each sample, in standard deviations of the targets; shape (n,)."""
        return self._errors(outputs, targets).square()

    @staticmethod
    def _errors(outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        assert isinstance(outputs, torch.Tensor)
        return outputs.float().reshape(-1) - targets

    def sums(self, outputs: Outputs, targets: torch.Tensor) -> Sums:
        errors = self._errors(outputs, targets).double()
        wide = targets.double()
        each = (errors.square(), errors.abs(), wide, wide.square())
        return np.concatenate([np.array([len(targets)], np.int64), *map(real_sums, each)])

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = int(sums[0])
        square, absolute, mean, second = (
            mean_of(sums[1 + k * REAL : 1 + (k + 1) * REAL], count) for k in range(_PARTS)
        )
        variance = second - mean**2
        # Both means are of multiples of 2**-32: equal targets seem to vary by as much.
        varies = variance > (1 + 2 * abs(mean)) * UNIT
        return {
            "loss": square,
            "rmse": self.scale * math.sqrt(square) if square >= 0 else math.nan,
            "mae": self.scale * absolute,
            "r2": 1 - square / variance if varies else math.nan,
        }


def standardised(targets: torch.Tensor, like: Numbers, path: str, name: str) -> torch.Tensor:
    """Return targets in standard deviations from the mean, as float64.

    Raises UsageError for a target of which no metric could be made: NaN, infinite, or a million
    standard deviations from the mean.
    """
    result = (targets.double() - like.mean) / like.scale
    wrong = ~(result.abs() < _FARTHEST)  # True for NaN.
    if bool(wrong.any()):
        raise UsageError(
            f"{path}: a sample lacks its {name!r}, or has {float(targets[wrong][0]):g}, where the "
            f"training data have {like.mean:g} +- {like.scale:g}: drop or repair such samples"
        )
    return result


class RegressImages(ImageTask):
    """Images with a whole number each, such as an age or a count.

    A loader gives (uint8 (n, 3, size, size), int64 (n,)); the model maps float32 (n, 3, size, size)
    to (n, 1): the number in standard deviations from the mean of the training data.
    """

    name = "regress"

    def __init__(self, options: ModelOptions, data: Dataset) -> None:
        _check(data)
        labels = np.asarray(data.reader.labels, np.float64)  # The index has them on every rank.
        self._numbers = Numbers(float(labels.std()) or 1.0, float(labels.mean()))
        super().__init__(options, self._numbers)

    def converter(self, data: Dataset) -> Convert:
        _check(data)

        def convert(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            images, labels = batch
            targets = (labels.double() - self._numbers.mean) / self._numbers.scale
            return normalised(images, device), targets.float().to(device, non_blocking=True)

        return convert


def _check(data: Dataset) -> None:
    if not data.has_classes:
        raise UsageError(f"{data.path}: --task regress needs images with a whole number each")
    if data.classes:
        raise UsageError(
            f"{data.path}: its labels are names of classes, such as {data.classes[0]!r}: give "
            "--task classify, or a data set whose labels are numbers"
        )
