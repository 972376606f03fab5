"""torchvision's transforms, as dlio's that do the same.

They are recognised by the names of their modules and classes, and read by their attributes, so that
torchvision need not be installed; v1 and v2 alike. A transform with an option that dlio's lacks,
or of a class derived from torchvision's, is not recognised, and is called as it is.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import torch

from dlio.errors import UsageError
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.picture import Transform
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


def form_after(step: object, form: str) -> str:
    """Return the form in which torchvision's pipelines hold an image after a step: `pil` for a
    picture of Pillow, `tensor`, or `tv` for a tv_tensor."""
    name = type(step).__name__
    if name in ("ToTensor", "PILToTensor"):
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
    size = step.size
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
