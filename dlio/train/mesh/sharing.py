"""How ranks share a tensor, as the layers of this package are told."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from dlio.errors import UsageError
from dlio.train.mesh.messages import Traffic
from dlio.train.mesh.slab import Slab

GATHER_FIRST: Final = "gather it first, by `dlio.train.mesh.gather`"
"""The remedy for layers that work on whole tensors only."""

Layer = Callable[..., Any]
"""An operation on shared tensors.

Takes a `Sharing`, torch's function, and that one's arguments with this rank's parts as plain
tensors. Returns a `Part`, or a plain value that ranks have alike.
"""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The slab of a tensor that this rank has, and the ranks that have the rest."""

    slab: Slab
    space: Traffic
    """The ranks that share each sample."""
    norm: Traffic
    """The ranks whose samples batch normalisation takes together."""

    def over(self, slab: Slab) -> "Sharing":
        """Return the sharing of a tensor that the same ranks share in other parts."""
        return replace(self, slab=slab)

    def axis(self, tensor: torch.Tensor) -> int:
        """Return the number of the shared dimension of a tensor, counted from the first one."""
        return tensor.ndim + self.slab.dimension

    def refuse(self, reason: str) -> UsageError:
        """Return the error of an operation that would need other ranks' parts."""
        return UsageError(
            f"{reason}, and ranks share dimension {self.slab.dimension} of the tensor: "
            f"{GATHER_FIRST}"
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A result of which each rank has its part."""

    tensor: torch.Tensor
    slab: Slab
