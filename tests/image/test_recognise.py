"""torchvision's pipelines are recognised, fused as far as they are known, and called from there."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import dlio
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.crop import Crop
from dlio.image.fusion import fused
from dlio.image.torchvision_steps import recognised, understood
from tests.image.standins import InterpolationMode, made, v1, v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BILINEAR, NEAREST = InterpolationMode.BILINEAR, InterpolationMode.NEAREST


def _crop(of: Any, **more: Any) -> Any:
    options = {"size": (32, 40), "scale": (0.2, 1.0), "ratio": (0.7, 1.4), "antialias": True}
    return of.RandomResizedCrop(**{"interpolation": BILINEAR, **options, **more})


def _policy(of: Any, **more: Any) -> Any:
    options = {"num_magnitude_bins": 31, "interpolation": NEAREST, "fill": None}
    return of.TrivialAugmentWide(**{**options, **more})


CASES = [
    (v1.CenterCrop(size=(8, 9)), T.CenterCrop((8, 9))),
    (
        v1.ColorJitter(brightness=[0.6, 1.4], contrast=None, saturation=None, hue=[-0.1, 0.1]),
        T.ColorJitter(brightness=0.4, hue=0.1),
    ),
    (
        v2.ColorJitter(brightness=(0.6, 1.4), contrast=(0.1, 0.2), saturation=None, hue=None),
        T.ColorJitter(brightness=0.4, contrast=(0.1, 0.2)),
    ),
    (v1.ConvertImageDtype(dtype=torch.float16), T.ConvertImageDtype(torch.float16)),
    (v1.GaussianBlur(kernel_size=(5, 3), sigma=(0.1, 2.0)), T.GaussianBlur((5, 3))),
    (v2.GaussianBlur(kernel_size=[5, 3], sigma=[0.1, 2.0]), T.GaussianBlur((5, 3))),
    (v1.Normalize(mean=MEAN, std=STD, inplace=False), T.Normalize(MEAN, STD)),
    (v1.PILToTensor(), T.PILToTensor()),
    (v1.RandomAdjustSharpness(sharpness_factor=2, p=0.5), T.RandomAdjustSharpness(2)),
    (v1.RandomAutocontrast(p=0.1), T.RandomAutocontrast(0.1)),
    (v1.RandomEqualize(p=0.1), T.RandomEqualize(0.1)),
    (
        v1.RandomErasing(p=0.1, scale=(0.1, 0.2), ratio=(1, 2), value="random", inplace=False),
        T.RandomErasing(0.1, (0.1, 0.2), (1, 2), "random"),
    ),
    (
        v2.RandomErasing(p=0.1, scale=(0.1, 0.2), ratio=(1, 2), value=None, inplace=False),
        T.RandomErasing(0.1, (0.1, 0.2), (1, 2), "random"),
    ),
    (v2.RandomGrayscale(p=0.2), T.RandomGrayscale(0.2)),
    (v1.RandomInvert(p=0.2), T.RandomInvert(0.2)),
    (v1.RandomPosterize(bits=4, p=0.2), T.RandomPosterize(4, 0.2)),
    (v1.RandomSolarize(threshold=128, p=0.2), T.RandomSolarize(128, 0.2)),
    (v1.RandomVerticalFlip(p=0.2), T.RandomVerticalFlip(0.2)),
    (v1.Resize(size=[20], interpolation=BILINEAR, max_size=None, antialias=True), T.Resize(20)),
    (v2.Resize(size=(20, 30), interpolation=BILINEAR, max_size=None), T.Resize((20, 30))),
    (_crop(v1), T.RandomResizedCrop((32, 40), (0.2, 1.0), (0.7, 1.4))),
    (_policy(v1), T.TrivialAugmentWide()),
    (
        _policy(v2, interpolation=BILINEAR, fill=[1, 2, 3]),
        T.TrivialAugmentWide(interpolation="bilinear", fill=[1, 2, 3]),
    ),
    (
        v1.RandAugment(
            num_ops=3, magnitude=7, num_magnitude_bins=31, interpolation=BILINEAR, fill=5
        ),
        T.RandAugment(3, 7, interpolation="bilinear", fill=5),
    ),
    (
        v2.RandomApply(transforms=[v2.RandomGrayscale(p=1)], p=0.3),
        T.RandomApply([T.RandomGrayscale(1)], 0.3),
    ),
    (
        v2.RandomChoice(transforms=[v1.RandomInvert(p=1)], probabilities=[1.0]),
        T.RandomChoice([T.RandomInvert(1)], [1.0]),
    ),
    (
        v1.RandomChoice(transforms=[v1.RandomInvert(p=1)], p=None),
        T.RandomChoice([T.RandomInvert(1)]),
    ),
    (v2.ToDtype(dtype=torch.float32, scale=True), T.ToDtype(torch.float32, scale=True)),
    (v2.ToImage(), T.ToImage()),
    (v2.ToPureTensor(), T.ToPureTensor()),
    (v1.ToTensor(), T.ToTensor()),
    (v2.ToTensor(), T.ToTensor()),
    (v2.MixUp(alpha=0.2, num_classes=10), T.MixUp(alpha=0.2, num_classes=10)),
    (v2.CutMix(alpha=1.0, num_classes=10), T.CutMix(num_classes=10)),
]


@pytest.mark.parametrize(("theirs", "ours"), CASES, ids=lambda each: type(each).__module__[-18:])
def test_transforms_are_recognised_by_their_attributes(theirs: Any, ours: Any) -> None:
    translated = recognised(theirs)
    assert type(translated) is type(ours)
    assert repr(translated).replace("NEAREST", "") == repr(ours) or _alike(translated, ours)


def _alike(translated: Any, ours: Any) -> bool:
    """True for policies whose interpolation is torchvision's member of the same meaning."""
    differing = {"interpolation", "_spaces"}
    values = [
        {name: value for name, value in vars(each).items() if name not in differing}
        for each in (translated, ours)
    ]
    return values[0] == values[1]


