"""What became of one tensor when a network was cut smaller."""

from dataclasses import dataclass

import torch

from dlio.errors import DlioError


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """What became of one tensor of the model."""

    name: str
    """In the state dict."""
    tensor: torch.Tensor
    """The model's own, after the cut."""
    before: tuple[int, ...]
    """Its shape before."""
    kept: tuple[tuple[int, torch.Tensor], ...]
    """(dimension, indices that stay)."""

    def of(self, other: torch.Tensor, what: str = "a tensor") -> torch.Tensor:
        """The same cut of a tensor that lies beside: a momentum, a residual, an average.

        Dimensions of size 1 where the tensor's own is longer stay as they are: sums over a
        dimension, as Adafactor keeps them, and 0-dimensional counts.

        Raises DlioError, naming `what`, for a shape that is another.
        """
        if other.ndim == 0:
            return other
        fits = other.ndim == len(self.before) and all(
            mine in (whole, 1) for mine, whole in zip(other.shape, self.before, strict=True)
        )
        if not fits:
            raise DlioError(
                f"{what} of {self.name} has shape {tuple(other.shape)}, the tensor had "
                f"{self.before}: what cannot be cut with it cannot be pruned. Choose an optimizer "
                "whose state has the shape of its parameters"
            )
        for dim, indices in self.kept:
            if other.shape[dim] == self.before[dim]:
                other = other.index_select(dim, indices.to(other.device))
        return other
