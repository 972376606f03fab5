"""Pruning of models that torch.compile has compiled.

A compiled graph has constant shapes, and does not call hooks that were added to layers later. So
steps in which statistics are sampled run uncompiled, and a cut has the next call compile again.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module within torch.compile's wrapper; any other module as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def without_compiler() -> AbstractContextManager[object]:
    """Context in which compiled functions run as they were written."""
    if not _is_loaded():
        return nullcontext()
    return cast("AbstractContextManager[object]", torch.compiler.set_stance("force_eager"))


def forget_graphs() -> None:
    """Have compiled functions compile again at their next call; call it before a cut.

    The guards of a graph refer to parameters, which then cannot be cut, and torch gives up
    compiling a function whose guards have failed some times.
    """
    if _is_loaded():
        torch.compiler.reset()


class EagerSteps:
    """Steps that run uncompiled, from `begin` to `end`."""

    def __init__(self) -> None:
        self._stance: AbstractContextManager[object] | None = None

    def choose(self, is_eager: bool) -> None:
        """Run uncompiled from now on, or compiled again."""
        if is_eager and self._stance is None:
            self._stance = without_compiler()
            self._stance.__enter__()
        elif not is_eager and self._stance is not None:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)


def _is_loaded() -> bool:
    """True if the compiler was imported: otherwise nothing is compiled."""
    return "torch._dynamo" in sys.modules
