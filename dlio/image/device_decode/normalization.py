"""Normalisation of pixels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Normalization:
    """Normalisation of pixels: (pixel / 255 - mean) / std, computed in float32.

    In float32 the result equals that of `dlio.transforms.Normalize`.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dtype: torch.dtype = torch.float32
    """Of the result: float32, float16 or bfloat16."""

    def scaled(self) -> tuple[list[float], list[float]]:
        """Return (mean, std) for pixels from 0 to 255, rounded to float32."""
        mean, std = torch.tensor(self.mean) * 255.0, torch.tensor(self.std) * 255.0
        return mean.tolist(), std.tolist()

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise pixels from 0 to 255; shape (..., 3)."""
        mean, std = (torch.tensor(each, device=pixels.device) for each in self.scaled())
        return ((pixels.float() - mean) / std).to(self.dtype)
