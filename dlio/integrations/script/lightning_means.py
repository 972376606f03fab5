"""Values that Lightning logs in a script of `dlio run`: those of whole batches.

Lightning knows of one process, and so do torchmetrics. It takes a value before backward, as
`training_step` returns, so that even a loss is that of the rank's part of the batch. Ranks exchange
values as they are read, by loggers in some steps only: all ranks run the same callbacks.
"""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from dlio.comm.survival.recovery import uniform
from dlio.integrations.lightning_logs import Logged, LoggedMeans
from dlio.integrations.rank_metrics import count_over_ranks, gathered
from dlio.integrations.script.share import ScriptContext
from dlio.loader.third_party import fit_loop

_BAR: Final = ""
"""Key of a message that says whether the rank has values for the progress bar."""


def follow_lightning(context: ScriptContext) -> None:
    """Have the trainer that fits now, if there is one, log the means over the ranks' samples."""
    trainer = fit_loop.trainer()
    if trainer is None:
        return
    if not isinstance(getattr(trainer, "_dlio_means", None), _ScriptMeans):
        trainer._dlio_means = _ScriptMeans(trainer, context)

    def gather(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        context.guard.meet("the value of a metric")
        return gathered(tensor, group)

    count_over_ranks(
        trainer.lightning_module,
        gather,
        divides=lambda: context.divides_now,
        counts=lambda: context.counts_now,
        is_first=lambda: context.comm.rank == 0,
    )


class _ScriptMeans(LoggedMeans):
    """Makes the means of steps when they are read."""

    def __init__(self, trainer: Any, context: ScriptContext) -> None:
        super().__init__(trainer, self._gathered, self._weight_now, context.say)
        self._context = context
        self._fresh: list[str] = []
        """Keys of the values that the present step has logged."""
        self._unread: dict[str, float] = {}
        """Keys of values of steps that ranks have of their own, and their weights."""
        self._is_unread = False
        """True if a step is over since values were read; keys may be other ones on each rank."""
        self._has_bar = True
        """True if some rank may have a value for the progress bar."""
        epoch_loop = trainer.fit_loop.epoch_loop
        results, connector = epoch_loop._results, trainer._logger_connector
        self._results, self._connector = results, connector
        results.update_metrics = self._adding(results.update_metrics)
        self._read = results.metrics
        results.metrics = self._metrics
        # It reads the values of each step, for whoever reads them later on.
        connector.on_batch_end = self._end_batch
        run = epoch_loop.val_loop.run

        @wraps(run)
        def validate() -> Any:
            self._keep_read()
            return run()

        epoch_loop.val_loop.run = validate

    def _gathered(self, logged: Logged) -> list[Logged]:
        context, own = self._context, self._own(self._results).values()
        context.guard.meet("the values that Lightning logs")
        mine = {**logged, _BAR: [float(any(each.meta.prog_bar for each in own))]}
        theirs = uniform(context.comm, lambda: context.comm.allgather(mine))
        self._has_bar = any(each.pop(_BAR)[0] for each in theirs)
        return theirs

    def _weight_now(self) -> float:
        if len({len(place) / samples for place, samples in self._context.places()}) > 1:
            self._context.say(
                "values that Lightning logs in a step on batches of several loaders are means over "
                "ranks by the samples of one of them: not quite one process's where this rank's "
                "parts of the batches differ, as in the last ones of an epoch"
            )
        return self._context.weight

    def _adding(self, update: Callable[..., None]) -> Callable[..., None]:
        """Wrap the function that adds a value of a batch size to those of an epoch."""

        @wraps(update)
        def add(key: str, value: Any, batch_size: int) -> None:
            update(key, value, batch_size if self._context.counts_now else 0)
            self._fresh.append(key)

        return add

    def _end_step(self) -> None:
        if self._fresh:
            self._unread |= dict.fromkeys(self._fresh, self._weight_now())
            self._fresh.clear()
        self._is_unread = True

    def _end_batch(self) -> None:
        results = self._trainer._results
        results.batch = results.batch_size = None

    def _end_epoch(self) -> None:
        if self._trainer._results is self._results:
            self._keep_read()
        super()._end_epoch()

    def _keep_read(self) -> None:
        """Read the latest values of steps, which callbacks see until there are others."""
        read, connector = self._metrics(True), self._connector
        connector._progress_bar_metrics.update(read["pbar"])
        connector._callback_metrics.update(read["callback"])
        connector._logged_metrics.update(read["log"])

    def _metrics(self, on_step: bool) -> Any:
        # Other threads, and what is done about an error, are a rank's own.
        is_own = threading.current_thread() is not threading.main_thread() or sys.exc_info()[0]
        if on_step and self._is_unread and not is_own and (self._has_bar or not _is_for_bar()):
            own, unread = self._own(self._results), self._unread
            self._is_unread, self._unread = False, {}
            self._share([(key, own[key], unread[key]) for key in unread if key in own])
        return self._read(on_step)


def _is_for_bar() -> bool:
    """True if the caller's caller reads values for the progress bar."""
    # Through the connector's property of all values.
    return sys._getframe(3).f_code.co_name == "progress_bar_metrics"
