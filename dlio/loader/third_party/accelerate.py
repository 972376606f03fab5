"""Hugging Face Accelerate, whose `prepare` leaves a loader alone that says it is prepared, and then
uses it like one of its own."""

import sys
from typing import Any, Protocol

import torch


class PreparedLoader(Protocol):
    """The attributes that Accelerate reads of a loader that it has prepared."""

    _is_accelerate_prepared: bool
    end_of_dataloader: bool
    remainder: int


class Registration:
    """Tells Accelerate which loader is active in a pass of so many batches, None if that is
    unknown, and when its last batch has come."""

    def __init__(self, loader: PreparedLoader, length: int | None) -> None:
        self._loader, self._length = loader, length
        self._step = 0
        self._state: Any = None
        loader.end_of_dataloader = False
        loader.remainder = -1
        module = _module_in_use(loader)
        if module is not None:
            self._state = module.GradientState()
            self._state._add_dataloader(loader)

    def step(self, ended: bool) -> None:
        """Count a batch, or the end of the pass."""
        self._step += 1
        # Accelerate synchronises gradients at the last batch, so it has to know before that batch
        # is used.
        if self._length is not None and self._step >= self._length:
            self._loader.end_of_dataloader = True
        if ended and self._state is not None:
            self._state._remove_dataloader(self._loader)
            self._state = None


def device(loader: PreparedLoader) -> torch.device | None:
    """Return the device that Accelerate wants batches on; None to leave them on the host."""
    module = _module_in_use(loader)
    if module is None:
        return None
    target: torch.device = module.PartialState().device
    return None if target.type == "cpu" else target


def _module_in_use(loader: PreparedLoader) -> Any:
    """accelerate.state, if the process uses Accelerate and this loader is prepared."""
    module = sys.modules.get("accelerate.state")
    if module is None or not loader._is_accelerate_prepared:
        return None
    # Scripts import Accelerate without using it.
    return module if module.AcceleratorState._shared_state else None
