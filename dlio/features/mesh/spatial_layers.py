"""Convolutions, pooling and up-sampling of tensors that ranks share.

Each output is on the rank whose balanced part of the outputs it belongs to. A rank fetches the
inputs that its outputs need and others have (the halo), fills in padding at the ends of the whole
dimension alone, and runs torch's function without padding there. Backward returns the halo's
gradients to their owners. Any stride, dilation and extent will do.

Source: spatial parallelism as in Dryden et al., arXiv 1903.06681 (DistConv of LBANN).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from dlio.features.mesh.halo import fetch
from dlio.features.mesh.slab import Interval, LayerWindow, Slab
from dlio.features.mesh.tensor_sharing import LocalPart, TensorSharing
from dlio.util.units import counted

Sizes = int | Sequence[int]
Function = Callable[..., torch.Tensor]


def convolve(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> LocalPart:
    """Convolve as `torch.conv1d`, `conv2d` and `conv3d`; collective."""
    dims = weight.ndim - 2
    axis = _axis(sharing, dims, function)
    strides, spread = _each(stride, dims), _each(dilation, dims)
    reach = [d * (k - 1) + 1 for d, k in zip(spread, weight.shape[2:], strict=True)]
    if isinstance(padding, str):
        total = [(r - 1) * (padding == "same") for r in reach]
        pads = [(each // 2, each - each // 2) for each in total]
    else:
        pads = [(each, each) for each in _each(padding, dims)]
    window = LayerWindow(strides[axis], *pads[axis], reach[axis])
    grown, slab = _grown(sharing, x, window, 0.0)
    pads[axis] = (0, 0)
    if any(before != after for before, after in pads):
        grown = functional.pad(grown, [n for pair in reversed(pads) for n in pair])
        pads = [(0, 0)] * dims
    inner = [before for before, _ in pads]
    return LocalPart(function(grown, weight, bias, strides, inner, spread, groups), slab)


def convolve_transposed(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> LocalPart:
    """Convolve as `torch.conv_transpose1d` to `3d`; collective."""
    dims = weight.ndim - 2
    axis = _axis(sharing, dims, function)
    strides, pads, more = (_each(each, dims) for each in (stride, padding, output_padding))
    spread = _each(dilation, dims)
    step, before = strides[axis], pads[axis]
    reach = spread[axis] * (weight.shape[2 + axis] - 1) + 1
    whole = sharing.slab
    slab = replace(whole, extent=(whole.extent - 1) * step - 2 * before + reach + more[axis])

    def needs(rank: int) -> Interval:
        first, last = slab.bounds(rank)
        low = max(0, -(-(first + before - reach + 1) // step))
        low = min(low, whole.extent - 1)
        return low, max(low + 1, min(whole.extent, (last - 1 + before) // step + 1))

    wanted = [needs(rank) for rank in range(whole.ranks)]
    grown = fetch(x, whole, wanted, sharing.space)
    first, last = slab.own
    low, high = wanted[whole.rank]
    # Zeros beyond these inputs, so that the result covers all outputs of this rank.
    start = min(low, (first + before - reach + 1) // step)
    stop = max(high, (last - 1 + before) // step + 2)
    grown = _padded(grown, whole.dimension, low - start, stop - high, 0.0)
    pads[axis] = more[axis] = 0
    out = function(grown, weight, bias, strides, pads, more, groups, spread)
    return LocalPart(out.narrow(slab.dimension, first - (start * step - before), slab.length), slab)


def max_pool(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> LocalPart:
    """Pool as `torch.max_pool1d` to `3d`; collective."""
    if return_indices:
        raise sharing.refuse("return_indices=True would give places in the rank's part")
    dims = _dimensions(function)
    axis = _axis(sharing, dims, function)
    kernel, pads, spread = (_each(each, dims) for each in (kernel_size, padding, dilation))
    strides = _each(stride, dims) if stride else list(kernel)
    window = LayerWindow(
        strides[axis], pads[axis], pads[axis], spread[axis] * (kernel[axis] - 1) + 1
    )
    _check_ceil(sharing, window, ceil_mode)
    grown, slab = _grown(sharing, x, window, float("-inf"))
    pads[axis] = 0
    return LocalPart(function(grown, kernel, strides, pads, spread, ceil_mode), slab)


def average_pool(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> LocalPart:
    """Pool as `torch.nn.functional.avg_pool2d` and `avg_pool3d`; collective."""
    dims = _dimensions(function)
    axis = _axis(sharing, dims, function)
    kernel, pads = _each(kernel_size, dims), _each(padding, dims)
    strides = _each(stride, dims) if stride else list(kernel)
    if pads[axis] and not count_include_pad:
        raise sharing.refuse("count_include_pad=False depends on the place in the whole dimension")
    window = LayerWindow(strides[axis], pads[axis], pads[axis], kernel[axis])
    _check_ceil(sharing, window, ceil_mode)
    grown, slab = _grown(sharing, x, window, 0.0)
    pads[axis] = 0
    rest = () if dims == 1 else (divisor_override,)  # avg_pool1d has no such argument.
    pooled = function(grown, kernel, strides, pads, ceil_mode, count_include_pad, *rest)
    return LocalPart(pooled, slab)


def interpolate(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    size: Sizes | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> LocalPart:
    """Up-sample as `torch.nn.functional.interpolate`, by whole factors; collective."""
    dims = x.ndim - 2
    axis = _axis(sharing, dims, function)
    if size is not None or scale_factor is None:
        raise sharing.refuse(
            "interpolate(size=...) takes a whole tensor's size (give scale_factor)"
        )
    factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * dims
    factor = int(factors[axis])
    if factor != factors[axis] or factor < 1:
        raise sharing.refuse(f"interpolate(scale_factor={factors[axis]}) is not a whole number")
    is_nearest = mode in ("nearest", "nearest-exact")
    if antialias or not (is_nearest or mode in ("linear", "bilinear", "trilinear")):
        raise sharing.refuse(f"interpolate(mode={mode!r}, antialias={antialias}) is not supported")
    if align_corners and factor > 1:
        raise sharing.refuse("interpolate(align_corners=True) scales by the whole extent")
    whole = sharing.slab
    slab = replace(whole, extent=whole.extent * factor)

    def needs(rank: int) -> Interval:
        first, last = slab.bounds(rank)
        if is_nearest:
            return first // factor, (last - 1) // factor + 1
        # Output o lies at (o + 1/2) / factor - 1/2, between two inputs.
        low = (2 * first + 1 - factor) // (2 * factor)
        high = (2 * last - 1 - factor) // (2 * factor) + 2
        return max(0, low), min(whole.extent, high)

    wanted = [needs(rank) for rank in range(whole.ranks)]
    grown = fetch(x, whole, wanted, sharing.space)
    out = function(
        grown,
        scale_factor=list(factors),
        mode=mode,
        align_corners=align_corners,
        recompute_scale_factor=recompute_scale_factor,
    )
    start = slab.own[0] - wanted[whole.rank][0] * factor
    return LocalPart(out.narrow(slab.dimension, start, slab.length), slab)


def pad(
    sharing: TensorSharing,
    function: Function,
    x: torch.Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> LocalPart:
    """Pad other dimensions than the shared one, as `torch.nn.functional.pad`."""
    place = 2 * (-sharing.slab.dimension - 1)
    if any(pad[place : place + 2]):
        raise sharing.refuse("pad() adds elements at the ends of each rank's part")
    return LocalPart(function(x, list(pad), mode, value), sharing.slab)


def _grown(
    sharing: TensorSharing, local: torch.Tensor, window: LayerWindow, fill: float
) -> tuple[torch.Tensor, Slab]:
    """Return (all inputs of this rank's outputs, with padding; the part that the outputs are)."""
    whole = sharing.slab
    slab = replace(whole, extent=window.outputs(whole.extent))
    spans = [window.needs(slab.bounds(rank)) for rank in range(whole.ranks)]
    wanted = [(max(0, low), min(whole.extent, high)) for low, high in spans]
    if any(low >= high for low, high in wanted):
        raise sharing.refuse("some outputs of this layer lie in the padding alone")
    grown = fetch(local, whole, wanted, sharing.space)
    (low, high), (first, last) = spans[whole.rank], wanted[whole.rank]
    return _padded(grown, whole.dimension, first - low, high - last, fill), slab


def _padded(
    tensor: torch.Tensor, dimension: int, before: int, after: int, fill: float
) -> torch.Tensor:
    if not before and not after:
        return tensor
    sides = [0, 0] * (-dimension - 1) + [before, after]
    return functional.pad(tensor, sides, value=fill)


def _axis(sharing: TensorSharing, dims: int, function: Function) -> int:
    """Return the number of the shared dimension among a layer's spatial ones."""
    axis = dims + sharing.slab.dimension
    if axis < 0:
        raise sharing.refuse(f"{function.__name__} works on the last {counted(dims, 'dimension')}")
    return axis


def _each(given: Any, dims: int) -> list[int]:
    if isinstance(given, int):
        return [given] * dims
    sizes = [int(each) for each in given]
    return sizes * dims if len(sizes) == 1 else sizes


def _dimensions(function: Function) -> int:
    """Return the number of spatial dimensions that the name of torch's function ends with."""
    return int(function.__name__[-2])


def _check_ceil(sharing: TensorSharing, window: LayerWindow, ceil_mode: bool) -> None:
    rest = (sharing.slab.extent + window.before + window.after - window.reach) % window.stride
    if ceil_mode and rest:
        raise sharing.refuse("ceil_mode=True adds an output at the end of the whole dimension")
