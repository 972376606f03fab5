"""Autoencoders: images without labels, which a network reconstructs from a small code."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.train.model import make_model, normalised
from dlio.train.tasks.metrics import REAL, Sums, mean_of, real_sums
from dlio.train.tasks.task_base import Convert, ImageTask, Outputs, TaskObjective
from dlio.train.train_options import ModelOptions


class Reconstruction(TaskObjective):
    """Squared error of images (n, 3, size, size), or of a layer's input and of the image."""

    outputs = 1
    sum_count = 1 + 2 * REAL

    def __init__(self, model: str) -> None:
        self._model = model

    def losses(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(outputs, tuple):
            made, targets = outputs[:2]
        else:
            made = outputs
        if made.shape != targets.shape:
            raise UsageError(
                f"--task autoencode: --model {self._model} gave a tensor of shape "
                f"{tuple(made.shape)} for images of shape {tuple(targets.shape)}"
            )
        return (made.float() - targets).square().flatten(1).mean(1)

    def sums(self, outputs: Outputs, targets: torch.Tensor) -> Sums:
        losses = self.losses(outputs, targets)
        whole = self.losses(outputs[2], targets) if isinstance(outputs, tuple) else losses
        count = np.array([len(targets)], np.int64)
        return np.concatenate([count, real_sums(losses), real_sums(whole)])

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = int(sums[0])
        return {
            "loss": mean_of(sums[1 : 1 + REAL], count),
            "image_loss": mean_of(sums[1 + REAL :], count),
        }


class AutoencodeImages(ImageTask):
    """Images, whose labels are not used.

    A loader gives {field: uint8 (n, 3, size, size)}, or the same with labels; the model maps
    float32 (n, 3, size, size) to its reconstruction. The loss is the mean squared error over the
    pixels, which have variance 1 over ImageNet. A model of which one layer is in training returns
    (reconstruction, the layer's input), and in evaluation a third part, the image as reconstructed
    from this layer's code: the loss is that of the layer, and `image_loss` that of the image.
    """

    name = "autoencode"
    is_dense = True

    def __init__(self, options: ModelOptions, data: Dataset) -> None:
        _check(data)
        super().__init__(options, Reconstruction(options.model))

    def converter(self, data: Dataset) -> Convert:
        _check(data)

        def convert(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            pixels = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
            images = normalised(pixels, device)
            return images, images

        return convert

    def make_model(self) -> nn.Module:
        options = self._options
        return make_model(options.model, 1, options.image_size, {"reconstructs": True})

    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, _ = super().example(samples, generator)
        return images, images


def _check(data: Dataset) -> None:
    if not data.crops:
        fields = ", ".join(name for name, _ in data.reader.schema.fields)
        raise UsageError(f"{data.path} holds {fields}: --task autoencode needs images")
