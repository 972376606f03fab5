"""A few numbers of each rank that travel with its gradients, at no message of their own."""

from typing import Protocol

import torch


class StepValues(Protocol):
    """Numbers that a synchronous exchange sums over all ranks, with each sum of gradients."""

    count: int
    """Number of them."""

    def depart(self, into: torch.Tensor, factor: float) -> None:
        """Write this rank's numbers, of shape (count,), where the sum of gradients begins.

        `factor` is that of this rank's gradients in the sum.
        """

    def arrive(self, sums: torch.Tensor, factor: torch.Tensor | float) -> None:
        """Take the sums over all ranks, shape (count,); `factor` makes means of sums of gradients.

        The memory is used again afterwards.
        """
