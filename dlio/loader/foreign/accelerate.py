"""Hugging Face Accelerate: its `prepare` leaves a loader alone that says it is prepared, and then
expects of it what its own loaders do."""

import sys
from typing import Any

import torch


class _Registration:
    """Tells Accelerate which loader is active, and when its last batch has come."""

    def __init__(self, loader: Any, length: int | None, state: Any) -> None:
        self._loader, self._length, self._state = loader, length, state
        self._step = 0
        loader.end_of_dataloader = False
        loader.remainder = -1
        if state is not None:
            state._add_dataloader(loader)

    def step(self, ended: bool) -> None:
        self._step += 1
        if self._length is not None and self._step >= self._length:
            self._loader.end_of_dataloader = True
        if ended and self._state is not None:
            self._state._remove_dataloader(self._loader)
            self._state = None


def registered(loader: Any, length: int | None) -> _Registration:
    """The registration of a pass of `loader`, of `length` batches."""
    state = None
    module = sys.modules.get("accelerate.state")
    if module is not None and loader._is_accelerate_prepared and _in_use(module):
        state = module.GradientState()
    return _Registration(loader, length, state)


def device(loader: Any) -> torch.device | None:
    """Where Accelerate wants batches; None when it is not in use."""
    module = sys.modules.get("accelerate.state")
    if module is None or not loader._is_accelerate_prepared or not _in_use(module):
        return None
    target = module.PartialState().device
    return None if target.type == "cpu" else target


def _in_use(module: Any) -> bool:
    return bool(module.AcceleratorState._shared_state)
