"""Random resized crops by Pillow, for libraries that leave decoding to their users."""

import math
import random
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image


def box(height: int, width: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params: (top, left, height, width)."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def cropped(file: str | IO[bytes], size: int) -> npt.NDArray[np.uint8]:
    """Decode a picture, crop, resize and flip it as torchvision does on Pillow's images.

    Returns uint8 of shape (size, size, 3).
    """
    from PIL import Image

    with Image.open(file) as opened:
        image: Image.Image = opened.convert("RGB")
    top, left, height, width = box(image.height, image.width)
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def shrunk(file: str, side: int | None) -> "Image":
    """Return a Pillow image whose shorter edge has at most `side` pixels; None leaves its size."""
    from PIL import Image

    with Image.open(file) as opened:
        image: Image.Image = opened.convert("RGB")
    scale = 1.0 if side is None else side / min(image.size)
    if scale < 1:
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size, Image.Resampling.BOX)
    return image
