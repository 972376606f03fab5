"""torchvision's transforms, as dlio's that do the same.

They are recognised by the names of their modules and classes, and read by their attributes, so that
torchvision need not be installed; v1 and v2 alike. A transform with an option that dlio's lacks,
or of a class derived from torchvision's, is not recognised, and is called as it is.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, cast

import torch

from dlio.errors import UsageError
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.picture import PixelTransform, Transform
from dlio.image.policy import is_bilinear

_ROOT: Final = "torchvision.transforms"


def is_torchvision(transform: object) -> bool:
    """True for an object of a class of torchvision's transforms."""
    module = type(transform).__module__
    return module == _ROOT or module.startswith(_ROOT + ".")


def flattened(transform: object) -> list[Transform]:
    """Return the steps of a pipeline, those of inner ones too; None has none."""
    if transform is None:
        return []
    is_compose = type(transform) is T.Compose
    if is_compose or (is_torchvision(transform) and type(transform).__name__ == "Compose"):
        steps: Any = transform
        return [inner for each in steps.transforms for inner in flattened(each)]
    return [cast(Transform, transform)]


def recognised(step: object) -> Transform | None:
    """Return dlio's transform for one of torchvision; None for one without."""
    if not is_torchvision(step):
        return None
    make = _KNOWN.get(type(step).__name__)
    if make is None:
        return None
    try:
        made: Transform = make(step)
    except (AttributeError, TypeError, UsageError):  # Another version, or an option of its own.
        return None
    return made


def has_twin(step: object) -> bool:
    """True for a transform of torchvision that dlio has, if perhaps not with all of its options."""
    return type(step).__name__ in _KNOWN or type(step).__name__ == "ImageClassification"


def is_own(step: object) -> bool:
    """True for a transform of dlio, or one of the user's that changes pixels as dlio's do."""
    return isinstance(step, PixelTransform) or type(step).__module__.startswith("dlio.image.")


class PixelValues(NamedTuple):
    """The pixels of a pipeline between two of its steps."""

    kind: str
    """`picture` for one of Pillow, `bytes` for uint8, `unit` for floats from 0 to 1, `floats` for
    any other ones, `whole` for other whole numbers."""
    dtype: torch.dtype = torch.uint8


def understood(steps: Sequence[object], form: str) -> list[Transform | None]:
    """Return dlio's transform for each step of a pipeline that begins with a form (`form_after`) of
    image; None for a step that has none, or does another thing to the values that it gets: those
    of torchvision change colours behind Normalize, and leave a picture of Pillow as it is where
    they are for tensors."""
    made: list[Transform | None] = []
    values = PixelValues("picture" if form == "pil" else "bytes")
    for step in steps:
        known: Transform | None = cast(Transform, step)
        if not is_own(step):
            known = _of_values(recognised(step), values)
        made.append(known)
        values = _values_after(known, values)
    return made


def _of_values(known: Any, values: PixelValues) -> Any:
    """Return a recognised transform as torchvision's is meant for such values; None if dlio's does
    another thing to them."""
    kind = values.kind
    if isinstance(known, T.RandomApply):
        members = []
        for each in known.transforms:
            members.append(_of_values(each, values))
            values = _values_after(members[-1], values)
        return None if None in members else T.RandomApply(members, known.p)
    if isinstance(known, T.RandomChoice) and not known.mixes:
        members = [_of_values(each, values) for each in known.transforms]
        return None if None in members else T.RandomChoice(members, known.p)
    if isinstance(known, T.Normalize):
        is_float = kind in ("unit", "floats")
        return T.Normalize(known.mean, known.std, values.dtype) if is_float else None
    if isinstance(known, T.ToDtype) and not isinstance(known, T.ToTensor):
        return None if kind == "picture" else known
    if isinstance(known, T.RandomErasing):
        return None if kind == "picture" else known
    if kind in ("picture", "bytes") or not isinstance(known, PixelTransform):
        return known
    if isinstance(known, T.RandomHorizontalFlip | T.RandomVerticalFlip):
        return known
    if kind != "unit" or getattr(known, "fill", None) is not None:
        return None
    if isinstance(known, T.RandomSolarize):
        most = known.threshold  # torchvision compares it with the values as they are.
        return T.RandomSolarize(most * 255, known.p) if most <= 1 else None
    return known


