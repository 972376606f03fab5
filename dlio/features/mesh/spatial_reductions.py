"""Sums, means and losses of tensors that ranks share, and the whole tensor.

Results over the shared dimension are those of the whole tensor, alike on all ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dlio.features.mesh.halo import fetch, sum_over
from dlio.features.mesh.slab import Slab
from dlio.features.mesh.tensor_sharing import LocalPart, TensorSharing

Function = Callable[..., torch.Tensor]
Dims = int | Sequence[int] | None


def whole(sharing: TensorSharing, local: torch.Tensor) -> torch.Tensor:
    """Return all ranks' parts as one tensor; collective."""
    slab = sharing.slab
    return fetch(local, slab, [(0, slab.extent)] * slab.ranks, sharing.space)


def flatten(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    start_dim: int = 0,
    end_dim: int = -1,
) -> torch.Tensor:
    """Flatten the whole tensor, as `torch.flatten`; collective."""
    return function(whole(sharing, x), start_dim, end_dim)


def sum_of(
    sharing: TensorSharing,
    _function: Function,
    x: torch.Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | LocalPart:
    """Sum as `torch.sum`; collective if over the shared dimension."""
    dims = _dims(dim, x)
    total = x.sum(dims, keepdim, dtype=dtype)
    if sharing.axis(x) in dims:
        return sum_over(total, sharing.space)
    return LocalPart(total, _slab_after(sharing, x, dims, keepdim))


def mean(
    sharing: TensorSharing,
    _function: Function,
    x: torch.Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | LocalPart:
    """Average as `torch.mean`; collective if over the shared dimension."""
    dims = _dims(dim, x)
    if sharing.axis(x) in dims:
        return _global_mean(sharing, x, dims, keepdim, dtype)
    return LocalPart(x.mean(dims, keepdim, dtype=dtype), _slab_after(sharing, x, dims, keepdim))


def global_pool(
    sharing: TensorSharing, function: Function, x: torch.Tensor, output_size: Dims
) -> torch.Tensor:
    """Average over all spatial dimensions, as `adaptive_avg_pool2d(x, 1)`; collective."""
    dims = int(function.__name__[-2])
    sizes = [output_size] * dims if isinstance(output_size, int) else list(output_size or ())
    if sizes != [1] * dims or dims + sharing.slab.dimension < 0:
        raise sharing.refuse(f"{function.__name__}(output_size={output_size}) needs the whole")
    return _global_mean(sharing, x, range(x.ndim - dims, x.ndim), True, None)


def along_others(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    dim: int | None = None,
    *args: object,
    **options: object,
) -> LocalPart:
    """Call a function that works along one other dimension than the shared one."""
    dims = _dims(dim, x)
    if sharing.axis(x) in dims or dim is None:
        raise sharing.refuse(f"{function.__name__} along dimension {dim} is not supported")
    out = function(x, dim, *args, **options)
    removed = () if out.ndim == x.ndim else dims
    return LocalPart(out, _slab_after(sharing, x, removed, False))


def concatenate(
    sharing: TensorSharing, function: Function, tensors: Sequence[torch.Tensor], dim: int = 0
) -> LocalPart:
    """Concatenate parts along another dimension, as `torch.cat`."""
    if sharing.axis(tensors[0]) in _dims(dim, tensors[0]):
        raise sharing.refuse(f"cat along dimension {dim} is not supported")
    for tensor in tensors:
        sharing.slab.check_local(tensor.shape)
    return LocalPart(function(list(tensors), dim), sharing.slab)


def unsqueeze(sharing: TensorSharing, function: Function, x: torch.Tensor, dim: int) -> LocalPart:
    """Insert a dimension of one element, as `torch.unsqueeze`."""
    place = dim if dim >= 0 else dim + x.ndim + 1
    slab = sharing.slab
    if place > sharing.axis(x):
        slab = replace(slab, dimension=slab.dimension - 1)
    return LocalPart(function(x, dim), slab)


def index(sharing: TensorSharing, function: Function, x: torch.Tensor, key: object) -> LocalPart:
    """Index leading dimensions before the shared one, by whole numbers and slices."""
    keys = key if isinstance(key, tuple) else (key,)
    plain = all(isinstance(each, int | slice) for each in keys)
    if not plain or len(keys) > sharing.axis(x):
        raise sharing.refuse(f"an index {key!r} may reach the shared dimension")
    return LocalPart(function(x, key), sharing.slab)


def loss(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    target: torch.Tensor,
    *args: object,
    reduction: str = "mean",
    **options: object,
) -> torch.Tensor | LocalPart:
    """Compute an element-wise loss of torch, as of the whole tensors; collective."""
    if args:
        raise sharing.refuse(f"{function.__name__} takes its options by name here")
    if options.get("weight") is not None and "cross_entropy" not in function.__name__:
        raise sharing.refuse(f"{function.__name__} with weights is not supported")
    sharing.slab.check_local(x.shape)
    losses = function(x, target, reduction="none", **options)
    elements = losses.numel() / sharing.slab.length * sharing.slab.extent
    return _reduced(sharing, losses, reduction, elements)


def cross_entropy(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    **options: object,
) -> torch.Tensor | LocalPart:
    """Compute `cross_entropy` or `nll_loss` of classes or probabilities, as of the whole tensors.

    Collective. `x` has shape (n, classes, ...), the target (n, ...) or that of `x`.
    """
    if sharing.axis(x) < 2:
        raise sharing.refuse(f"{function.__name__} is over the classes, dimension 1")
    sharing.slab.check_local(target.shape)
    losses = function(x, target, weight, ignore_index=ignore_index, reduction="none", **options)
    if target.is_floating_point():
        elements: float | torch.Tensor = losses.numel() / sharing.slab.length * sharing.slab.extent
    else:
        counted = target[target != ignore_index]
        here = counted.numel() if weight is None else weight[counted].sum()
        elements = torch.as_tensor(here, dtype=torch.float64, device=losses.device)
        elements = sum_over(elements.detach().reshape(1), sharing.space)[0]
    return _reduced(sharing, losses, reduction, elements)


def _reduced(
    sharing: TensorSharing, losses: torch.Tensor, reduction: str, elements: float | torch.Tensor
) -> torch.Tensor | LocalPart:
    if reduction == "none":
        return LocalPart(losses, sharing.slab)
    total = sum_over(losses.sum(dtype=torch.float64).reshape(1), sharing.space)[0]
    return (total / elements if reduction == "mean" else total).to(losses.dtype)


def _global_mean(
    sharing: TensorSharing,
    x: torch.Tensor,
    dims: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Average over dimensions of which one is the shared one; collective."""
    total = sum_over(x.sum(list(dims), keepdim, dtype=dtype), sharing.space)
    count = math.prod(x.shape[axis] for axis in dims)
    return total / (count // sharing.slab.length * sharing.slab.extent)


def _dims(dim: Dims, tensor: torch.Tensor) -> list[int]:
    """Return dimensions counted from the first; all for None."""
    if dim is None:
        return list(range(tensor.ndim))
    given = [dim] if isinstance(dim, int) else list(dim)
    return [each % tensor.ndim for each in given]


def _slab_after(
    sharing: TensorSharing, tensor: torch.Tensor, removed: Sequence[int], keepdim: bool
) -> Slab:
    """Return the slab when dimensions have been removed."""
    axis = sharing.axis(tensor)
    later = 0 if keepdim else sum(each > axis for each in removed)
    return replace(sharing.slab, dimension=sharing.slab.dimension + later)
