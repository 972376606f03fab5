"""torchvision's classes without torchvision: the same modules, names and attributes.

The two modules `v1` and `v2` have those transforms that tests need. A transform here does nothing
when it is called but note the kind of image that it was called with.
"""

import enum
from types import SimpleNamespace
from typing import Any

__all__ = ["InterpolationMode", "made", "v1", "v2"]

made: list[tuple[str, str]] = []
"""(name of a transform, kind of the image) of each call."""


class InterpolationMode(enum.Enum):
    """As torchvision.transforms.InterpolationMode."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


class _StandIn:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __call__(self, image: Any) -> Any:
        made.append((type(self).__name__, type(image).__name__))
        return self.result(image)

    def result(self, image: Any) -> Any:
        return image


class _Compose(_StandIn):
    def __call__(self, image: Any) -> Any:
        for transform in self.__dict__["transforms"]:
            image = transform(image)
        return image


class _ToTensor(_StandIn):
    def result(self, image: Any) -> Any:
        from dlio.image.crop_transforms import ToTensor

        return ToTensor()(image)


_V1 = {
    "transforms": (
        "CenterCrop ColorJitter Compose ConvertImageDtype GaussianBlur Grayscale Normalize "
        "PILToTensor RandomAdjustSharpness RandomApply RandomAutocontrast RandomChoice "
        "RandomCrop RandomEqualize RandomErasing RandomGrayscale RandomHorizontalFlip "
        "RandomInvert RandomPerspective RandomPosterize RandomResizedCrop RandomSolarize "
        "RandomVerticalFlip Resize ToTensor"
    ),
    "autoaugment": "AutoAugment RandAugment TrivialAugmentWide",
    "_presets": "ImageClassification",
}
_V2 = {
    "v2._augment": "CutMix MixUp RandomErasing",
    "v2._auto_augment": "RandAugment TrivialAugmentWide",
    "v2._color": "ColorJitter RandomGrayscale RandomPhotometricDistort",
    "v2._container": "Compose RandomApply RandomChoice",
    "v2._deprecated": "ToTensor",
    "v2._geometry": (
        "CenterCrop RandomCrop RandomHorizontalFlip RandomResizedCrop RandomVerticalFlip Resize"
    ),
    "v2._misc": "ConvertImageDtype GaussianBlur Identity Normalize ToDtype",
    "v2._type_conversion": "PILToTensor ToImage ToPureTensor",
}


def _module(places: dict[str, str]) -> Any:
    classes: dict[str, Any] = {}
    for place, names in places.items():
        for name in names.split():
            base = {"Compose": _Compose, "ToTensor": _ToTensor}.get(name, _StandIn)
            classes[name] = type(name, (base,), {"__module__": f"torchvision.transforms.{place}"})
    return SimpleNamespace(**classes)


v1 = _module(_V1)
v2 = _module(_V2)
