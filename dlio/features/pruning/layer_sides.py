"""The tensors and attributes of each kind of layer that hold the neurons of one side."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

Side = Literal["out", "through", "in"]
"""`out`: the layer produces the neurons; `in`: it reads them; `through`: it acts on each one
separately."""


@dataclass(frozen=True, slots=True)
class LayerSide:
    """The tensors and attributes to cut on one side of a layer."""

    tensors: tuple[tuple[str, int], ...]
    """(name of a parameter or buffer, dimension along which the neurons lie)."""
    attributes: tuple[str, ...]
    """Names of the attributes that count the neurons."""
    size: int
    """Number of neurons."""


def layer_side(module: nn.Module, side: Side) -> LayerSide | None:
    """Return the tensors on one side; None if it cannot be cut channel by channel."""
    match module:
        case nn.Linear():
            if side == "out":
                return _side(module, {"weight": 0, "bias": 0}, ("out_features",))
            if side == "in":
                return _side(module, {"weight": 1}, ("in_features",))
        case nn.modules.conv._ConvNd():
            return _convolution(module, side)
        case nn.modules.batchnorm._BatchNorm() | nn.modules.instancenorm._InstanceNorm():
            tensors = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}
            return _side(module, tensors, ("num_features",)) if side == "through" else None
        case nn.PReLU() if side == "through" and module.num_parameters > 1:
            return _side(module, {"weight": 0}, ("num_parameters",))
        case nn.Embedding() if side == "out":
            return _side(module, {"weight": 1}, ("embedding_dim",))
    return None


def is_depthwise(module: nn.Module) -> bool:
    """True for a convolution that treats each channel separately."""
    return (
        isinstance(module, nn.modules.conv._ConvNd)
        and module.groups == module.in_channels == module.out_channels
        and module.groups > 1
    )


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the layer's own parameter of this name, or None."""
    return module._parameters.get(name)


def reads_zeros(module: nn.Module) -> bool:
    """True if a layer reads zeros instead of neurons at an image's border."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False
    if module.transposed or isinstance(module.padding, str):
        return module.transposed or module.padding != "valid"
    return any(module.padding)


def _convolution(module: nn.modules.conv._ConvNd, side: Side) -> LayerSide | None:
    if is_depthwise(module):
        names = ("in_channels", "out_channels", "groups")
        return _side(module, {"weight": 0, "bias": 0}, names) if side == "through" else None
    if module.groups > 1 or side == "through":
        return None
    if side == "out":
        weight = 1 if module.transposed else 0
        return _side(module, {"weight": weight, "bias": 0}, ("out_channels",))
    return _side(module, {"weight": 0 if module.transposed else 1}, ("in_channels",))


def _side(module: nn.Module, tensors: dict[str, int], attributes: tuple[str, ...]) -> LayerSide:
    there = tuple(
        (name, dim) for name, dim in tensors.items() if getattr(module, name, None) is not None
    )
    return LayerSide(there, attributes, int(getattr(module, attributes[0])))
