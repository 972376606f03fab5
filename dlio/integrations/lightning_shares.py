"""Batches of unequal ranks in Lightning: whose samples they are, and how logged values count.

A rank that an epoch's last batch does not reach runs the step on samples of others, as logged
values and metrics may be reduced over ranks in it. Its own values then count nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torchmetrics import Metric

from dlio.exchange.batch_share import BatchShare, mark, share_of
from dlio.integrations.rank_metrics import put_back, state_of
from dlio.loader.dataloader import DataLoader
from dlio.plan.schedule import steps_in_epoch

_NEUTRAL: Final[dict[object, float]] = {
    "max": -float("inf"),
    torch.max: -float("inf"),
    "min": float("inf"),
    torch.min: float("inf"),
}
"""By reduction, the value that changes no other; 0 for means and sums."""


class SharedBatches:
    """The batch that Lightning's next step is of."""

    def __init__(self) -> None:
        self.share: BatchShare | None = None
        """None for a batch of a loader whose ranks count alike."""
        self._latest: BatchShare | None = None

    def wants_repeats(self) -> bool:
        """True: ranks run all steps together, in evaluation, too."""
        return True

    def took(self, share: BatchShare | None) -> None:
        """Learn of the batch that is handed out."""
        self._latest = share

    def moves(self, batch: object, moved: object) -> None:
        """Learn that a batch is moved to the device, which Lightning does before its step."""
        share, self._latest = share_of(batch) or self._latest, None
        self.share = share
        if share is not None:
            mark(share, moved)


def count_batches(fit_loop: Any) -> None:
    """Have Lightning count an epoch that is resumed in the middle in batches of this number of
    ranks: it goes by their number, and would end the epoch too early or too late."""
    combined = fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    progress = fit_loop.epoch_loop.batch_progress
    loader = loaders[0] if len(loaders) == 1 else None
    if not isinstance(loader, DataLoader) or not loader.follows_formula():
        return
    loop = fit_loop.epoch_loop
    state = loader.state_dict()
    position, samples = int(state["position"]), int(state["samples"])
    if not loop.restarting or not position or "again" in state:
        return
    left = steps_in_epoch(samples, position, loader.global_batch, bool(loader.drop_last))
    done = progress.current.ready = progress.current.started = len(loader) - left
    progress.current.processed = done
    # A checkpoint of the end of a batch: Lightning completes it when it goes on.
    progress.current.completed = done - int(loop.restarted_on_train_batch_end)


@contextlib.contextmanager
def uncounted(module: Any) -> Iterator[None]:
    """Have a LightningModule log values of weight 0 inside the `with` block, and put its metrics
    back as they were."""
    log = module.log
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    before = [state_of(each) for each in metrics]
    module.log = _without_samples(log)
    try:
        yield
    finally:
        del module.log
        for metric, state in zip(metrics, before, strict=True):
            put_back(metric, state)


def _without_samples(log: Callable[..., None]) -> Callable[..., None]:
    def logged(name: str, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, Metric):
            neutral = _NEUTRAL.get(options.get("reduce_fx", "mean"), 0.0)
            value = torch.full_like(torch.as_tensor(value, dtype=torch.float32), neutral)
        log(name, value, *args, **{**options, "batch_size": 0})

    return logged
