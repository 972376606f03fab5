"""How close pipelines of torchvision come when dlio does their steps: the table of the guide.

torchvision need not be installed. The classes here have its modules, names and attributes, and do
with images of Pillow and with tensors as its documentation promises, by Pillow's own functions
and `torch.nn.functional`. `python -m tests.image.pipeline_table` prints the table.
"""

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

import dlio
from dlio.image.fusion import fused
from dlio.image.torchvision_steps import TorchvisionForm
from tests.image.standins import InterpolationMode

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC


def _size(img: Any) -> tuple[int, int]:
    """(height, width)"""
    if isinstance(img, torch.Tensor):
        return int(img.shape[-2]), int(img.shape[-1])
    return int(img.height), int(img.width)


def _scale(img: Any, size: tuple[int, int], step: Any) -> Any:
    if isinstance(img, torch.Tensor):
        mode = step.interpolation.value
        made = torch.nn.functional.interpolate(
            img[None].float(), size, mode=mode, antialias=step.antialias, align_corners=False
        )[0]
        return made if img.is_floating_point() else made.round().clamp(0, 255).to(img.dtype)
    how = Image.Resampling[step.interpolation.name]
    return img.resize(size[::-1], how)  # Pillow always smooths.


def _part(img: Any, top: int, left: int, height: int, width: int) -> Any:
    if isinstance(img, torch.Tensor):
        return img[..., top : top + height, left : left + width]
    return img.crop((left, top, left + width, top + height))


def _resize(step: Any, img: Any) -> Any:
    (height, width), size = _size(img), step.size
    if isinstance(size, int):
        long = int(size * max(height, width) / min(height, width))
        size = (size, long) if height <= width else (long, size)
    return _scale(img, tuple(size), step)


