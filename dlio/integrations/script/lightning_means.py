"""Values that Lightning logs in a script of `dlio run`: those of whole batches.

Lightning knows of one process. It takes a value before backward, as `training_step` returns, so
that even a loss is that of the rank's part of the batch.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from dlio.comm.survival.recovery import uniform
from dlio.integrations.lightning_logs import Logged, LoggedMeans
from dlio.integrations.script.share import ScriptContext
from dlio.loader.third_party import fit_loop


def follow_lightning(context: ScriptContext) -> None:
    """Have the trainer that fits now, if there is one, log the means over the ranks' samples."""
    trainer = fit_loop.trainer()
    if trainer is None or isinstance(getattr(trainer, "_dlio_means", None), LoggedMeans):
        return

    def gather(logged: Logged) -> list[Logged]:
        context.guard.meet("the values that Lightning logs")
        return uniform(context.comm, lambda: context.comm.allgather(logged))

    def weight() -> float:
        if len({len(place) / samples for place, samples in context.places()}) > 1:
            context.say(
                "values that Lightning logs in a step on batches of several loaders are means over "
                "ranks by the samples of one of them: not quite one process's where this rank's "
                "parts of the batches differ, as in the last ones of an epoch"
            )
        return context.weight

    trainer._dlio_means = LoggedMeans(trainer, gather, weight, context.say, every_step=True)
    results = trainer.fit_loop.epoch_loop._results
    results.update_metrics = _counting(results.update_metrics, context)


def _counting(update: Callable[..., None], context: ScriptContext) -> Callable[..., None]:
    """Wrap the function that adds a value of a batch size to those of an epoch."""

    @wraps(update)
    def add(key: str, value: Any, batch_size: int) -> None:
        update(key, value, batch_size if context.counts_now else 0)

    return add
