"""Batch normalisation over the samples of all ranks.

A rank that normalises by its own samples has other statistics on another number of ranks, or when
other samples come to it. `SyncHooks` normalise by the mean and variance of the
global batch (Ioffe and Szegedy, arXiv 1502.03167, over ranks as in arXiv 1711.07240), so that the
result is the same to rounding however samples are shared. Each layer costs one sum over ranks in
the forward pass and one in the backward pass, of two numbers per channel; ranks wait for it.

Sums are of float64, so that their rounding does not depend on how samples are shared.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlio.comm import Communicator
from dlio.exchange.buckets import broadcast_tensors
from dlio.exchange.rank_group import RankGroup
from dlio.features.batch_norm.batch_norm_feature import BatchNormOptions
from dlio.train.feature_hooks import FeatureHooks, FeatureRun

_Norm = TypeVar("_Norm", bound="TrackingNorm")
_SHAPES: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _sums(ranks: RankGroup, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums over ranks of float64 tensors, on their device, by one sum. Collective."""
    total = ranks.total(torch.cat([part.reshape(-1) for part in parts]))
    return list(torch.split(total, [part.numel() for part in parts]))


class _SyncNormalisation(torch.autograd.Function):
    """Normalise x, shape (n, channels, ...), by the statistics of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: "_SyncBatchNorm",
    ) -> torch.Tensor:
        rest = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        wide = torch.float64
        count = torch.full((1,), x.numel() // x.shape[1], dtype=wide, device=x.device)
        sums = x.sum(rest, dtype=wide), x.square().sum(rest, dtype=wide)
        count, total, squares = _sums(layer.ranks, count, *sums)
        samples = count.clamp(min=1.0)
        mean = total / samples
        variance = (squares / samples - mean.square()).clamp(min=0.0)
        layer.note(mean, variance * samples / (samples - 1.0).clamp(min=1.0))
        scale = (variance + layer.eps).rsqrt().to(x.dtype)
        mean = mean.to(x.dtype)
        ctx.save_for_backward(x, weight, mean, scale, samples)
        ctx.layer, ctx.has_bias = layer, bias is not None
        out = (x - mean.view(shape)).mul_((scale if weight is None else scale * weight).view(shape))
        return out if bias is None else out.add_(bias.view(shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, samples = ctx.saved_tensors
        rest = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        normal = (x - mean.view(shape)).mul_(scale.view(shape))
        of_bias = gradient.sum(rest, dtype=torch.float64)
        of_weight = (gradient * normal).sum(rest, dtype=torch.float64)
        # Parameters' gradients are this rank's: the exchange averages them.
        means = [each / samples for each in _sums(ctx.layer.ranks, of_bias, of_weight)]
        mean_bias, mean_weight = (each.to(x.dtype).view(shape) for each in means)
        factor = scale if weight is None else scale * weight
        of_x = (gradient - mean_bias).sub_(normal.mul_(mean_weight)).mul_(factor.view(shape))
        return (
            of_x,
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(x.dtype) if ctx.has_bias else None,
            None,
        )


class TrackingNorm(_BatchNorm):
    """A batch normalisation that is told the statistics to track."""

    @torch.no_grad()
    def note(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Take a batch's statistics into the running ones; both of shape (channels,)."""
        if not self.track_running_stats:
            return
        running_mean, running_var = cast("torch.Tensor", self.running_mean), self.running_var
        batches = cast("torch.Tensor", self.num_batches_tracked).add_(1)
        momentum = 1.0 / float(batches) if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        cast("torch.Tensor", running_var).lerp_(variance.to(running_mean.dtype), momentum)


def change_norms(model: nn.Module, kind: type[_Norm]) -> list[_Norm]:
    """Give a model's batch normalisations a class derived from `kind`, in place; return them.

    Parameters, buffers, hooks and names stay, and so does torch's check of the inputs' shape.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {
        shape: type(f"{kind.__name__}{shape.__name__[-2:]}", (kind, shape), {}) for shape in _SHAPES
    }
    layers = [module for module in model.modules() if type(module) in classes]
    for layer in layers:
        layer.__class__ = classes[type(layer)]
    return cast("list[_Norm]", layers)


class _SyncBatchNorm(TrackingNorm):
    """A batch normalisation whose statistics in training are those of all ranks."""

    ranks: RankGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, channels, ...) -> the same shape
        if not self.training:
            return super().forward(x)
        function: Any = _SyncNormalisation  # torch annotates neither `apply` nor the check.
        untyped: Any = self
        untyped._check_input_dim(x)
        normalised: torch.Tensor = function.apply(x, self.weight, self.bias, self)
        return normalised


def statistics_of(model: nn.Module) -> frozenset[str]:
    """Return the names, in the model's state, of the running statistics of its normalisations."""
    return frozenset(
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for buffer, _ in module.named_buffers(recurse=False)
    )


class SyncHooks(FeatureHooks):
    """Ranks of a run that normalise their batches together, if there are such layers."""

    _ranks: Communicator | None = None

    def __init__(self, options: BatchNormOptions, run: FeatureRun) -> None:
        comm = run.layout.data
        if comm.size == 1 or run.layout.cuts_samples:
            return  # Ranks that share samples have layers that do it.
        layers = change_norms(run.model, _SyncBatchNorm)
        self.together = bool(layers)
        if layers:
            self._ranks = comm.dup()
            ranks = RankGroup(self._ranks)
            for layer in layers:
                layer.ranks = ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


class LocalHooks(FeatureHooks):
    """Rank 0's running statistics are those of the ranks' mean model."""

    def averaged(
        self, model: nn.Module, mean: Mapping[str, torch.Tensor], comm: Communicator
    ) -> None:
        own = model.state_dict()
        for name in sorted(statistics_of(model)):
            mean[name].copy_(own[name])
            broadcast_tensors([mean[name]], comm)
