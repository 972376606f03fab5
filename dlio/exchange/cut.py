"""The cut of one tensor of a pruned network: a keep-index per dimension."""

from dataclasses import dataclass

import torch

from dlio.errors import DlioError


@dataclass(frozen=True, slots=True, eq=False)
class TensorCut:
    """A cut of one tensor of the model."""

    name: str
    """Name in the model's state dict."""
    tensor: torch.Tensor
    """The model's own tensor, after the cut."""
    before: tuple[int, ...]
    """Shape before the cut."""
    kept: tuple[tuple[int, torch.Tensor], ...]
    """(dimension, indices that stay)."""

    def of(self, other: torch.Tensor, description: str = "a tensor") -> torch.Tensor:
        """Cut a companion tensor the same way: a momentum, a residual, an average.

        Dimensions of size 1 stay if the model's tensor is longer there, which covers the factored
        sums that Adafactor keeps. 0-dimensional tensors, such as step counts, stay too.

        Args:
            other: a tensor of shape `before`, apart from dimensions of size 1.
            description: the subject of an error message.

        Raises DlioError if `other` has any other shape.
        """
        if other.ndim == 0:
            return other
        fits = other.ndim == len(self.before) and all(
            mine in (whole, 1) for mine, whole in zip(other.shape, self.before, strict=True)
        )
        if not fits:
            raise DlioError(
                f"{description} of {self.name} has shape {tuple(other.shape)}, the tensor had "
                f"{self.before}, so the two cannot be cut together. Choose an optimizer whose "
                "state has the shape of its parameters"
            )
        for dim, indices in self.kept:
            if other.shape[dim] == self.before[dim]:
                other = other.index_select(dim, indices.to(other.device))
        return other
