"""An exponential moving average of a model's weights, which is evaluated and saved in their place.

Average over the last steps of a run: Polyak and Juditsky, "Acceleration of Stochastic Approximation
by Averaging", 1992; with a factor that begins small, as in TensorFlow's ExponentialMovingAverage.
"""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from dlio.features.ema.ema_feature import EmaOptions
from dlio.train.feature_hooks import FeatureHooks, FeatureRun, SavedFeature


class WeightAverage:
    """The moving average of a model's parameters, in a copy of the model on its device.

    Make it before hooks are added to the model.

    Args:
        decay: factor of the average in each step, below 1; in step n at most (1 + n) / (10 + n).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._of, self._decay = model, decay
        self._model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take the weights after an optimizer step into the average.

        Args:
            steps: optimizer steps since the run began.
        """
        weight = 1 - min(self._decay, (1 + steps) / (10 + steps))
        average: list[torch.Tensor] = list(self._model.parameters())
        torch._foreach_lerp_(average, list(self._of.parameters()), weight)

    @torch.no_grad()
    def model(self) -> nn.Module:
        """Return the model with the average as its weights, and the present buffers."""
        for own, value in zip(self._model.buffers(), self._of.buffers(), strict=True):
            own.copy_(value)
        return self._model

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average by the names of parameters, to save."""
        return dict(self._model.named_parameters())

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from saved tensors; from the present weights where one is missing."""
        present = dict(self._of.named_parameters())
        for name, value in self._model.named_parameters():
            value.copy_(tensors.get(name, present[name]))


class EmaHooks(FeatureHooks):
    """The average of a run's weights, which is evaluated and saved in their place."""

    has_weights = True

    def __init__(self, options: EmaOptions, run: FeatureRun) -> None:
        assert options.ema is not None
        self._average = WeightAverage(run.model, options.ema)
        self._whole, self._part_state = run.layout.whole, run.layout.part_state

    def after_update(self, updates: int) -> None:
        self._average.update(updates)

    def evaluated(self) -> nn.Module:
        return self._average.model()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: self._whole(name, each) for name, each in self._average.tensors().items()}

    def restore(self, saved: SavedFeature) -> None:
        self._average.load(self._part_state(dict(saved.tensors)))
