"""Tensors that ranks share: a model runs on them unchanged.

A `SplitTensor` is this rank's part of a tensor. Convolutions, pooling, normalisation, up-sampling,
losses and sums do what they would do on the whole (tables below); functions of single elements work
on the part. Any other function is refused with an error, as its result could be silently wrong.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch

from dlio.errors import UsageError
from dlio.features.mesh import spatial_layers, spatial_norms, spatial_reductions
from dlio.features.mesh.tensor_sharing import GATHER_FIRST, Layer, LocalPart, TensorSharing

_LAYERS: Final[Mapping[str, Layer]] = {
    **{f"conv{k}d": spatial_layers.convolve for k in (1, 2, 3)},
    **{f"conv_transpose{k}d": spatial_layers.convolve_transposed for k in (1, 2, 3)},
    **{f"max_pool{k}d": spatial_layers.max_pool for k in (1, 2, 3)},
    **{f"avg_pool{k}d": spatial_layers.average_pool for k in (1, 2, 3)},
    **{f"adaptive_avg_pool{k}d": spatial_reductions.global_pool for k in (1, 2, 3)},
    **{
        f"{name}_norm": getattr(spatial_norms, f"{name}_norm")
        for name in ("batch", "group", "instance")
    },
    "layer_norm": spatial_norms.layer_norm,
    "interpolate": spatial_layers.interpolate,
    "pad": spatial_layers.pad,
    **dict.fromkeys(("cross_entropy", "nll_loss"), spatial_reductions.cross_entropy),
    **dict.fromkeys(
        (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        ),
        spatial_reductions.loss,
    ),
    "sum": spatial_reductions.sum_of,
    "mean": spatial_reductions.mean,
    "flatten": spatial_reductions.flatten,
    "unsqueeze": spatial_reductions.unsqueeze,
    "getitem": spatial_reductions.index,
    **dict.fromkeys(("cat", "concat", "concatenate"), spatial_reductions.concatenate),
    **dict.fromkeys(
        ("softmax", "log_softmax", "argmax", "argmin", "amax", "amin", "glu"),
        spatial_reductions.along_others,
    ),
}
"""Functions that know about the other ranks, by their names in torch."""

_ELEMENTWISE_NAMES: Final = """
abs absolute neg negative add sub subtract rsub mul multiply div divide true_divide pow square
sqrt rsqrt reciprocal exp expm1 log log1p log2 log10 sin cos tan tanh sigmoid logit erf sign
floor ceil round clamp clip clamp_min clamp_max maximum minimum lerp addcmul addcdiv
radd rmul rtruediv rdiv rpow iadd isub imul itruediv idiv truediv
relu relu6 leaky_relu rrelu elu selu celu gelu silu mish softplus softsign hardtanh hardswish
hardsigmoid tanhshrink softshrink hardshrink threshold logsigmoid prelu
dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout
where masked_fill nan_to_num isnan isfinite isinf
eq ne lt gt le ge greater less greater_equal less_equal not_equal
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
and or xor invert rand ror
to float double half bfloat16 int long bool byte type type_as cuda cpu contiguous clone detach
zeros_like ones_like empty_like full_like rand_like randn_like zero fill copy linear
"""
_ELEMENTWISE: Final = frozenset(_ELEMENTWISE_NAMES.split())
_ANY_PLAIN: Final = frozenset(("prelu", "linear"))
"""Element-wise functions whose other tensors are weights of any shape."""
_OWN: Final = frozenset(("requires_grad", "retain_grad", "register_hook", "hash", "backward"))
"""Methods of the tensor object itself."""
_FACT_NAMES: Final = """
size dim ndimension numel nelement stride storage_offset data_ptr is_floating_point is_complex
is_contiguous element_size get_device is_same_size repr format len numpy
"""
_FACTS: Final = frozenset(_FACT_NAMES.split())
"""Methods that describe this rank's part."""
_NOT_PARTS: Final = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
"""Attributes whose values would be other tensors."""


