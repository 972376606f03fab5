"""Types of torch's loader contract, which leaves them open.

torch asks nothing of the type of a sample, an index or a batch: a data set returns any object, a
sampler yields any index, a collate function turns a list of samples into any batch. These aliases
name those places; `Any` stands in no other public signature of the loader.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, runtime_checkable

from torch.utils.data import Sampler

UserDataset = Any
"""A map-style data set (`[i]`, `len`) or an IterableDataset; plain lists and dictionaries too."""
Sample = Any
"""An object that a data set returns for an index."""
BatchData = Any
"""An object that a collate function returns: tensors in any nesting of lists and dictionaries."""
Index = Any
"""An index that a sampler yields: a whole number for most data sets, a key for some."""
Indices = Sampler[Any] | Iterable[Any]
"""A sampler of single indices."""
IndexBatches = Sampler[list[Any]] | Iterable[list[Any]]
"""A sampler of lists of indices."""
CollateFn = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""
DecodePlace = Literal["cpu", "device"]
"""Decoder of images: the loader's threads, or the loader's device."""
Transform = Callable[[Any], Any]
"""A user's function of a sample, or of a part of it."""
State = dict[str, Any]
"""The state dict of a loader: whole numbers and text, and the state of a sampler that has one."""


class ScalarWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that a loader uses."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Record one figure of an epoch."""


# By methods and not by torchdata's class, which need not be installed; torchdata does the same.
@runtime_checkable
class StatefulObject(Protocol):
    """A data set, an iterator or a sampler that saves and restores its own state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...
