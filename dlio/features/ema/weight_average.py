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
    """The moving average of a run's weights, and a copy of the model that has it, on its device.

    In each step the factor of the average is that of `--ema`; in step n at most (1 + n) / (10 + n).
    Weights of 16 bits are averaged in float32: a step by a thousandth of a difference would be
    rounded away in their own format, so that the average would never move.
    """

    has_weights = True

    def __init__(self, options: EmaOptions, run: FeatureRun) -> None:
        assert options.ema is not None
        self._of, self._decay, self._layout = run.model, options.ema, run.layout
        self._copy = copy.deepcopy(run.model).requires_grad_(False)
        self._average: dict[str, torch.Tensor] = {
            name: value.detach().to(_precise(value.dtype))  # The copy's own memory if it suffices.
            for name, value in self._copy.named_parameters()
        }

    @torch.no_grad()
    def after_update(self, updates: int) -> None:
        weight = 1 - min(self._decay, (1 + updates) / (10 + updates))
        present = (value.to(_precise(value.dtype)) for value in self._of.parameters())
        torch._foreach_lerp_(list(self._average.values()), list(present), weight)

    @torch.no_grad()
    def evaluated(self) -> nn.Module:
        for own, average in zip(self._copy.parameters(), self._average.values(), strict=True):
            own.copy_(average)
        # Buffers are the present ones.
        for buffer, value in zip(self._copy.buffers(), self._of.buffers(), strict=True):
            buffer.copy_(value)
        return self._copy

    def weights(self) -> Mapping[str, torch.Tensor]:
        # Under each name of tied weights: a checkpoint has all of them.
        of = dict(zip(map(id, self._copy.parameters()), self._average.values(), strict=True))
        named = self._copy.named_parameters(remove_duplicate=False)
        return {name: self._layout.whole(name, of[id(value)]) for name, value in named}

    @torch.no_grad()
    def restore(self, saved: SavedFeature) -> None:
        # From the present weights where a tensor is missing.
        given = {**dict(self._of.named_parameters()), **self._layout.part_state(saved.tensors)}
        for name, value in self._average.items():
            value.copy_(given[name])


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which weights of a format are averaged."""
    return torch.promote_types(dtype, torch.float32)