class SplitTensor(torch.Tensor):
    """This rank's part of a tensor that the ranks of a mesh's axis `space` share.

    Made by `Mesh.split`. `shape` and `size` are those of the part. Functions return such tensors
    again, or plain ones that all ranks have alike: losses, and means over the shared dimension.

    Functions raise UsageError if they are not known to be right on a part.
    """

    sharing: TensorSharing

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = func.__name__.strip("_")
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("get", "set"):
                attribute = cast("Any", func).__self__.__name__
                if attribute in _NOT_PARTS:
                    raise UsageError(f"tensor.{attribute} is not supported on a part of a tensor")
                return func(*args, **options)
            if name in _OWN:
                return func(*args, **options)
            sharing = _sharing_of((tuple(args), options))
            if "input" in options:
                args = (options.pop("input"), *args)
            plain, plain_options = _plain(tuple(args)), _plain(options)
            if name in _FACTS:
                return func(*plain, **plain_options)
            layer = _LAYERS.get(name)
            if layer is not None:
                result = layer(sharing, func, *plain, **plain_options)
                if isinstance(result, LocalPart):
                    return join(result.tensor, replace(sharing, slab=result.slab))
                return result
            if name in _ELEMENTWISE:
                return _elementwise(name, func, plain, plain_options, sharing)
        raise sharing.refuse(f"torch's {name} is not supported on a part of a tensor")


def join(local: torch.Tensor, sharing: TensorSharing) -> SplitTensor:
    """Return a tensor as this rank's part of a larger one; shares its memory and gradient.

    Raises UsageError if its length along the shared dimension is not that of the part.
    """
    sharing.slab.check_local(local.shape)
    part = local.as_subclass(SplitTensor)
    part.sharing = sharing
    return part


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor; a plain tensor as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, SplitTensor) else tensor


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, alike on all ranks that share it; a plain tensor as it is.

    Collective over these ranks. The gradient is the sum of all ranks' gradients of the part.

    Raises CommTimeout if another rank does not answer in time.
    """
    if not isinstance(tensor, SplitTensor):
        return tensor
    sharing = tensor.sharing
    return spatial_reductions.whole(sharing, local_part(tensor))


def _sharing_of(values: object) -> TensorSharing:
    """Return how the tensors among a function's arguments are shared: all alike."""
    first, *rest = [tensor.sharing for tensor in _split_tensors(values)]
    for other in rest:
        if other.slab != first.slab:
            raise UsageError(
                f"tensors that ranks share along dimension {first.slab.dimension} in parts of "
                f"{first.slab.extent} elements do not go together with those of dimension "
                f"{other.slab.dimension} and {other.slab.extent} elements: {GATHER_FIRST}"
            )
    return first


def _split_tensors(value: object) -> list[SplitTensor]:
    if isinstance(value, SplitTensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _split_tensors(each)]
    return _split_tensors(list(value.values())) if isinstance(value, dict) else []


def _plain(value: Any) -> Any:
    """Return a structure with plain tensors in place of parts."""
    if isinstance(value, SplitTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _elementwise(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    sharing: TensorSharing,
) -> Any:
    dimension, length = sharing.slab.dimension, sharing.slab.length
    if name == "linear" and dimension == -1:
        raise sharing.refuse("a linear layer is over the last dimension")
    if name not in _ANY_PLAIN:
        for each in (*args, *options.values()):
            # Broadcast along the dimension, or a part of the same elements.
            is_tensor = isinstance(each, torch.Tensor) and each.ndim >= -dimension
            if is_tensor and each.shape[dimension] not in (1, length):
                raise sharing.refuse(f"torch's {name} with a tensor of shape {tuple(each.shape)}")
    result = function(*args, **options)
    if isinstance(result, torch.Tensor):
        return join(result, sharing)
    if isinstance(result, str):  # The name of a type.
        return result
    raise sharing.refuse(f"{name}() of a tensor is that of this rank's part")
