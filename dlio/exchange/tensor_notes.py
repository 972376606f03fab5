"""Notes on tensors, for as long as these live."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.utils.weak import WeakIdRef

_T = TypeVar("_T")


class TensorNotes(Generic[_T]):
    """Notes on tensors that keep none of them alive.

    Asked at each call of a module: where `WeakIdKeyDictionary` makes a reference and two hashes, in
    Python, to find that a tensor is not among its keys, this looks up a number.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[WeakIdRef, _T]] = {}
        """By `id` of a tensor, which another one may have once it is gone."""

    def get(self, tensor: torch.Tensor) -> _T | None:
        """Return the note on a tensor, None if there is none."""
        note = self._notes.get(id(tensor))
        return note[1] if note is not None and note[0]() is tensor else None

    def set(self, tensors: Iterable[torch.Tensor], note: _T) -> None:
        """Note the same on several tensors, in place of earlier notes."""
        for each in tensors:
            forget = partial(self._forget, id(each))
            self._notes[id(each)] = WeakIdRef(each, forget), note

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and self.get(tensor) is not None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the tensors."""
        for reference, _ in list(self._notes.values()):
            if (tensor := reference()) is not None:
                yield tensor

    def _forget(self, key: int, reference: object) -> None:
        note = self._notes.get(key)
        if note is not None and note[0] is reference:
            del self._notes[key]
