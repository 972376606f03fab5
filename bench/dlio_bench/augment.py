"""Microseconds a picture of dlio's transforms, compared with Pillow's that torchvision calls."""

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.picture import PixelChange, PixelTransform
from dlio.image.random_source import KeyedRandom
from dlio.util.extras import how_to_install
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.repeats import ratio, spread
from dlio_bench.results.terminal import steps

_PICTURES: Final = 200
_TRANSFORMS: Final[dict[str, PixelTransform]] = {
    "ColorJitter": T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "TrivialAugmentWide": T.TrivialAugmentWide(),
    "RandAugment": T.RandAugment(),
    "RandomGrayscale": T.RandomGrayscale(1),
    "RandomSolarize": T.RandomSolarize(128, 1),
    "RandomEqualize": T.RandomEqualize(1),
    "RandomAutocontrast": T.RandomAutocontrast(1),
    "RandomAdjustSharpness": T.RandomAdjustSharpness(2, 1),
    "RandomHorizontalFlip": T.RandomHorizontalFlip(1),
    "GaussianBlur": T.GaussianBlur(23),
}


def augment(repeats: int, image_size: int, pictures: int = _PICTURES) -> dict[str, object]:
    """Measure the processor time of each transform, in turn with Pillow, over pictures of noise.

    Both do the same changes, drawn beforehand: dlio to arrays, Pillow to its own images. Blurs have
    no reference, as torchvision leaves Pillow for them.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise UsageError(
            f"the reference needs Pillow: {how_to_install('bench', 'pillow')}"
        ) from error
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (4, 8, 8, 3), np.uint8)
    size = (image_size, image_size)
    images = [PIL.Image.fromarray(each).resize(size) for each in noise]
    arrays = [np.array(image) for image in images]
    report: dict[str, object] = {
        "machine": describe_machine(["opencv-python-headless", "pillow", "numpy"]),
        "image_size": image_size,
        "pictures": pictures,
    }
    for name, transform in steps(_TRANSFORMS.items(), itemgetter(0)):
        drawn = [
            transform.draw(KeyedRandom(0, 0, number, 64), image_size, image_size)
            for number in range(pictures)
        ]
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeats):
            ours.append(_seconds(transform.paint, arrays, drawn))
            if name != "GaussianBlur":
                theirs.append(_seconds(_by_pillow, images, drawn))
        figures: dict[str, object] = {"us": spread([1e6 * each / pictures for each in ours])}
        if theirs:
            figures["pillow_us"] = spread([1e6 * each / pictures for each in theirs])
            figures["pillow_over_dlio"] = ratio(theirs, ours)
        report[name] = figures
    return report


def _seconds(paint: Any, images: Sequence[Any], drawn: Sequence[list[PixelChange]]) -> float:
    started = time.thread_time()
    for number, changes in enumerate(drawn):
        image = images[number % len(images)]
        for change in changes:
            image = paint(image, change)
    return time.thread_time() - started


def _by_pillow(image: Any, change: PixelChange) -> Any:
    """The same change by Pillow, as torchvision makes it."""
    from PIL import Image, ImageEnhance, ImageOps

    name, value = change
    enhancers: dict[str, Any] = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "color": ImageEnhance.Color,
        "saturation": ImageEnhance.Color,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name.lower() in enhancers:
        factor = value if name.islower() else 1 + value
        return enhancers[name.lower()](image).enhance(factor)
    if name == "hue":
        return _turned(image, value)
    if name in ("Posterize", "Solarize"):
        made: Callable[..., Any] = getattr(ImageOps, name.lower())
        return made(image, int(value))
    if name == "Rotate":
        return image.rotate(value, Image.Resampling.NEAREST)
    if name.startswith(("Shear", "Translate")):
        matrix = {
            "ShearX": (1, value, 0, 0, 1, 0),
            "ShearY": (1, 0, 0, value, 1, 0),
            "TranslateX": (1, 0, -int(value), 0, 1, 0),
            "TranslateY": (1, 0, 0, 0, 1, -int(value)),
        }[name]
        return image.transform(image.size, Image.Transform.AFFINE, matrix)
    plain: dict[str, Callable[[Any], Any]] = {
        "Identity": lambda image: image,
        "AutoContrast": ImageOps.autocontrast,
        "Equalize": ImageOps.equalize,
        "RandomAutocontrast": ImageOps.autocontrast,
        "RandomEqualize": ImageOps.equalize,
        "RandomGrayscale": lambda image: image.convert("L").convert("RGB"),
        "RandomSolarize": lambda image: ImageOps.solarize(image, 128),
        "RandomAdjustSharpness": lambda image: ImageEnhance.Sharpness(image).enhance(2),
        "flip": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    }
    return plain[name](image)


def _turned(image: Any, shift: float) -> Any:
    """torchvision's adjust_hue of a picture."""
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    turned: npt.NDArray[np.uint8] = np.array(hue) + np.int32(shift * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