class _Derived(type(v1.RandomInvert())):  # type: ignore[misc]
    """A user's class, which may do anything else."""


@pytest.mark.parametrize(
    "unknown",
    [
        v1.AutoAugment(policy="imagenet"),
        v1.Grayscale(num_output_channels=1),
        v1.RandomPerspective(p=0.5),
        v1.RandomInvert(),  # Of a version with other attributes.
        _Derived(p=0.5),
        _crop(v1, interpolation=InterpolationMode.BICUBIC),
        _crop(v2, antialias=False),
        v1.Resize(size=20, interpolation=BILINEAR, max_size=30),
        v2.Resize(size=None, interpolation=BILINEAR, max_size=None),
        _policy(v2, fill={"others": 0}),
        _policy(v1, interpolation=InterpolationMode.BICUBIC),
        v2.ToDtype(dtype={"others": None}, scale=True),
        v1.RandomApply(transforms=[v1.RandomPerspective(p=1)], p=0.3),
        T.RandomInvert(),
        str,
    ],
    ids=lambda each: type(each).__name__,
)
def test_others_are_not(unknown: Any) -> None:
    assert recognised(unknown) is None


def test_a_known_pipeline_is_cut_like_dlios_own() -> None:
    erasing = {"p": 0.1, "scale": (0.02, 0.33), "ratio": (0.3, 3.3), "inplace": False}
    first = v1.Compose(
        transforms=[
            _crop(v1),
            v1.RandomHorizontalFlip(p=0.5),
            _policy(v1),
            v1.PILToTensor(),
            v1.ConvertImageDtype(dtype=torch.float32),
            v1.Normalize(mean=MEAN, std=STD),
            v1.RandomErasing(value=0, **erasing),
        ]
    )
    second = v2.Compose(
        transforms=[
            v2.ToImage(),
            _crop(v2),
            v2.Compose(transforms=[v2.RandomHorizontalFlip(p=0.5), v2.Identity(), _policy(v2)]),
            v2.ToDtype(dtype=torch.float32, scale=True),
            v2.Normalize(mean=MEAN, std=STD),
            v2.RandomErasing(value=[0.0], **erasing),
            v2.ToPureTensor(),
        ]
    )
    for pipeline in (first, second):
        parts = fused(pipeline)
        ranges = (0.2, 1.0), (0.7, 1.4)
        assert parts.crop == Crop(32, True, *ranges, flip=0.5, across=40, exact=True)
        assert [type(step) for _, step in parts.paints] == [T.TrivialAugmentWide]
        kinds = [type(step).__mro__[-3] for _, step in parts.batchwise]
        assert kinds == [T.ToDtype, T.Normalize, T.RandomErasing]
        assert (parts.rest, parts.whole) == (None, None)


_FLOATS = v2.ToDtype(dtype=torch.float32, scale=True)
_HALVES = v2.ToDtype(dtype=torch.float16, scale=True)
_WHOLE = v2.ToDtype(dtype=torch.int16, scale=True)
_NORMAL = v1.Normalize(mean=MEAN, std=STD)
_ERASING = {"p": 1.0, "scale": (0.1, 0.2), "ratio": (1, 2), "inplace": False}
_JITTER = v1.ColorJitter(brightness=[0.6, 1.4], contrast=None, saturation=None, hue=None)


def _solarize(threshold: float) -> Any:
    return v1.RandomSolarize(threshold=threshold, p=0.2)