def _values_after(known: Any, values: PixelValues) -> PixelValues:
    """Return the values that a transform makes of others."""
    kind = values.kind
    if isinstance(known, T.ToDtype):
        if not known.dtype.is_floating_point:
            return PixelValues("bytes" if known.dtype == torch.uint8 else "whole", known.dtype)
        is_unit = kind == "unit" or (known.scale and kind != "floats")
        return PixelValues("unit" if is_unit else "floats", known.dtype)
    if isinstance(known, T.PILToTensor) and kind == "picture":
        return PixelValues("bytes")
    if isinstance(known, T.Normalize):
        return PixelValues("floats", known.dtype)
    if isinstance(known, T.RandomErasing) and kind == "unit":
        given = known.value
        numbers = [given] if isinstance(given, int | float) else given
        is_unit = given != "random" and all(0 <= float(each) <= 1 for each in numbers)
        return values if is_unit else PixelValues("floats", values.dtype)
    if isinstance(known, T.RandomApply | T.RandomChoice):
        ends = {_values_after(each, values).kind for each in known.transforms} | {kind}
        return values if len(ends) == 1 else PixelValues("floats", values.dtype)
    return values


def without_presets(steps: Sequence[object]) -> list[Transform]:
    """Return steps with torchvision's presets for classification, as `weights.transforms()` has
    them, written out; one of another interpolation stays."""
    made: list[Any] = []
    for step in steps:
        is_preset = is_torchvision(step) and type(step).__name__ == "ImageClassification"
        made += (_preset_steps(step) if is_preset else None) or [step]
    return made


def _preset_steps(preset: Any) -> list[Any] | None:
    try:
        _check_resize(preset)
        middle = _pair(preset.crop_size)
        return [
            _resized_to(preset.resize_size),
            T.CenterCrop(middle * 2 if len(middle) == 1 else middle),
            T.PILToTensor(),
            T.ConvertImageDtype(torch.float32),
            T.Normalize(preset.mean, preset.std),
        ]
    except (AttributeError, TypeError, UsageError):  # Of another version, or bicubic.
        return None


def form_after(step: object, form: str) -> str:
    """Return the form in which torchvision's pipelines hold an image after a step: `pil` for a
    picture of Pillow, `tensor`, or `tv` for a tv_tensor."""
    name = type(step).__name__
    if name in ("ToTensor", "PILToTensor", "ImageClassification"):
        return "tensor"
    if name == "ToImage":
        return "tv"
    return "tensor" if name == "ToPureTensor" and form == "tv" else form


class TorchvisionForm:
    """Hand an image on in the form (see `form_after`) in which torchvision's next transform expects
    it."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __call__(self, image: torch.Tensor) -> Any:
        if self.form == "pil":
            from PIL import Image

            pixels = image.permute(1, 2, 0).contiguous().numpy()
            return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        tv_tensors = sys.modules.get("torchvision.tv_tensors")
        if self.form == "tv" and tv_tensors is not None:
            return tv_tensors.Image(image)
        return image

    def __repr__(self) -> str:
        return f"AsTorchvision({self.form!r})"


def _cropped(step: Any) -> Any:
    _check_resize(step)
    return T.RandomResizedCrop(_pair(step.size), _pair(step.scale), _pair(step.ratio))


def _resized(step: Any) -> Any:
    _check_resize(step)
    if getattr(step, "max_size", None) is not None:
        raise UsageError("max_size")
    return _resized_to(step.size)


def _resized_to(size: Any) -> Any:
    # One number, in a list too, is the length of the short side.
    if not isinstance(size, int):
        size = list(size)
        size = size[0] if len(size) == 1 else size
    return T.Resize(size)


def _check_resize(step: Any) -> None:
    """Raise UsageError for an interpolation other than the decoder's."""
    if is_bilinear(step.interpolation) is not True or getattr(step, "antialias", True) is False:
        raise UsageError("interpolation")