def _center(step: Any, img: Any) -> Any:
    (height, width), (tall, wide) = _size(img), step.size
    add = [max(0, wide - width), max(0, tall - height)]
    if any(add):
        sides = (add[0] // 2, add[1] // 2, (add[0] + 1) // 2, (add[1] + 1) // 2)
        if isinstance(img, torch.Tensor):
            img = torch.nn.functional.pad(img, (sides[0], sides[2], sides[1], sides[3]))
        else:
            img = ImageOps.expand(img, sides)
        height, width = _size(img)
    return _part(img, round((height - tall) / 2), round((width - wide) / 2), tall, wide)


def _fallback(step: Any, img: Any) -> Any:
    """RandomResizedCrop where no draw fits: the middle, of the nearest ratio."""
    height, width = _size(img)
    tall, wide = height, width
    if width / height < min(step.ratio):
        tall = round(width / min(step.ratio))
    elif width / height > max(step.ratio):
        wide = round(height * max(step.ratio))
    part = _part(img, (height - tall) // 2, (width - wide) // 2, tall, wide)
    return _scale(part, tuple(step.size), step)


def _flip(axis: int) -> Callable[[Any, Any], Any]:
    def flip(step: Any, img: Any) -> Any:
        if step.p == 0:
            return img
        if isinstance(img, torch.Tensor):
            return img.flip(axis)
        return ImageOps.mirror(img) if axis == -1 else ImageOps.flip(img)

    return flip


def _tensor(_: Any, img: Any) -> torch.Tensor:
    if isinstance(img, torch.Tensor):
        return img
    return torch.from_numpy(np.array(img)).permute(2, 0, 1).contiguous()


def _floats(step: Any, img: Any) -> torch.Tensor:
    made = _tensor(step, img)
    return made if made.is_floating_point() else made.float() / 255


def _normal(step: Any, img: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(each)[:, None, None] for each in (step.mean, step.std))
    return (img - mean) / std


def _jitter(step: Any, img: Any) -> Any:
    if isinstance(img, torch.Tensor):
        return (img * step.brightness[0]).clamp(0, 1)
    return ImageEnhance.Brightness(img).enhance(step.brightness[0])


def _solarize(step: Any, img: Any) -> Any:
    if isinstance(img, torch.Tensor):
        return torch.where(img >= step.threshold, 1 - img, img)
    return ImageOps.solarize(img, step.threshold)


_DOES: dict[str, Callable[[Any, Any], Any]] = {
    "CenterCrop": _center,
    "ColorJitter": _jitter,
    "ConvertImageDtype": _floats,
    "Grayscale": lambda _, img: img.convert("L").convert("RGB"),
    "Normalize": _normal,
    "PILToTensor": _tensor,
    "Pad": lambda step, img: ImageOps.expand(img, step.padding),
    "RandomAutocontrast": lambda _, img: ImageOps.autocontrast(img),
    "RandomEqualize": lambda _, img: ImageOps.equalize(img),
    "RandomGrayscale": lambda _, img: img.convert("L").convert("RGB"),
    "RandomHorizontalFlip": _flip(-1),
    "RandomInvert": lambda _, img: ImageOps.invert(img),
    "RandomPosterize": lambda step, img: ImageOps.posterize(img, step.bits),
    "RandomResizedCrop": _fallback,
    "RandomSolarize": _solarize,
    "RandomVerticalFlip": _flip(-2),
    "Resize": _resize,
    "ToDtype": _floats,
    "ToImage": _tensor,
    "ToPureTensor": _tensor,
    "ToTensor": _floats,
}


class _OracleStep:
    """A transform of torchvision, as its documentation has it."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __call__(self, image: Any) -> Any:
        return _DOES[type(self).__name__](self, image)


class _OracleCompose(_OracleStep):
    def __call__(self, image: Any) -> Any:
        for step in self.__dict__["transforms"]:
            image = step(image)
        return image


def _made(version: str, name: str, base: Any = _OracleStep, **attributes: Any) -> Any:
    module = "torchvision.transforms" + (".v2._all" if version == "v2" else ".transforms")
    return type(name, (base,), {"__module__": module})(**attributes)


_SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "Resize(40)": ("Resize", {"size": 40}),
    "Resize(28)": ("Resize", {"size": 28}),
    "Resize(150)": ("Resize", {"size": 150}),
    "Resize((40, 56))": ("Resize", {"size": [40, 56]}),
    "Resize(40, bicubic)": ("Resize", {"size": 40, "interpolation": BICUBIC}),
    "Resize(40, max_size=50)": ("Resize", {"size": 40, "max_size": 50}),
    "CenterCrop(32)": ("CenterCrop", {"size": (32, 32)}),
    "CenterCrop((24, 36))": ("CenterCrop", {"size": (24, 36)}),
    "CenterCrop(200)": ("CenterCrop", {"size": (200, 200)}),
    "RandomResizedCrop(32)": ("RandomResizedCrop", {"size": (32, 32)}),
    "RandomResizedCrop((48, 64))": ("RandomResizedCrop", {"size": (48, 64)}),
    "HorizontalFlip": ("RandomHorizontalFlip", {"p": 1.0}),
    "VerticalFlip": ("RandomVerticalFlip", {"p": 1.0}),
    "Invert": ("RandomInvert", {"p": 1.0}),
    "Solarize": ("RandomSolarize", {"threshold": 100, "p": 1.0}),
    "Solarize(0.5)": ("RandomSolarize", {"threshold": 0.5, "p": 1.0}),
    "Posterize": ("RandomPosterize", {"bits": 4, "p": 1.0}),
    "Equalize": ("RandomEqualize", {"p": 1.0}),
    "Autocontrast": ("RandomAutocontrast", {"p": 1.0}),
    "Grayscale(p=1)": ("RandomGrayscale", {"p": 1.0}),
    "Brightness(1.3)": (
        "ColorJitter",
        {"brightness": [1.3, 1.3], "contrast": None, "saturation": None, "hue": None},
    ),
    "Pad(3)": ("Pad", {"padding": 3}),
    "Grayscale(3)": ("Grayscale", {"num_output_channels": 3}),
    "Normalize": ("Normalize", {"mean": MEAN, "std": STD}),
    "ToFloat": ("ToDtype", {"dtype": torch.float32, "scale": True}),
    "ConvertImageDtype": ("ConvertImageDtype", {"dtype": torch.float32}),
}
"""Steps by the names in the table; others have the name of their class, and no options."""

_PILLOW = [
    "ToTensor",
    "ToTensor, Normalize",
    "Resize(40), CenterCrop(32), ToTensor",
    "Resize(40), CenterCrop((24, 36)), ToTensor, Normalize",
    "Resize(28), ToTensor",
    "Resize((40, 56)), ToTensor, Normalize",
    "Resize(150), CenterCrop(32), ToTensor",
    "CenterCrop(32), ToTensor",
    "CenterCrop(200), ToTensor",
    "RandomResizedCrop(32), ToTensor",
    "RandomResizedCrop((48, 64)), HorizontalFlip, ToTensor, Normalize",
    "RandomResizedCrop(32), VerticalFlip, Invert, ToTensor",
    "RandomResizedCrop(32), Solarize, ToTensor",
    "RandomResizedCrop(32), Posterize, ToTensor",
    "RandomResizedCrop(32), Autocontrast, ToTensor",
    "RandomResizedCrop(32), Grayscale(p=1), ToTensor",
    "RandomResizedCrop(32), Brightness(1.3), ToTensor",
    "RandomResizedCrop(32), Grayscale(3), ToTensor",
    "HorizontalFlip, ToTensor",
    "PILToTensor, ConvertImageDtype, Normalize",
    "Resize(40), CenterCrop(32), Pad(3), ToTensor",
    "Resize(40, bicubic), CenterCrop(32), ToTensor",
    "Pad(3), ToTensor",
    "Grayscale(3), Resize(28), ToTensor",
    "RandomResizedCrop(32), ToTensor, Solarize(0.5)",
    "Resize(40), CenterCrop(32), ToTensor, Normalize, Brightness(1.3)",
]
_TENSORS = [
    "Resize(40), CenterCrop(32), ToFloat",
    "Resize((40, 56)), ToFloat, Normalize",
    "Resize(150), CenterCrop(32), ToFloat",
    "RandomResizedCrop(32), ToFloat",
    "RandomResizedCrop((48, 64)), HorizontalFlip, ToFloat, Normalize",
    "CenterCrop(32), ToFloat",
    "ToFloat, Normalize",
    "Resize(40, bicubic), ToFloat",
]
_LATER = ["ToTensor, Resize(40), CenterCrop(32)", "ToImage, Resize(40), CenterCrop(32), ToFloat"]
"""Pictures that become tensors before they are resized."""


class PipelineCase(NamedTuple):
    version: str
    steps: str
    antialias: bool
    images: str
    """`Pillow`, or `tensor` for pipelines that make no tensor of a picture."""

    def pipeline(self) -> Any:
        steps = []
        given = {"interpolation": BILINEAR, "antialias": self.antialias, "max_size": None}
        for each in self.steps.replace("), ", ")|").split("|"):
            for text in [each] if "(" in each and not each.startswith("To") else each.split(", "):
                name, options = _SHORT.get(text, (text, {}))
                more = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)} if "Crop" in name else {}
                sized = {**given, **more} if name in ("Resize", "RandomResizedCrop") else {}
                steps.append(_made(self.version, name, **{**sized, **options}))
        return _made(self.version, "Compose", _OracleCompose, transforms=steps)


CASES = [
    *(PipelineCase("v1", steps, True, "Pillow") for steps in _PILLOW),
    *(PipelineCase("v2", steps, True, "tensor") for steps in _TENSORS),
    *(PipelineCase("v1", steps, False, "Pillow") for steps in _PILLOW[2:4]),
    *(PipelineCase("v2", steps, False, "tensor") for steps in _TENSORS[:4]),
    *(
        PipelineCase(version, steps, smooth, "Pillow")
        for version, steps in zip(("v1", "v2"), _LATER, strict=True)
        for smooth in (True, False)
    ),
]


def write_pictures(folder: Path) -> list[Path]:
    """Write JPEGs with smooth parts, edges and coloured noise, in two classes."""
    generator, paths = np.random.default_rng(8), []
    for number, (width, height) in enumerate([(171, 128), (96, 140), (120, 120), (250, 90)]):
        coarse = generator.integers(0, 256, (9, 12, 3)).astype(np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.array(smooth).astype(np.int64)
        pixels[height // 3 : height // 2, width // 4 :] = (220, 30, 60)
        pixels += generator.integers(-25, 26, pixels.shape)
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(path)
    return sorted(paths)


def _levels(image: Any, steps: str) -> torch.Tensor:
    """An image in levels of 0 to 255."""
    made = _tensor(None, image).double()
    if "Normalize" in steps:
        made = made * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    return made if image.dtype == torch.uint8 else made * 255


def verdict(case: PipelineCase) -> str:
    """Which steps dlio does: `fused`, `called` for none, or the first one that is called."""
    pipeline = case.pipeline()
    parts = fused(pipeline)
    if parts.crop is None:
        parts = fused(pipeline, is_cropped=False)
    left = parts.whole if parts.rest is None else parts.rest
    called = [
        type(step).__name__
        for step in getattr(left, "transforms", ())
        if type(step).__module__.startswith("torchvision")
    ]
    forms = any(isinstance(step, TorchvisionForm) for step in getattr(left, "transforms", ()))
    if not called:
        return "fused"
    return f"{called[0]} and later called" if forms or parts.crop is not None else "called"


def difference(case: PipelineCase, folder: Path, paths: list[Path]) -> float:
    """Mean difference of dlio's samples from those of the pipeline itself, in levels."""
    gaps = []
    with dlio.open(str(folder), transform=case.pipeline(), tiers="none") as data:
        for number, path in enumerate(paths):
            picture: Any = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
            given = picture if case.images == "Pillow" else _tensor(None, picture)
            wanted = _levels(case.pipeline()(given), case.steps)
            made = _levels(data[number][0], case.steps)
            assert made.shape == wanted.shape, (case, made.shape, wanted.shape)
            gaps.append(float((made - wanted).abs().mean()))
    return sum(gaps) / len(gaps)


def rows() -> list[tuple[str, ...]]:
    """The cells of the table."""
    with tempfile.TemporaryDirectory() as root:
        paths = write_pictures(Path(root))
        return [
            (
                case.steps,
                f"{case.version}, {case.images}",
                "on" if case.antialias else "off",
                verdict(case),
                f"{difference(case, Path(root), paths):.1f}",
            )
            for case in CASES
        ]


if __name__ == "__main__":
    for row in rows():
        print("| " + " | ".join(row) + " |")
