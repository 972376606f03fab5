"""The cut of one tensor when a network loses neurons."""

from dataclasses import dataclass

import torch

from dlio.errors import DlioError

__all__ = ["Cut"]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The cut of one tensor of the model: its shape before, and the indices that remain."""

    name: str
    """Name in the model's state dict."""
    tensor: torch.Tensor
    """The model's tensor, after the cut."""
    before: tuple[int, ...]
    """Shape of the tensor before the cut."""
    kept: tuple[tuple[int, torch.Tensor], ...]
    """(dimension, indices that remain) of each dimension that was cut."""

    def of(self, other: torch.Tensor, what: str = "a tensor") -> torch.Tensor:
        """Cut a tensor that corresponds to the model's: a momentum, a residual, an average.

        Dimensions of size 1 stay as they are where the model's tensor is longer (Adafactor's sums
        over a dimension), and so do 0-dimensional counts.

        Raises DlioError, naming `what`, for a shape that does not correspond.
        """
        if other.ndim == 0:
            return other
        fits = other.ndim == len(self.before) and all(
            mine in (whole, 1) for mine, whole in zip(other.shape, self.before, strict=True)
        )
        if not fits:
            raise DlioError(
                f"{what} of {self.name} has shape {tuple(other.shape)}, the tensor had "
                f"{self.before}: it cannot be cut with the tensor, so the tensor cannot be pruned. "
                "Choose an optimizer whose state has the shape of its parameters"
            )
        for dim, indices in self.kept:
            if other.shape[dim] == self.before[dim]:
                other = other.index_select(dim, indices.to(other.device))
        return other