@pytest.mark.parametrize(
    ("before", "step", "means"),
    [
        ([v1.PILToTensor()], _solarize(100), T.RandomSolarize(100, 0.2)),
        ([v1.ToTensor()], _solarize(0.4), T.RandomSolarize(102, 0.2)),
        ([v1.ToTensor()], _solarize(100), None),  # torchvision refuses it.
        (
            [v1.ToTensor()],
            v1.RandomApply(transforms=[_solarize(0.4)], p=0.3),
            T.RandomApply([T.RandomSolarize(102, 0.2)], 0.3),
        ),
        (
            [v1.ToTensor()],
            v1.RandomChoice(transforms=[_solarize(0.4)], p=None),
            T.RandomChoice([T.RandomSolarize(102, 0.2)]),
        ),
        ([v1.ToTensor()], _JITTER, T.ColorJitter(0.4)),
        ([v1.ToTensor(), _NORMAL], _JITTER, None),
        ([v1.ToTensor(), v1.RandomApply(transforms=[_NORMAL], p=0.5)], _JITTER, None),
        ([v2.ToImage(), v2.ToDtype(dtype=torch.float32, scale=False)], _JITTER, None),
        ([v2.ToImage(), _WHOLE], _JITTER, None),
        ([v1.ToTensor(), v1.RandomErasing(value="random", **_ERASING)], _JITTER, None),
        ([v1.ToTensor(), v1.RandomErasing(value=0.5, **_ERASING)], _JITTER, T.ColorJitter(0.4)),
        ([v1.ToTensor(), _NORMAL], v1.RandomVerticalFlip(p=0.2), T.RandomVerticalFlip(0.2)),
        ([v1.PILToTensor()], _policy(v1, fill=5), T.TrivialAugmentWide(fill=5)),
        ([v1.ToTensor()], _policy(v1, fill=0.5), None),
        ([v1.ToTensor()], _NORMAL, T.Normalize(MEAN, STD)),
        ([v2.ToImage(), _HALVES], _NORMAL, T.Normalize(MEAN, STD, torch.float16)),
        ([v1.PILToTensor()], _NORMAL, None),  # torchvision refuses it.
        ([v1.Resize(size=20, interpolation=BILINEAR, max_size=None)], _FLOATS, None),
        ([v2.ToImage()], _FLOATS, T.ToDtype(torch.float32, scale=True)),
        ([], v2.RandomErasing(value=0.5, **_ERASING), None),
    ],
)
def test_what_a_transform_means_follows_from_the_values_that_it_gets(
    before: list[Any], step: Any, means: Any
) -> None:
    known = understood([*before, step], "pil")[-1]
    assert repr(known).replace("NEAREST", "") == repr(means) or _alike(known, means)
    assert getattr(known, "dtype", None) == getattr(means, "dtype", None)


def test_a_preset_of_classification_is_its_steps() -> None:
    options = {"mean": MEAN, "std": STD, "antialias": True}
    sizes = {"crop_size": [32], "resize_size": [40]}
    preset = v1.ImageClassification(interpolation=BILINEAR, **sizes, **options)
    parts = fused(preset)
    assert parts.crop == Crop(32, False, resize=40, across=32, exact=True)
    kinds = [type(step) for _, step in parts.batchwise]
    assert kinds == [T.ConvertImageDtype, T.Normalize]
    assert (parts.rest, parts.whole) == (None, None)
    bicubic = v1.ImageClassification(interpolation=InterpolationMode.BICUBIC, **sizes, **options)
    rest = fused(bicubic).rest
    assert isinstance(rest, T.Compose)
    made.clear()
    rest(torch.zeros(3, 50, 50, dtype=torch.uint8))
    assert made == [("ImageClassification", "Image")]


def _images(pictures: Path, transform: Any) -> torch.Tensor:
    with (
        dlio.open(str(pictures), tiers="none", transform=transform, seed=3) as data,
        dlio.DataLoader(data, 12, num_workers=2) as loader,
    ):
        images: torch.Tensor = next(iter(loader))[0]
        return images


