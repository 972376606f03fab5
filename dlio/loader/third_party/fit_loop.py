"""Lightning's fit loop around a loader: where it resumes, and the batches that it fetches ahead.

Lightning (2.6.6) does not load the state of a loader whose epoch was over. It takes a loader's
first iterator for the next epoch, although the last batch of the old one had been handed out. Of
loaders without a length it fetches a batch ahead, which their state counts as trained on. It tells
a loader nothing of this, so its loop is looked up among the callers.
"""

import sys
from types import FrameType
from typing import Any, Final, Protocol

from dlio.loader.contract import StatefulObject

_MODULES: Final = "lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop"
_DEPTH: Final = 30
"""Calls between a loop and a loader."""


class _Resumable(Protocol):
    def load_state_dict(self, state_dict: Any, /) -> object: ...


def fits() -> bool:
    """True if Lightning begins a pass to train on."""
    return _loop("setup_data", "advance") is not None


def trainer() -> Any | None:
    """Return the trainer that fits a module now; None if there is none."""
    return getattr(_loop("run"), "trainer", None)


def resumes(loader: _Resumable) -> bool:
    """True if Lightning begins the pass with which a training resumes. A state of the loader that
    Lightning has not loaded is loaded."""
    loop = _loop("setup_data")
    if loop is None or not getattr(loop, "is_resuming", False):
        return False
    states = getattr(loop, "_combined_loader_states_to_load", ())
    loaders = [each for each in loop._combined_loader.flattened if isinstance(each, StatefulObject)]
    if len(states) == len(loaders):
        for each, state in zip(loaders, states, strict=True):
            if each is loader:
                loader.load_state_dict(state)
    return True


def fetched_ahead() -> int:
    """Batches that Lightning has fetched and not trained on, if it asks for a state."""
    fetcher = getattr(_loop("on_save_checkpoint"), "_data_fetcher", None)
    return len(getattr(fetcher, "batches", ()))


def _loop(*calls: str) -> Any | None:
    """Return Lightning's fit loop if one of its methods is among the callers."""
    if not any(name in sys.modules for name in _MODULES):
        return None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            break
        if frame.f_code.co_name in calls and frame.f_globals.get("__name__") in _MODULES:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