def _jitter(step: Any) -> Any:
    names = ("brightness", "contrast", "saturation", "hue")
    values = {name: getattr(step, name) for name in names}
    return T.ColorJitter(**{k: 0 if v is None else list(v) for k, v in values.items()})


def _erasing(step: Any) -> Any:
    value: Any = "random" if step.value is None else step.value
    return T.RandomErasing(step.p, _pair(step.scale), _pair(step.ratio), value, step.inplace)


def _policy(step: Any) -> dict[str, Any]:
    if isinstance(step.fill, dict):
        raise UsageError("fill")
    return {
        "num_magnitude_bins": step.num_magnitude_bins,
        "interpolation": "bilinear" if is_bilinear(step.interpolation) else step.interpolation,
        "fill": step.fill,
    }


def _members(step: Any) -> list[Any]:
    """Return dlio's transforms for those inside of one. Raises UsageError if one has none."""
    members: Iterable[Any] = step.transforms
    known = [recognised(each) for each in members]
    if any(each is None for each in known):
        raise UsageError("transforms")
    return known


def _pair(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Iterable) else [values, values]


_KNOWN: Final[dict[str, Callable[[Any], Any]]] = {
    "CenterCrop": lambda step: T.CenterCrop(_pair(step.size)),
    "ColorJitter": _jitter,
    "ConvertImageDtype": lambda step: T.ConvertImageDtype(step.dtype),
    "CutMix": lambda step: T.CutMix(alpha=step.alpha, num_classes=step.num_classes),
    "GaussianBlur": lambda step: T.GaussianBlur(_pair(step.kernel_size), _pair(step.sigma)),
    "Identity": lambda _: T.ToPureTensor(),
    "MixUp": lambda step: T.MixUp(alpha=step.alpha, num_classes=step.num_classes),
    "Normalize": lambda step: T.Normalize(step.mean, step.std),
    "PILToTensor": lambda _: T.PILToTensor(),
    "RandAugment": lambda step: T.RandAugment(step.num_ops, step.magnitude, **_policy(step)),
    "RandomAdjustSharpness": lambda step: T.RandomAdjustSharpness(step.sharpness_factor, step.p),
    "RandomApply": lambda step: T.RandomApply(_members(step), step.p),
    "RandomAutocontrast": lambda step: T.RandomAutocontrast(step.p),
    "RandomChoice": lambda step: T.RandomChoice(
        _members(step), getattr(step, "probabilities", getattr(step, "p", None))
    ),
    "RandomEqualize": lambda step: T.RandomEqualize(step.p),
    "RandomErasing": _erasing,
    "RandomGrayscale": lambda step: T.RandomGrayscale(step.p),
    "RandomHorizontalFlip": lambda step: T.RandomHorizontalFlip(step.p),
    "RandomInvert": lambda step: T.RandomInvert(step.p),
    "RandomPosterize": lambda step: T.RandomPosterize(step.bits, step.p),
    "RandomResizedCrop": _cropped,
    "RandomSolarize": lambda step: T.RandomSolarize(step.threshold, step.p),
    "RandomVerticalFlip": lambda step: T.RandomVerticalFlip(step.p),
    "Resize": _resized,
    "ToDtype": lambda step: T.ToDtype(step.dtype, bool(step.scale)),
    "ToImage": lambda _: T.ToImage(),
    "ToPureTensor": lambda _: T.ToPureTensor(),
    "ToTensor": lambda _: T.ToTensor(),
    "TrivialAugmentWide": lambda step: T.TrivialAugmentWide(**_policy(step)),
}