def test_places_and_colours_are_those_of_dlios_own_pipeline(pictures: Path) -> None:
    jitter = {"brightness": [0.6, 1.4], "contrast": [0.6, 1.4], "saturation": None, "hue": None}
    theirs = v1.Compose(
        transforms=[
            _crop(v1),
            v1.RandomHorizontalFlip(p=0.5),
            v1.ColorJitter(**jitter),
            v1.ToTensor(),
            v1.Normalize(mean=MEAN, std=STD),
        ]
    )
    ours = T.Compose(
        [
            T.RandomResizedCrop((32, 40), (0.2, 1.0), (0.7, 1.4)),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.4, 0.4),
            T.ToTensor(),
            T.Normalize(MEAN, STD),
        ]
    )
    # But for the pixels of the decoder and of resizing, see test_pipeline_table.py.
    gaps = (_images(pictures, theirs) - _images(pictures, ours)).abs()
    assert gaps.mean() < 0.2


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        (  # Pictures until something makes tensors.
            [_crop(v1), v1.RandomInvert(p=1), v1.RandomPerspective(), v1.ToTensor()],
            [("RandomPerspective", "Image"), ("ToTensor", "Image")],
        ),
        (
            [_crop(v1), v1.ToTensor(), v1.RandomPerspective(), v1.Normalize(mean=MEAN, std=STD)],
            [("RandomPerspective", "Tensor"), ("Normalize", "Tensor")],
        ),
        (
            [v2.ToImage(), _crop(v2), v2.RandomPhotometricDistort(), v2.ToPureTensor()],
            [("RandomPhotometricDistort", "Tensor"), ("ToPureTensor", "Tensor")],
        ),
        (  # Written for the tensors that a loader of dlio gives.
            [_crop(v2), v2.RandomPhotometricDistort(), v2.ToDtype(dtype=torch.float32, scale=True)],
            [("RandomPhotometricDistort", "Tensor"), ("ToDtype", "Tensor")],
        ),
        (  # Unknown from the beginning, and of a size of its own: whole images.
            [v1.RandomCrop(size=(32, 40)), v1.ToTensor()],
            [("RandomCrop", "Image"), ("ToTensor", "Image")],
        ),
        (
            [
                v1.Resize(size=(32, 40), interpolation=BILINEAR, max_size=None),
                v1.RandomCrop(size=9),
                v1.ToTensor(),
            ],
            [("RandomCrop", "Image"), ("ToTensor", "Image")],
        ),
    ],
)
def test_the_rest_is_called_with_the_images_that_it_expects(
    pictures: Path, steps: list[Any], calls: list[tuple[str, str]]
) -> None:
    of = v2 if type(steps[0]).__module__.startswith("torchvision.transforms.v2") else v1
    made.clear()
    with dlio.open(str(pictures), tiers="none", transform=of.Compose(transforms=steps)) as data:
        image, label = data[5]
        assert isinstance(image, torch.Tensor)
        assert label == data.targets[5]
        assert made == calls
        _, height, width = image.shape
        if len(steps) == 2:
            assert (height, width) != (224, 224)  # The whole image, in its own size.
        else:
            assert (height, width) == (32, 40)


def test_a_sequence_of_modules_is_a_pipeline() -> None:
    class Module(torch.nn.Module):
        __module__ = "torchvision.transforms.transforms"
        size = 9

    parts = fused(torch.nn.Sequential(Module(), torch.nn.Identity()))
    assert parts.whole is not None
    assert parts.crop is None
    other = torch.nn.Sequential(torch.nn.Identity())
    assert fused(other).rest is other


def test_a_v2_transform_gets_a_tv_tensor_if_torchvision_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys
    from types import SimpleNamespace

    class Image(torch.Tensor):
        pass

    module: Any = SimpleNamespace(Image=lambda tensor: tensor.as_subclass(Image))
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", module)
    steps = [v2.ToImage(), _crop(v2), v2.RandomPhotometricDistort(), v2.RandomGrayscale(p=1)]
    rest = fused(v2.Compose(transforms=steps)).rest
    assert rest is not None
    made.clear()
    rest(torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert made == [("RandomPhotometricDistort", "Image"), ("RandomGrayscale", "Image")]


@pytest.mark.parametrize("version", ["torchvision.transforms", "torchvision.transforms.v2"])
def test_torchvisions_own_classes_are_recognised(version: str) -> None:
    try:
        theirs = importlib.import_module(version)
    except (ImportError, RuntimeError) as error:  # The latter with another torch than its own.
        pytest.skip(f"no torchvision: {error}")
    steps = [
        theirs.RandomResizedCrop(32),
        theirs.RandomHorizontalFlip(),
        theirs.ColorJitter(0.4, 0.4, 0.4, 0.1),
        theirs.RandAugment(),
        theirs.TrivialAugmentWide(),
        theirs.RandomApply([theirs.GaussianBlur(3)], 0.5),
        theirs.PILToTensor(),
        theirs.ConvertImageDtype(torch.float32),
        theirs.Normalize(MEAN, STD),
        theirs.RandomErasing(),
    ]
    parts = fused(theirs.Compose(steps))
    assert parts.crop is not None
    assert (len(parts.paints), len(parts.batchwise), parts.rest) == (4, 3, None)
