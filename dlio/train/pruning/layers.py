"""Which tensors and attributes of a layer belong to the neurons on one of its sides."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

Side = Literal["out", "through", "in"]
"""`out`: the layer makes the neurons; `in`: it reads them; `through`: it keeps each to itself."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How one side of a layer is cut."""

    tensors: tuple[tuple[str, int], ...]
    """Parameters and buffers by name, each with the dimension that the neurons lie along."""
    attributes: tuple[str, ...]
    """Attributes that count the neurons."""
    size: int
    """How many there are."""


def shape_of(module: nn.Module, side: Side) -> Shape | None:
    """None for a layer or side that cannot be cut channel by channel."""
    match module:
        case nn.Linear():
            if side == "out":
                return _shape(module, {"weight": 0, "bias": 0}, ("out_features",))
            if side == "in":
                return _shape(module, {"weight": 1}, ("in_features",))
        case nn.modules.conv._ConvNd():
            return _convolution(module, side)
        case nn.modules.batchnorm._BatchNorm() | nn.modules.instancenorm._InstanceNorm():
            tensors = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}
            return _shape(module, tensors, ("num_features",)) if side == "through" else None
        case nn.PReLU() if side == "through" and module.num_parameters > 1:
            return _shape(module, {"weight": 0}, ("num_parameters",))
        case nn.Embedding() if side == "out":
            return _shape(module, {"weight": 1}, ("embedding_dim",))
    return None


def is_depthwise(module: nn.Module) -> bool:
    """Whether it is a convolution that keeps each channel to itself."""
    return (
        isinstance(module, nn.modules.conv._ConvNd)
        and module.groups == module.in_channels == module.out_channels
        and module.groups > 1
    )


def tensor_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """A layer's own parameter; None where it has none of that name."""
    return module._parameters.get(name)


def reads_zeros(module: nn.Module) -> bool:
    """Whether some of a layer's outputs see zeros in place of neurons: at an image's border."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False
    if module.transposed or isinstance(module.padding, str):
        return module.transposed or module.padding != "valid"
    return any(module.padding)


def _convolution(module: nn.modules.conv._ConvNd, side: Side) -> Shape | None:
    if is_depthwise(module):
        names = ("in_channels", "out_channels", "groups")
        return _shape(module, {"weight": 0, "bias": 0}, names) if side == "through" else None
    if module.groups > 1 or side == "through":
        return None
    if side == "out":
        weight = 1 if module.transposed else 0
        return _shape(module, {"weight": weight, "bias": 0}, ("out_channels",))
    return _shape(module, {"weight": 0 if module.transposed else 1}, ("in_channels",))


def _shape(module: nn.Module, tensors: dict[str, int], attributes: tuple[str, ...]) -> Shape:
    there = tuple(
        (name, dim) for name, dim in tensors.items() if getattr(module, name, None) is not None
    )
    return Shape(there, attributes, int(getattr(module, attributes[0])))
