"""Changes to a Lightning trainer that has to continue when ranks are lost.

Lightning reads the numbers of ranks and the length of an epoch once, and relies on them. They are
set again here: the rank that prints and saves at once, the length where the loader assigns the rest
of the epoch to the survivors, and the samplers of torch's loaders between two epochs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DistributedSampler

from dlio.comm import Communicator
from dlio.comm.job_nodes import find_nodes
from dlio.comm.survival.recovery import Recovery, RecoveryPart
from dlio.comm.survival.reports import Report
from dlio.loader.assignment.assigner import ElasticIterator
from dlio.loader.dataloader import DataLoader
from dlio.util.printable import log_warning

_T = TypeVar("_T")
_FOLLOWS: Final = 8
"""Beginnings and ends of steps after a loss, after which all ranks share with the survivors."""


class LightningLosses(RecoveryPart[Report]):
    """Has one entry point of Lightning's trainer survive losses. Closed by its owner.

    `holder` is Lightning's `rank_zero_only`, with the number of this rank; `reset_epoch` is
    Lightning's function that tells a loader's sampler its epoch.
    """

    def __init__(
        self,
        recovery: Recovery,
        comm: Communicator,
        trainer: Any,
        holder: Any,
        reset_epoch: Callable[[object, int], None],
    ) -> None:
        self._recovery, self._comm = recovery, comm
        self._trainer, self._holder, self._reset_epoch = trainer, holder, reset_epoch
        self._fit: Any = trainer.fit_loop
        self._planned: tuple[float, float | None] = (0, None)
        """Lightning's numbers of batches of an epoch, and until it validates, without a loss."""
        self._paced = 0.0
        """Batches of the first epoch: schedules of learning rates count on as many in each."""
        self._followed = (0, 0)
        """Number of the last recovery, and calls of `_follow` since then."""
        self._told = len(recovery.losses)
        self._begun = recovery.number
        """Number of recoveries before this epoch."""
        self._assigned_to = recovery.membership.members
        if not recovery.number:
            nodes = find_nodes(comm)
            names = [nodes.names[node] for node in nodes.node_of]
            recovery.describe(names, lambda: (trainer.current_epoch, trainer.global_step))
        recovery.register(self)
        self._pace_schedules()

    def report(self) -> Report:
        return Report()

    def reconcile(self, reports: Sequence[Report], comm: Communicator) -> None:
        self._holder.rank = comm.rank

    def close(self) -> None:
        """Take no part in later recoveries."""
        self._recovery.unregister(self)
        vars(self._fit.epoch_loop).pop("update_lr_schedulers", None)

    def together(self, act: Callable[[], _T]) -> _T:
        """Return `act()`; after a loss, when all survivors have done it. Collective."""
        result = self._recovery.uniform(act)
        self._say()
        return result

    def begin_epoch(self) -> None:
        """Have the survivors share the next epoch. Collective."""
        membership, fit = self._recovery.membership, self._fit
        self.together(self._comm.barrier)
        if self._begun != self._recovery.number and self._planned[0]:
            fit.max_batches, self._trainer.val_check_batch = self._planned
        if self._assigned_to != membership.members:
            self._assigned_to = membership.members
            self._share_torch_loaders()
        self._begun = self._recovery.number
        self._planned = fit.max_batches, self._trainer.val_check_batch
        self._paced = self._paced or fit.max_batches

    def begin_batch(self) -> None:
        """Note that the next batch has been taken, and its step begins."""
        if self._is_torn():
            self._follow()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has made its step, or skipped it."""
        self._say()
        if not self._is_torn():
            return
        was_last = self._fit.epoch_loop.batch_progress.is_last_batch
        self._follow()
        goes_on = was_last and not self._fit.epoch_loop.batch_progress.is_last_batch
        if goes_on and self._trainer.lightning_module.automatic_optimization:
            optimizer.zero_grad()  # Lightning does so only where it begins to accumulate.

    def _is_torn(self) -> bool:
        """True if a rank was lost in this epoch."""
        return self._begun != self._recovery.number

    def _follow(self) -> None:
        """Have Lightning's epoch end where the loader's does."""
        fit, fetcher = self._fit, self._fit._data_fetcher
        if self._followed[0] != self._recovery.number:
            self._followed = (self._recovery.number, 0)
        self._followed = (self._followed[0], self._followed[1] + 1)
        iterators = getattr(fit._combined_loader._iterator, "iterators", [])
        if len(iterators) != 1 or not isinstance(iterators[0], ElasticIterator):
            return
        if fetcher.length is None or self._planned[0] < len(iterators[0]):
            return  # `limit_train_batches` ends it before.
        if self._followed[1] > _FOLLOWS and fetcher.fetched + 1 < fetcher.length:
            return  # To count costs more the longer the epoch is.
        coming = iterators[0].coming()
        batches = fetcher.fetched + coming
        if self._trainer.val_check_batch == fit.max_batches:
            self._trainer.val_check_batch = batches
        fetcher.length = fit.max_batches = batches
        fetcher.done = fit.epoch_loop.batch_progress.is_last_batch = coming == 0

    def _pace_schedules(self) -> None:
        """Have no schedule of learning rates step more often than planned, which some refuse.

        Epochs may have more batches after a loss. The rate stays as it is in those.
        """
        loop: Any = self._fit.epoch_loop
        update = loop.update_lr_schedulers

        def in_plan(interval: str, **options: Any) -> None:
            beyond = self._trainer.max_steps < 0 and loop.batch_idx >= self._paced
            if interval != "step" or not beyond:
                update(interval, **options)

        loop.update_lr_schedulers = in_plan

    def _share_torch_loaders(self) -> None:
        """Have Lightning make its samplers again, for the survivors."""
        fit, validation = self._fit, self._fit.epoch_loop.val_loop
        for loop in (fit, validation):
            loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
            for loader in loaders:
                sampler = getattr(loader, "sampler", None)
                if isinstance(sampler, DistributedSampler):
                    _share_sampler(sampler, self._comm)
            if not all(map(deals_itself, loaders)):
                loop._combined_loader = None  # It is made again, from the user's loaders.
        if fit._combined_loader is None:
            fit.setup_data()
            made: Any = fit._combined_loader
            for loader in made.flattened:
                self._reset_epoch(loader, fit.epoch_progress.current.processed)

    def _say(self) -> None:
        """Say that ranks were lost; the lowest of the survivors says it."""
        losses, first = self._recovery.losses, self._told
        self._told = len(losses)
        if self._comm.rank or len(losses) == first:
            return
        for loss in losses[first:]:
            log_warning("%s", loss.sentence())
        if self._trainer.evaluating or self._trainer.sanity_checking:
            log_warning("this evaluation may lack samples of the lost rank; the next one is whole")
        loaders = self._fit._combined_loader
        if not first and loaders is not None and not all(map(deals_itself, loaders.flattened)):
            log_warning(
                "what a lost rank had left of an epoch is missing from it, as torch's loader has "
                "dealt it; a dlio.DataLoader deals it again"
            )


def deals_itself(loader: object) -> bool:
    """True for a loader of dlio's that shares its data among the ranks itself."""
    return isinstance(loader, DataLoader) and not loader.follows_sampler


def _share_sampler(sampler: "DistributedSampler[Any]", comm: Communicator) -> None:
    """Have a sampler share its data among the present ranks."""
    epoch = sampler.epoch
    DistributedSampler.__init__(
        sampler,
        sampler.dataset,
        comm.size,
        comm.rank,
        sampler.shuffle,
        sampler.seed,
        sampler.drop_last,
    )
    sampler.set_epoch(epoch)
