"""Modes of the thread that begins a pass, for its threads: worker processes get them by a fork."""

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import torch

_KINDS: Final = ("cpu", "cuda")


class CallerModes:
    """The calling thread's context variables (those of numpy's `errstate` and of `decimal` among
    them), whether torch records gradients, and its autocast types.

    In `torch.inference_mode()` threads record no gradients either. Their tensors are ordinary ones:
    a batch that is made ahead may be used after the mode has ended.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._gradients = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in _KINDS
            if torch.is_autocast_enabled(kind)
        ]

    def within(self, run: Callable[[int], object]) -> Callable[[int], None]:
        """Return a function for threads, which calls `run` in these modes with its number."""

        def in_modes(number: int) -> None:
            with ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(self._gradients))
                for kind, dtype in self._autocast:
                    modes.enter_context(torch.autocast(kind, dtype))
                run(number)

        return lambda number: self._context.copy().run(in_modes, number)
