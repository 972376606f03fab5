"""The yardstick: torch's DataLoader over Pillow, as most training scripts have it."""

import math
import random
from typing import IO

import torch

from dlio.errors import UsageError
from dlio.util.extras import how_to_install

__all__ = ["PillowImages", "cropped"]


class PillowImages(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Opens a file, decodes, RandomResizedCrop, flip: torchvision's steps on PIL.

    Args:
        floats: end in torchvision's ToTensor, as most scripts do; otherwise in its PILToTensor,
            uint8, as dlio does, which is less work.
    """

    def __init__(self, files: list[str], labels: list[int], size: int, floats: bool) -> None:
        try:
            import PIL.Image  # noqa: F401 - is it there?
        except ImportError as error:
            raise UsageError(
                f"the yardstick needs Pillow: {how_to_install('bench', 'pillow')}"
            ) from error
        self._files = files
        self._labels = labels
        self._size = size
        self._floats = floats

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = cropped(self._files[index], self._size)
        if self._floats:
            pixels = pixels.contiguous().to(torch.float32).div(255)
        return pixels, self._labels[index]

    @staticmethod
    def crop(height: int, width: int) -> tuple[int, int, int, int]:
        """torchvision's RandomResizedCrop.get_params: (top, left, height, width)."""
        for _ in range(10):
            area = height * width * random.uniform(0.08, 1.0)
            aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return random.randint(0, height - h), random.randint(0, width - w), h, w
        side = min(height, width)
        return (height - side) // 2, (width - side) // 2, side, side


def cropped(file: str | IO[bytes], size: int) -> torch.Tensor:
    """A file, or a stream, through Pillow: uint8, shape (3, size, size)."""
    import numpy as np
    from PIL import Image

    with Image.open(file) as opened:
        image = opened.convert("RGB")
    top, left, height, width = PillowImages.crop(image.height, image.width)
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
