"""Greedy layer-wise pre-training: each layer learns alone, and all of them in the end.

Bengio et al., "Greedy Layer-Wise Training of Deep Networks", 2007.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import nn

from dlio.errors import UsageError
from dlio.features.layerwise.layerwise_feature import LayerwiseOptions
from dlio.train.feature_hooks import FeatureHooks, FeatureRun
from dlio.util.units import counted


@runtime_checkable
class LayerwiseModel(Protocol):
    """A model whose layers can be trained one by one."""

    @property
    def depth(self) -> int:
        """Number of layers."""

    def choose_layer(self, layer: int | None) -> None:
        """Train and evaluate one layer, from 1, and leave the others as they are; all for None.

        A model in training then trains that layer alone, with gradients for no other. With a layer
        chosen, its output is (reconstruction, the layer's input), and in evaluation a third part,
        the image as reconstructed from the layer's code.
        """


class LayerwiseHooks(FeatureHooks):
    """Chooses the layer that an epoch trains, and gives each one a schedule of the learning rate
    of its own."""

    def __init__(self, options: LayerwiseOptions, run: FeatureRun) -> None:
        """Raises UsageError for a model without such layers, or too few epochs for them."""
        assert options.layerwise is not None
        self._each, self._epochs = options.layerwise, run.config.optimizer.epochs
        if not isinstance(run.model, LayerwiseModel):
            raise UsageError(
                f"--layerwise: --model {run.config.model.model} has no layers that are trained one "
                "by one: give autoencoder, or a model with `depth` and `choose_layer`"
            )
        depth = run.model.depth
        self._alone = self._each * depth
        """Number of epochs in which a layer is trained alone."""
        if self._epochs < self._alone:
            raise UsageError(
                f"--layerwise {self._each}: give {counted(depth, 'layer')} --epochs {self._alone} "
                "or more"
            )
        self._layer: int | None = None

    def _layer_of(self, epoch: int) -> int | None:
        """Return the number, from 1, of the layer that is trained alone; None for all of them."""
        return epoch // self._each + 1 if epoch < self._alone else None

    def prepare(self, model: nn.Module, epoch: int) -> None:
        self._layer = self._layer_of(epoch)
        assert isinstance(model, LayerwiseModel)
        model.choose_layer(self._layer)

    def span(self, epoch: int) -> range:
        layer = self._layer_of(epoch)
        if layer is None:
            return range(self._alone, self._epochs)
        return range(self._each * (layer - 1), self._each * layer)

    def report(self) -> Mapping[str, object]:
        return {"layer": self._layer}
