"""The yardstick: torch's DataLoader over Pillow, as most training scripts have it."""

from typing import IO

import torch

from dlio.errors import UsageError
from dlio.util.extras import how_to_install
from dlio_bench.peers.standalone.runners import crops


class PillowImages(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Opens a file, decodes, RandomResizedCrop, flip: torchvision's steps on PIL.

    With `floats` they end in torchvision's ToTensor, as most scripts do; otherwise in its
    PILToTensor, uint8, as dlio does, which is less work.
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


def cropped(file: str | IO[bytes], size: int) -> torch.Tensor:
    """A file, or a stream, through Pillow: uint8, shape (3, size, size)."""
    return torch.from_numpy(crops.cropped(file, size)).permute(2, 0, 1)
