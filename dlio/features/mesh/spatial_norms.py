"""Normalisation of tensors that ranks share: mean and variance are those of the whole.

Sums are of float64, so that their rounding does not depend on how many ranks there are. The
variance is that of differences from the mean, which takes a second sum over ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.tensor_sharing import LocalPart, TensorSharing

Function = Callable[..., torch.Tensor]


def batch_norm(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> LocalPart:
    """Normalise as `torch.nn.functional.batch_norm`, shape (n, channels, ...); collective.

    In training, mean and variance are those of all ranks of `sharing.norm`.
    """
    if sharing.axis(x) == 1:
        raise sharing.refuse("batch normalisation is by channel")
    if not training:
        rest = (running_mean, running_var, weight, bias, training, momentum, eps)
        return LocalPart(function(x, *rest), sharing.slab)
    count = x.numel() / x.shape[1] / sharing.slab.length * sharing.slab.extent
    if sharing.norm is not sharing.space:  # Ranks of other samples may have more or fewer of them.
        here = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64)
        count = float(sharing.norm.total(here))
    over = _NormExtent((0, *range(2, x.ndim)), count, eps, sharing.norm)
    scale, shift = _by_channel(weight, x.ndim), _by_channel(bias, x.ndim)
    out, mean, variance = _normalised(x, scale, shift, over)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance.flatten() * (count / max(1.0, count - 1.0))
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return LocalPart(out, sharing.slab)


def group_norm(
    sharing: TensorSharing,
    _function: Function,
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> LocalPart:
    """Normalise as `torch.nn.functional.group_norm`, shape (n, channels, ...); collective."""
    if sharing.axis(x) < 2:
        raise sharing.refuse("group normalisation is by sample and groups of channels")
    grouped = x.reshape(x.shape[0], num_groups, -1)
    count = grouped.shape[2] * sharing.slab.extent / sharing.slab.length
    normal, _, _ = _normalised(grouped, None, None, _NormExtent((2,), count, eps, sharing.space))
    out = normal.view_as(x)
    if (scale := _by_channel(weight, x.ndim)) is not None:
        out = out * scale
    if (shift := _by_channel(bias, x.ndim)) is not None:
        out = out + shift
    return LocalPart(out, sharing.slab)


def instance_norm(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> LocalPart:
    """Normalise as `torch.nn.functional.instance_norm`; collective."""
    if not use_input_stats:
        rest = (running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return LocalPart(function(x, *rest), sharing.slab)
    if running_mean is not None:
        raise sharing.refuse("instance normalisation with running statistics is not supported")
    return group_norm(sharing, function, x, x.shape[1], weight, bias, eps)


def layer_norm(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> LocalPart:
    """Normalise over other dimensions than the shared one, as torch does."""
    if len(normalized_shape) >= -sharing.slab.dimension:
        raise sharing.refuse("layer normalisation over the shared dimension is not supported")
    return LocalPart(function(x, normalized_shape, weight, bias, eps), sharing.slab)


class _NormaliseOverRanks(torch.autograd.Function):
    """Normalise over some dimensions and all ranks, scale and shift; saves its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        over: "_NormExtent",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = over.mean(x)
        out = x - mean.to(x.dtype)
        variance = over.mean(out.square())
        scale = (variance + over.eps).rsqrt().to(x.dtype)
        out.mul_(scale if weight is None else scale * weight)
        if bias is not None:
            out.add_(bias)
        ctx.save_for_backward(x, weight, mean.to(x.dtype), scale)
        ctx.over, ctx.has_bias = over, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        over: _NormExtent = ctx.over
        normal = (x - mean).mul_(scale)
        # Parameters' gradients are this rank's: the exchange sums them.
        of_bias, of_weight = over.sums(gradient), over.sums(gradient * normal)
        both = over.traffic.total(torch.stack([of_bias, of_weight])) / over.count
        mean_bias, mean_weight = both.to(x.dtype)
        of_x = (gradient - mean_bias).sub_(normal.mul_(mean_weight))
        return (
            of_x.mul_(scale if weight is None else scale * weight),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(x.dtype) if ctx.has_bias else None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _NormExtent:
    """The elements that are normalised together."""

    dims: tuple[int, ...]
    count: float
    """Elements along `dims` on all ranks."""
    eps: float
    traffic: RankGroup

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums in float64, with dimensions of one element."""
        return x.sum(self.dims, keepdim=True, dtype=torch.float64)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks in float64. Collective."""
        return self.traffic.total(self.sums(x)) / self.count


def _normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    over: _NormExtent,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x normalised, mean, variance), the statistics in float64; collective.

    Weight and bias broadcast to the shape of `x`, of one element along `over.dims`.
    """
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    result = cast("Any", _NormaliseOverRanks).apply(x, weight, bias, over)
    return result


def _by_channel(parameter: torch.Tensor | None, ndim: int) -> torch.Tensor | None:
    """Return a parameter in a shape that broadcasts to (n, channels, ...)."""
    return None if parameter is None else parameter.view(1, -1, *[1] * (ndim - 2))
