"""How ranks share a tensor, as the layers of this package are told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from dlio.errors import UsageError
from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.slab import Slab

GATHER_FIRST: Final = "gather it first, by `dlio.features.mesh.gather`"
"""The remedy for layers that work on whole tensors only."""

Layer = Callable[..., Any]
"""An operation on shared tensors.

Takes a `TensorSharing`, torch's function, and that one's arguments with this rank's parts as plain
tensors. Returns a `LocalPart`, or a plain value that ranks have alike.
"""


@dataclass(frozen=True, slots=True)
class TensorSharing:
    """The slab of a tensor that this rank has, and the ranks that have the rest."""

    slab: Slab
    space: RankGroup
    """The ranks that share each sample."""
    norm: RankGroup
    """The ranks whose samples batch normalisation takes together."""

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
class LocalPart:
    """A result of which each rank has its part."""

    tensor: torch.Tensor
    slab: Slab
