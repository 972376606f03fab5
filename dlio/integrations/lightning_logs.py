"""Values that a LightningModule logs in its steps: means over the samples of all ranks.

Lightning reduces a value over ranks only with `sync_dist=True`; else the logger, callbacks and
checkpoints of a rank have that of its own part of the data. One process has the mean over all
samples. Ranks exchange their values at the end of an epoch, and in steps whose values are used, in
one message each. Values that some ranks alone have logged stay as they are. So do those of steps
that neither loggers nor the progress bar get, unless a subclass learns when values are read.
"""

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, TypeAlias

import torch

_STEPS: Final = frozenset(("training_step", "validation_step", "test_step"))
Logged: TypeAlias = dict[str, list[float]]
"""By key of Lightning's results: a sum or a value, and the samples that it is of."""


class LoggedMeans:
    """Makes the means for one trainer.

    Args:
        gather: returns the argument of each rank. Collective.
        weight: the number of this rank's samples in the latest batch, up to a factor.
        say: tells the user something, once.
    """

    def __init__(
        self,
        trainer: Any,
        gather: Callable[[Logged], list[Logged]],
        weight: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._gather, self._weight, self._say = trainer, gather, weight, say
        connector, progress = trainer._logger_connector, trainer.fit_loop.epoch_loop.batch_progress
        # The first calls of Lightning's once an epoch, or the batch of a step, is over.
        self._wrapped = (
            (connector, "epoch_end_reached", self._end_epoch),
            (progress, "increment_processed", self._end_step),
        )
        for owner, name, before in self._wrapped:
            setattr(owner, name, _after(before, getattr(owner, name)))

    def close(self) -> None:
        for owner, name, _ in self._wrapped:
            vars(owner).pop(name, None)

    def _end_epoch(self) -> None:
        """Set the epoch's values. Collective."""
        logged = {
            key: each
            for key, each in self._own(self._trainer._results).items()
            if each.meta.on_epoch and each._computed is None
        }
        theirs = self._gather({key: [float(e.value), _samples(e)] for key, e in logged.items()})
        for key, each in logged.items():
            parts = [rank[key] for rank in theirs if key in rank]
            differ = _are_others(parts, len(theirs))
            if each.meta.is_sum_reduction and (differ or self._is_divided()):
                self._say(
                    f"{each.meta.name!r}, which is logged with reduce_fx='sum', is the sum over "
                    "rank 0's parts of the batches: a sum of counts is a part of one process's, "
                    "one of means is about that"
                )
            elif differ:
                each._computed = torch.full_like(each.value, _joined(each.meta, parts))

    def _end_step(self) -> None:
        """Set the values of a step that loggers are about to get. Collective."""
        fit, every = self._trainer.fit_loop, self._trainer.log_every_n_steps
        # Ranks may have loggers, and the wish to stop, each of its own: they decide nothing here.
        is_logged = every and (fit.epoch_loop._batches_that_stepped + 1) % every == 0
        own = self._own(self._trainer._results)
        if is_logged or any(each.meta.prog_bar for each in own.values()):
            weight = self._weight()
            self._share([(key, each, weight) for key, each in own.items()])

    def _share(self, logged: Iterable[tuple[str, Any, float]]) -> None:
        """Set values of steps, each of which is given with its key and its weight. Collective."""
        own = [
            (key, each, weight)
            for key, each, weight in logged
            if each.meta.on_step and each._forward_cache is not None
            if not each.meta.is_sum_reduction
        ]
        theirs = self._gather({key: _part(each, weight) for key, each, weight in own})
        for key, each, _ in own:
            parts = [rank[key] for rank in theirs if key in rank]
            if _are_others(parts, len(theirs)):
                mean = _joined(each.meta, parts)
                each._forward_cache = torch.full_like(each._forward_cache, mean)

    def _is_divided(self) -> bool:
        """True if ranks have parts of the batches; else they may have whole ones, in validation."""
        return bool(self._trainer.training or self._trainer.world_size > 1)

    @staticmethod
    def _own(results: Any) -> dict[str, Any]:
        """Return the values of steps that each rank has of its own, by their keys."""
        return {
            key: each
            for key, each in ([] if results is None else results.valid_items())
            if each.is_tensor
            and each.meta.fx.partition(".")[0] in _STEPS
            and not (each.meta.sync.should or each.meta.sync.rank_zero_only)
        }


def _after(before: Callable[[], None], original: Callable[[], None]) -> Callable[[], None]:
    @wraps(original)
    def call() -> None:
        before()
        original()

    return call


def _part(logged: Any, weight: float) -> list[float]:
    """Return a value of a step, times its weight, and its weight."""
    value = float(logged._forward_cache)
    if not logged.meta.is_mean_reduction:
        return [value, weight]
    return [value * weight if weight else 0.0, weight]  # That of a sample of weight 0 may be NaN.


def _are_others(parts: list[list[float]], ranks: int) -> bool:
    """True if all ranks have logged a value, and not all the same one."""
    return len(parts) == ranks and any(each != parts[0] for each in parts)


def _samples(logged: Any) -> float:
    return float(logged.cumulated_batch_size) if logged.meta.is_mean_reduction else 1.0


def _joined(meta: Any, parts: list[list[float]]) -> float:
    """Return a value of all ranks."""
    if meta.is_max_reduction or meta.is_min_reduction:
        extreme = max if meta.is_max_reduction else min
        return extreme(value for value, _ in parts)
    samples = sum(weight for _, weight in parts)
    return sum(value for value, _ in parts) / samples if samples else math.nan
