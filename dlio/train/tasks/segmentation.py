"""Segmentation: a class for each pixel; cross entropy, pixel accuracy and mean IoU."""

from typing import Final

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio.image.segmentation_masks import decode_mask
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.train.model import normalised
from dlio.train.tasks.metrics import REAL, Sums, mean_of, real_sums
from dlio.train.tasks.task_base import Convert, ImageTask, Outputs, TaskObjective
from dlio.train.train_options import ModelOptions

IGNORED: Final = 255
"""Class number of pixels that do not count, as in Pascal VOC."""
_MASK: Final = "mask"
_PIECE: Final = 64


def has_masks(data: Dataset) -> bool:
    """True if samples are crops of images, each with a mask of class numbers and no boxes."""
    fields = [name for name, _ in data.reader.schema.fields]
    return data.crops and _MASK in fields and "boxes" not in fields


class Segments(TaskObjective):
    """Loss and metrics of logits (n, classes, ...) and class numbers (n, ...).

    Elements of class 255 do not count. IoU is intersection over union of the elements of a class
    over all samples; the mean is over classes that occur in targets or answers.
    """

    watch = "iou"
    has_accuracy = True

    def __init__(self, classes: int) -> None:
        self.outputs = classes
        self.sum_count = 1 + REAL + classes**2

    def losses(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of the elements that count, of each sample; shape (n,)."""
        each = cross_entropy(_logits(outputs), targets, reduction="none", ignore_index=IGNORED)
        rest = tuple(range(1, each.ndim))
        return each.sum(dim=rest) / (targets != IGNORED).sum(dim=rest).clamp(min=1)

    def correct(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Share of right answers among the elements that count, of each sample; shape (n,)."""
        counts = targets != IGNORED
        right = (_logits(outputs).argmax(1) == targets) & counts
        rest = tuple(range(1, right.ndim))
        return right.sum(dim=rest) / counts.sum(dim=rest).clamp(min=1)

    def sums(self, outputs: Outputs, targets: torch.Tensor) -> Sums:
        counts = targets != IGNORED
        rows = targets[counts].cpu().numpy()
        columns = _logits(outputs).argmax(1)[counts].cpu().numpy()
        size = self.outputs
        confusion = np.bincount(rows * size + columns, minlength=size**2).astype(np.int64)
        losses = real_sums(self.losses(outputs, targets))
        return np.concatenate([np.array([len(targets)], np.int64), losses, confusion])

    def metrics(self, sums: Sums) -> dict[str, float]:
        confusion = sums[1 + REAL :].reshape(self.outputs, self.outputs).astype(np.float64)
        shared = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - shared
        occurs = union > 0
        return {
            "accuracy": float(shared.sum() / max(1.0, confusion.sum())),
            "iou": float((shared[occurs] / union[occurs]).mean()) if occurs.any() else 0.0,
            "loss": mean_of(sums[1 : 1 + REAL], int(sums[0])),
        }


class SegmentImages(ImageTask):
    """Images with the class number of each pixel.

    A loader gives (uint8 (n, 3, size, size), uint8 (n, size, size)); the model maps float32
    (n, 3, size, size) to logits (n, classes, size, size).
    """

    name = "segment"
    is_dense = True

    def __init__(self, options: ModelOptions, data: Dataset, comm: Communicator) -> None:
        """Find the number of classes, by all masks if the data do not name them. Collective."""
        _check(data)
        super().__init__(options, Segments(len(data.classes) or _count_classes(data, comm)))

    def converter(self, data: Dataset) -> Convert:
        _check(data)
        classes = self.objective.outputs

        def convert(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            images, masks = batch
            if masks.numel() and bool(((masks >= classes) & (masks != IGNORED)).any()):
                raise UsageError(
                    f"{data.path}: a mask has class {int(masks[masks != IGNORED].max())}, and "
                    f"there are {classes}: repair it, or name all classes in classes.txt"
                )
            return normalised(images, device), masks.to(device, non_blocking=True).long()

        return convert


def _logits(outputs: Outputs) -> torch.Tensor:
    assert isinstance(outputs, torch.Tensor)
    return outputs.float()


def _check(data: Dataset) -> None:
    if not has_masks(data):
        raise UsageError(
            f"{data.path}: --task segment needs images with masks: a folder with images/ and masks/"
        )


def _count_classes(data: Dataset, comm: Communicator) -> int:
    """Return the greatest class number in the masks, plus one. Collective; each rank reads a
    part."""
    most, mine = 0, np.arange(comm.rank, len(data), comm.size, dtype=np.int64)
    reader = data.reader
    for begin in range(0, len(mine), _PIECE):
        samples = mine[begin : begin + _PIECE]
        for sample, payload in zip(samples.tolist(), reader.read(samples), strict=True):
            mask = decode_mask(reader.schema.split(payload)[_MASK], reader.name(sample))
            counted = mask[mask != IGNORED]
            most = max(most, int(counted.max()) if counted.size else 0)
    greatest = np.array([most], np.int64)
    comm.wait([comm.iallreduce(greatest, "max")], "the number of classes in masks")
    return int(greatest[0]) + 1
