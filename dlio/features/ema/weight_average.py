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


class EmaHooks(FeatureHooks):
    """The moving average of a run's weights, in a copy of the model on its device.

    In each step the factor of the average is that of `--ema`; in step n at most (1 + n) / (10 + n).
    """

    has_weights = True

    def __init__(self, options: EmaOptions, run: FeatureRun) -> None:
        assert options.ema is not None
        self._of, self._decay, self._layout = run.model, options.ema, run.layout
        self._average = copy.deepcopy(run.model).requires_grad_(False)

    @torch.no_grad()
    def after_update(self, updates: int) -> None:
        weight = 1 - min(self._decay, (1 + updates) / (10 + updates))
        average: list[torch.Tensor] = list(self._average.parameters())
        torch._foreach_lerp_(average, list(self._of.parameters()), weight)

    @torch.no_grad()
    def evaluated(self) -> nn.Module:
        # Buffers are the present ones.
        for own, value in zip(self._average.buffers(), self._of.buffers(), strict=True):
            own.copy_(value)
        return self._average

    def weights(self) -> Mapping[str, torch.Tensor]:
        named = self._average.named_parameters()
        return {name: self._layout.whole(name, each) for name, each in named}

    @torch.no_grad()
    def restore(self, saved: SavedFeature) -> None:
        # From the present weights where a tensor is missing.
        given = {**dict(self._of.named_parameters()), **self._layout.part_state(saved.tensors)}
        for name, value in self._average.named_parameters():
            value.copy_(given[name])
