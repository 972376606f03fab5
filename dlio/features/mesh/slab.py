"""The slab of each rank: a balanced part of one dimension, and the part that a layer needs of it.

All follows from the extent of the whole dimension and the number of ranks, so that ranks agree
without a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlio.errors import UsageError

Interval = tuple[int, int]
"""First index and the one after the last."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A rank's part of a dimension that the ranks of an axis share.

    Raises UsageError if there are fewer elements than ranks.
    """

    extent: int
    """Elements of the whole dimension."""
    dimension: int
    """The dimension, counted from the last one, which is -1."""
    rank: int
    """This rank's coordinate along the axis."""
    ranks: int

    def __post_init__(self) -> None:
        if self.dimension >= 0:
            raise UsageError(
                f"dimension={self.dimension}: count it from the last one, such as -3 for the depth "
                "of (samples, channels, depth, height, width)"
            )
        if self.extent < self.ranks:
            raise UsageError(
                f"dimension {self.dimension} has {self.extent} elements here, fewer than the "
                f"{self.ranks} ranks that share it: give this axis of the mesh fewer ranks, or "
                "gather the tensor before this layer, by `dlio.features.mesh.gather`"
            )

    def bounds(self, rank: int) -> Interval:
        """Return the part of a rank; parts differ by one element at most."""
        return rank * self.extent // self.ranks, (rank + 1) * self.extent // self.ranks

    @property
    def own(self) -> Interval:
        """The part of this rank."""
        return self.bounds(self.rank)

    @property
    def length(self) -> int:
        """Elements of this rank."""
        first, last = self.own
        return last - first

    def select(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the part, of samples of this shape, as `dlio.open(path, select=...)` takes it.

        Raises UsageError if the shape does not have the dimension, or in another extent.
        """
        self._check(shape, self.extent)
        parts = [slice(None)] * len(shape)
        parts[self.dimension] = slice(*self.own)
        return tuple(parts)

    def check_local(self, shape: Sequence[int]) -> None:
        """Raise UsageError unless `shape` is that of this rank's part."""
        self._check(shape, self.length)

    def _check(self, shape: Sequence[int], length: int) -> None:
        if len(shape) < -self.dimension or shape[self.dimension] != length:
            raise UsageError(
                f"a shape of {tuple(shape)} does not have {length} elements along dimension "
                f"{self.dimension}, rank {self.rank}'s part of {self.extent}: give that part"
            )


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """A layer whose output o uses the inputs from o * stride - before on, `reach` of them."""

    stride: int
    before: int
    """Elements of padding before the first input."""
    after: int
    """Elements of padding after the last input."""
    reach: int
    """Inputs from the first to the last one that an output uses: dilation * (kernel - 1) + 1."""

    def outputs(self, extent: int) -> int:
        """Outputs along a dimension of `extent` inputs; zero or less if the window does not fit."""
        return (extent + self.before + self.after - self.reach) // self.stride + 1

    def needs(self, outputs: Interval) -> Interval:
        """Return the inputs of a range of outputs; it may reach into the padding."""
        first, last = (output * self.stride - self.before for output in outputs)
        return first, last - self.stride + self.reach


def longest_dimension(shape: Sequence[int]) -> int:
    """Return the longest dimension of a sample, counted from the last; the first of equal ones."""
    if not shape:
        raise UsageError("a sample without dimensions cannot be shared by ranks")
    return max(range(len(shape)), key=lambda axis: (shape[axis], -axis)) - len(shape)
