"""Tells of gradients that are weighed by another batch than the one that they are of.

A backward has one weight on each rank. It is not right for a loss that joins batches which the
ranks share otherwise, such as the last ones of two loaders in `zip(a, b)`.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final

import torch

from dlio.exchange.batch_share import BatchShare, parts_of, share_of, tensors_of
from dlio.util.printable import log_line

_OURS: Final = ("torch", "dlio", "accelerate")
"""Packages whose lines are not the script's."""


class JoinedBatches:
    """Looks at the batches that each backward reaches.

    `weighing` returns the batch by which gradients are weighed now.
    """

    def __init__(self, weighing: Callable[[], BatchShare | None]) -> None:
        self._weighing = weighing
        self._fresh: list[BatchShare | None] = []
        """Batches that were handed out since the latest forward."""
        self._was_told = False

    def took(self, share: BatchShare | None) -> None:
        """Learn of a batch that is handed out for training."""
        if len(self._fresh) < 64:  # The script computes on none of them.
            self._fresh.append(share)

    def computed(self, module: object, args: object, options: object, output: object) -> None:
        """Follow the outputs of a model; a forward hook."""
        if self._was_told or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        share = share_of([args, options])
        # Of inputs that are made of batches, such as torch.cat([x, u]), all that may be in them.
        shares = list(self._fresh) if share is None else [share]
        self._fresh.clear()
        outputs: Iterable[Any] = tensors_of(output) if shares else ()  # register_hook has no types.
        for each in outputs:
            if each.requires_grad:
                each.register_hook(lambda _: self._reached(shares))

    def _reached(self, shares: Sequence[BatchShare | None]) -> None:
        if self._was_told:
            return
        weighing = self._weighing()
        other = next((s for s in shares if parts_of(s) != parts_of(weighing)), weighing)
        if parts_of(other) == parts_of(weighing):
            return
        self._was_told = True
        known = [each for each in (other, weighing) if each is not None]
        if known[0].rank == 0:
            log_line(
                logging.WARNING,
                "%sranks have %s samples of a batch that this backward reaches, and its gradients "
                "are weighed by another one, with %s: they are not quite one process's, as where a "
                "loss joins the last batches of two loaders, zip(a, b). Give such loaders "
                "drop_last=True, or call backward for each batch before the model computes on the "
                "next",
                _line(),
                _told(other),
                _told(weighing),
            )


def _told(share: BatchShare | None) -> str:
    return "all" if share is None else ", ".join(map(str, share.counts))


def _line() -> str:
    """Return the line of the script that calls backward, if it is in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""
