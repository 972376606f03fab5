"""Classification: cross entropy, top-1 and top-5 accuracy, and the AUC of two classes."""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.train.factory import split_options
from dlio.train.model import normalised
from dlio.train.tasks.metrics import REAL, Sums, mean_of, real_sums
from dlio.train.tasks.task_base import Convert, ImageTask, Outputs, TaskObjective
from dlio.train.train_options import ModelOptions
from dlio.util.units import counted

# Area under the ROC curve, from a histogram of scores that ranks add up exactly
#
# The area is the probability that a random positive sample has a higher score than a random
# negative one (Hanley and McNeil, Radiology 143, 1982). Within a bin the order is unknown and
# counts one half, so that the area is wrong by at most half of the share of pairs that fall into
# one bin together: `area` returns this bound, too. Bins are the upper 16 bits of the score as a
# float32: sign, exponent and 7 bits of mantissa, so that a bin is less than 1 % wide relative to
# its scores, at any scale.

_BINS: Final = 1 << 16
BINS: Final = 2 * _BINS
"""Integers of a histogram: negative samples, then positive ones, by score."""


def _bins_of(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    # -0 becomes 0: both are equal, and far apart as bits.
    bits = (np.ascontiguousarray(scores, np.float32) + np.float32(0)).view(np.uint32)
    # Negative numbers sort in reverse by their bits: order them all as unsigned integers.
    flipped = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered: npt.NDArray[np.int64] = (flipped >> 16).astype(np.int64)
    return ordered


def score_sums(scores: torch.Tensor, positive: torch.Tensor) -> Sums:
    """Return the histogram, shape (BINS,), of scores (n,) of samples that are positive or not.

    A score is greater for a sample that is more likely positive. NaN sorts as an extreme score.
    """
    bins = _bins_of(scores.detach().float().cpu().numpy())
    right = positive.detach().cpu().numpy().astype(np.int64)
    return np.bincount(bins + _BINS * right, minlength=BINS).astype(np.int64)


def area(histogram: Sums) -> tuple[float, float]:
    """Return (area under the ROC curve, bound of its error); NaN if a class has no samples."""
    negative, positive = histogram[:_BINS].astype(float), histogram[_BINS:].astype(float)
    pairs = negative.sum() * positive.sum()
    if not pairs:
        return float("nan"), float("nan")
    below = np.cumsum(negative) - negative
    together = float((positive * negative).sum())
    return float((positive * below).sum() + together / 2) / pairs, together / 2 / pairs


# The task

_HEAD: Final = 3
"""Sums of samples, right answers, and answers whose class is among the best five."""
_BEST: Final = 5


class Classes(TaskObjective):
    """Loss and metrics of logits (n, classes) and class numbers (n,)."""

    has_accuracy = True

    def __init__(self, classes: int, watch: str = "accuracy") -> None:
        self.outputs, self.watch = classes, watch
        self.sum_count = _HEAD + REAL + (BINS if classes == 2 else 0)

    def losses(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each sample; shape (n,). Targets may be probabilities (n, classes)."""
        assert isinstance(outputs, torch.Tensor)
        return cross_entropy(outputs, targets, reduction="none")

    def correct(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """1 where the greatest logit is the target's, or its probability; shape (n,)."""
        assert isinstance(outputs, torch.Tensor)
        best = outputs.argmax(1)
        if targets.ndim > 1:
            return targets.gather(1, best[:, None])[:, 0]
        return best == targets

    def sums(self, outputs: Outputs, targets: torch.Tensor) -> Sums:
        assert isinstance(outputs, torch.Tensor)
        logits = outputs.float()
        best = logits.topk(min(_BEST, logits.shape[1]), 1).indices
        among = int((best == targets[:, None]).sum())
        head = [len(targets), int(self.correct(logits, targets).sum()), among]
        parts = [np.array(head, np.int64), real_sums(self.losses(logits, targets))]
        if self.outputs == 2:
            parts.append(score_sums(logits[:, 1] - logits[:, 0], targets == 1))
        return np.concatenate(parts)

    def metrics(self, sums: Sums) -> dict[str, float]:
        count, right, among = (int(each) for each in sums[:_HEAD])
        metrics = {
            "accuracy": right / max(1, count),
            "loss": mean_of(sums[_HEAD : _HEAD + REAL], count),
        }
        if self.outputs > _BEST:
            metrics["top5"] = among / max(1, count)
        if self.outputs == 2:
            metrics["auc"], metrics["auc_error"] = area(sums[_HEAD + REAL :])
        return metrics


class ClassifyImages(ImageTask):
    """Images with a class number each.

    A loader gives (uint8 (n, 3, size, size), int64 (n,)), or of mixed images (float32 (n, 3, size,
    size), probabilities (n, classes)); the model maps float32 (n, 3, size, size) to logits (n,
    classes).
    """

    name = "classify"

    def __init__(self, options: ModelOptions, source: str, data: Dataset) -> None:
        self._source, self._names = source, list(data.classes)
        _check(data)
        super().__init__(options, Classes(len(data.classes) or int(data.reader.labels.max()) + 1))

    def converter(self, data: Dataset) -> Convert:
        _check(data)
        if list(data.classes) != self._names:
            raise UsageError(
                f"{data.path} has other classes than {self._source}: "
                f"{_difference(data.classes, self._names)}"
            )
        return _convert

    def make_model(self) -> nn.Module:
        model = self._options.model
        if split_options("--model", model)[0] == "unet":
            raise UsageError(
                f"--model {model}: gives a class for each pixel: use it for --task segment, or "
                "choose another model"
            )
        return super().make_model()


def _convert(data: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = data
    return normalised(images, device), labels.to(device, non_blocking=True)


def _check(data: Dataset) -> None:
    if not data.has_classes:
        fields = ", ".join(name for name, _ in data.reader.schema.fields)
        raise UsageError(
            f"{data.path} holds {fields}: training needs images with labels, such as a folder for "
            "each class, or a table labels.csv next to the pictures (file name, label)"
        )
    labels = np.asarray(data.reader.labels)
    unlabelled = np.flatnonzero(labels < 0)
    if len(unlabelled):
        first = int(unlabelled[0])
        raise UsageError(
            f"{data.path}: {len(unlabelled)} of {counted(len(labels), 'sample')} have a label "
            f"below 0, as unlabelled ones do; the first is {data.reader.name(first)}, with "
            f"{labels[first]}: leave them out of the data set"
        )


def _difference(one: Iterable[str], other: Iterable[str]) -> str:
    """Describe the difference between two lists of class names."""
    names = sorted(set(one) ^ set(other))
    return f"{len(names)} differ, such as {names[:3]}" if names else "in another order"
