"""Autoencoders: images without labels, which a network reconstructs from a small code."""

import numpy as np
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.train.model import make_model
from dlio.train.networks.autoencoder import LayerwiseModel
from dlio.train.tasks.metrics import REAL, Sums, mean_of, real_sums
from dlio.train.tasks.task_base import Convert, Outputs, TrainingTask, pixels_of
from dlio.train.train_options import ModelOptions


class AutoencodeImages(TrainingTask):
    """Images, whose labels are not used.

    A loader gives {field: uint8 (n, 3, size, size)}, or the same with labels; the model maps
    float32 (n, 3, size, size) to its reconstruction. The loss is the mean squared error over the
    pixels, which have variance 1 over ImageNet. With `--layerwise` it is that of the layer in
    training, relative to its own input, and `image_loss` that of the image as reconstructed from
    this layer's code.
    """

    name = "autoencode"
    is_dense = True

    def __init__(self, options: ModelOptions, epochs: int, data: Dataset) -> None:
        self._options, self._epochs = options, epochs
        self._depth = 0
        _check(data)

    def converter(self, data: Dataset) -> Convert:
        _check(data)

        def convert(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            images = pixels_of(batch, device)
            return images, images

        return convert

    def make_model(self) -> nn.Module:
        options = self._options
        model = make_model(options.model, 1, options.image_size, {"reconstructs": True})
        if options.layerwise is not None:
            if not isinstance(model, LayerwiseModel):
                raise UsageError(
                    f"--layerwise: --model {options.model} has no layers that are trained one by "
                    "one: give autoencoder, or a model with `depth` and `choose_layer`"
                )
            self._depth = model.depth
            if self._epochs < options.layerwise * self._depth:
                raise UsageError(
                    f"--layerwise {options.layerwise}: {self._depth} layers need --epochs "
                    f"{options.layerwise * self._depth} or more"
                )
        return model

    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._options.image_size
        images = torch.randn(samples, 3, size, size, generator=generator)
        return images, images

    def losses(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(outputs, tuple):
            made, targets = outputs[:2]
        else:
            made = outputs
        if made.shape != targets.shape:
            raise UsageError(
                f"--task autoencode: --model {self._options.model} gave a tensor of shape "
                f"{tuple(made.shape)} for images of shape {tuple(targets.shape)}"
            )
        return (made.float() - targets).square().flatten(1).mean(1)

    @property
    def sum_count(self) -> int:
        return 1 + 2 * REAL

    def sums(self, outputs: Outputs, targets: torch.Tensor) -> Sums:
        losses = self.losses(outputs, targets)
        whole = losses
        if isinstance(outputs, tuple):
            whole = self.losses(outputs[2], targets)
        count = np.array([len(targets)], np.int64)
        return np.concatenate([count, real_sums(losses), real_sums(whole)])

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = int(sums[0])
        return {
            "loss": mean_of(sums[1 : 1 + REAL], count),
            "image_loss": mean_of(sums[1 + REAL :], count),
        }

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        if self._options.layerwise is not None and isinstance(model, LayerwiseModel):
            model.choose_layer(self.layer(epoch))

    def span(self, epoch: int) -> range | None:
        each = self._options.layerwise
        if each is None:
            return None
        layer = self.layer(epoch)
        if layer is None:
            return range(each * self._depth, self._epochs)
        return range(each * (layer - 1), each * layer)

    def layer(self, epoch: int) -> int | None:
        each = self._options.layerwise
        if each is None or epoch >= each * self._depth:
            return None
        return epoch // each + 1


def _check(data: Dataset) -> None:
    if not data.crops:
        fields = ", ".join(name for name, _ in data.reader.schema.fields)
        raise UsageError(f"{data.path} holds {fields}: --task autoencode needs images")
