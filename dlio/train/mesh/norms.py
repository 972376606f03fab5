"""Normalisation of tensors that ranks share: mean and variance are those of the whole.

Sums are of float64, so that their rounding does not depend on how many ranks there are. The
variance is that of differences from the mean, which takes a second sum over ranks.
"""

from collections.abc import Callable, Sequence

import torch

from dlio.train.mesh.messages import Traffic, sum_over
from dlio.train.mesh.sharing import Part, Sharing

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm"]

Function = Callable[..., torch.Tensor]


def batch_norm(
    sharing: Sharing,
    function: Function,
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Part:
    """Normalise as `torch.nn.functional.batch_norm`, shape (n, channels, ...); collective.

    In training, mean and variance are those of all ranks of `sharing.norm`.
    """
    if sharing.axis(x) == 1:
        raise sharing.refuse("batch normalisation is by channel")
    if not training:
        rest = (running_mean, running_var, weight, bias, training, momentum, eps)
        return Part(function(x, *rest), sharing.slab)
    dims = [0, *range(2, x.ndim)]
    count = x.numel() / x.shape[1] / sharing.slab.length * sharing.slab.extent
    if sharing.norm is not sharing.space:  # Ranks of other samples may have more or fewer of them.
        here = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64)
        count = float(sharing.norm.total(here))
    normal, mean, variance = _normalised(x, dims, count, eps, sharing.norm)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance.flatten() * (count / max(1.0, count - 1.0))
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return Part(_scaled(normal, weight, bias), sharing.slab)


def group_norm(
    sharing: Sharing,
    _function: Function,
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Part:
    """Normalise as `torch.nn.functional.group_norm`, shape (n, channels, ...); collective."""
    if sharing.axis(x) < 2:
        raise sharing.refuse("group normalisation is by sample and groups of channels")
    grouped = x.reshape(x.shape[0], num_groups, -1)
    count = grouped.shape[2] * sharing.slab.extent / sharing.slab.length
    normal, _, _ = _normalised(grouped, [2], count, eps, sharing.space)
    return Part(_scaled(normal.view_as(x), weight, bias), sharing.slab)


def instance_norm(
    sharing: Sharing,
    function: Function,
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Part:
    """Normalise as `torch.nn.functional.instance_norm`; collective."""
    if not use_input_stats:
        rest = (running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return Part(function(x, *rest), sharing.slab)
    if running_mean is not None:
        raise sharing.refuse("instance normalisation with running statistics is not supported")
    return group_norm(sharing, function, x, x.shape[1], weight, bias, eps)


def layer_norm(
    sharing: Sharing,
    function: Function,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Part:
    """Normalise over other dimensions than the shared one, as torch does."""
    if len(normalized_shape) >= -sharing.slab.dimension:
        raise sharing.refuse("layer normalisation over the shared dimension is not supported")
    return Part(function(x, normalized_shape, weight, bias, eps), sharing.slab)


def _normalised(
    x: torch.Tensor, dims: list[int], count: float, eps: float, traffic: Traffic
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x normalised, mean, variance), the statistics in float64; collective.

    Args:
        dims: dimensions to normalise over.
        count: elements along them on all ranks.
    """
    wide = torch.float64
    mean = sum_over(x.sum(dims, keepdim=True, dtype=wide), traffic) / count
    away = x - mean.to(x.dtype)
    squares = away.square().sum(dims, keepdim=True, dtype=wide)
    variance = sum_over(squares, traffic) / count
    return away * (variance + eps).rsqrt().to(x.dtype), mean.detach(), variance.detach()


def _scaled(
    normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    shape = [1, -1, *[1] * (normal.ndim - 2)]
    if weight is not None:
        normal = normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)
