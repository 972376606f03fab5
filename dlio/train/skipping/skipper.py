"""Skipping samples whose loss has stayed low: for a loop over a `dlio.DataLoader`."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator
from dlio.comm.data_ranks import communicator
from dlio.errors import UsageError
from dlio.loader.dataloader import DataLoader
from dlio.plan.sample_mask import SampleMask
from dlio.train.skipping.rule import (
    CERTAIN,
    EASY,
    SHARE,
    UNKNOWN,
    SkipRule,
    chance_of,
    chances,
    encoded,
    kept_of,
    remembered,
)

_BATCHES: Final = 64
"""Whose losses wait on the device before they are looked at."""


class SampleSkipper:
    """Chooses each epoch's samples by their losses, and tells how much each one counts.

        skipper = dlio.SampleSkipper(loader, epochs)
        for epoch in range(epochs):
            skipper.begin(epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr(epoch) * skipper.lr_factor
            for images, labels in loader:
                losses = cross_entropy(model(images), labels, reduction="none")
                skipper.weigh(losses).mean().backward()
                ...

    Samples that are skipped are in no plan of the loader's: they are neither read, moved, decoded
    nor computed. Each kept one is consumed exactly once. The first epoch and the last see all.

    Once an epoch all ranks sum one array of a byte a sample, and one of 256 numbers. Memory: two
    bytes and a bit a sample.

    Args:
        loader: whose order is dlio's own. Its `set_epoch` is called by `begin`.
        epochs: of the whole run.
        share: of the samples that an epoch skips at most.
        seed: of the draws.
        easy, floor, revisit, first, last: as `dlio.train.skipping.rule.SkipRule` tells them.

    Made on all ranks that share the data together; so are `begin` and `close`.
    """

    def __init__(
        self,
        loader: DataLoader,
        epochs: int,
        share: float = SHARE,
        *,
        seed: int = 0,
        easy: float = EASY,
        floor: float = 0.2,
        revisit: int = 8,
        first: int = 1,
        last: int | None = None,
    ) -> None:
        if not loader.follows_formula():
            raise UsageError(
                "samples can be skipped where the order is dlio's own: give the loader seed=, and "
                "no sampler"
            )
        self.rule = SkipRule(epochs, share, floor, easy, revisit, first, last)
        self._loader, self._seed = loader, seed
        self.total = len(loader.dataset)  # type: ignore[arg-type]
        """Samples in the data set."""
        self._comm: Communicator = communicator(loader.group, loader.mesh)
        self._scores = np.zeros(self.total, np.uint8)
        # Summed eight at a time: of a sample one rank has a code, so that no sum carries over.
        self._sums = np.zeros(-(-self.total // 8), np.int64)
        self._seen: npt.NDArray[np.uint8] = self._sums.view(np.uint8)[: self.total]
        self._table = np.full(256, CERTAIN, np.int64)
        self._waiting: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []
        self._epoch = -1
        self.kept: SampleMask | None = None
        """Samples of the epoch; None for all."""

    @property
    def samples(self) -> int:
        """Samples of the epoch, over all ranks."""
        return self.total if self.kept is None else self.kept.count

    @property
    def skip_share(self) -> float:
        """Share of the data set that the epoch skips."""
        return 1 - self.samples / self.total

    @property
    def lr_factor(self) -> float:
        """What to multiply the epoch's learning rate by: samples of the data set over kept ones.

        A kept sample stands for as many, so that a step is one of a batch larger by as much, and an
        epoch of fewer steps goes as far as one of all samples. (Weights 1/q that are not brought
        to a mean of 1, as InfoBatch's, have the same effect with SGD, and none with Adam.)
        """
        return self.total / max(1, self.samples)

    def close(self) -> None:
        self._comm.close()

    def begin(self, epoch: int) -> None:
        """Choose an epoch's samples, and tell the loader. Collective.

        After `load_state` in the middle of an epoch that one's samples are the same again.
        """
        if epoch != self._epoch:
            self._gather()
            self._table = self._agreed(epoch)
            self._epoch = epoch
            self._choose()
        self._loader.set_epoch(epoch, self.kept)

    def weigh(
        self, losses: torch.Tensor, samples: npt.NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """The losses times what they count: what is to be averaged. Remembers the losses.

        Their mean over an epoch's steps is expected to be that over all samples of the data set.

        Args:
            losses: of each sample; shape (n,).
            samples: by default those of the loader's last batch; shape (n,).

        Raises UsageError for losses of another shape.
        """
        ids = self._loader.last_samples if samples is None else samples
        if not len(ids) and losses.numel():
            raise UsageError(
                "the loader does not tell the samples of its batches: give it num_workers=1 or more"
            )
        if losses.shape != ids.shape:
            raise UsageError(
                f"losses of shape {tuple(losses.shape)} for {len(ids)} samples: give one for each, "
                "as torch's losses are with reduction='none'"
            )
        self.record(losses, ids)
        return losses * self.weights(ids).to(losses.device, non_blocking=True)

    def record(self, losses: torch.Tensor, samples: npt.NDArray[np.int64]) -> None:
        """Remember losses, both of shape (n,)."""
        self._waiting.append((samples, losses.detach()))
        if len(self._waiting) >= _BATCHES:
            self._look()

    def weights(self, samples: npt.NDArray[np.int64]) -> torch.Tensor:
        """What each of the epoch's samples counts: 1 over its chance, and 1 on average over the
        epoch; float32, shape (n,)."""
        if self.kept is None:
            return torch.ones(len(samples))
        args = (self._table, self._seed, self._epoch, self.rule.revisit)
        chance = chance_of(samples, self._scores[samples], *args)
        weights = CERTAIN / chance * (self.kept.count / self.total)
        return torch.from_numpy(weights.astype(np.float32))

    def state(self) -> dict[str, torch.Tensor]:
        """`seen` is this rank's, the rest is the same on all ranks."""
        self._look()
        return {
            "scores": torch.from_numpy(self._scores),
            "table": torch.from_numpy(self._table),
            "epoch": torch.tensor([self._epoch]),
            "seen": torch.from_numpy(self._seen),
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`, on any number of ranks: what several had `seen` is to be summed.

        Raises UsageError where it is of another data set.
        """
        if state["scores"].shape != self._scores.shape:
            raise UsageError(
                f"losses of {len(state['scores'])} samples, this data set has {self.total}"
            )
        self._waiting.clear()
        self._scores[:] = state["scores"].numpy()
        self._table = state["table"].numpy().copy()
        self._seen[:] = state["seen"].numpy()
        self._epoch = int(state["epoch"][0])
        self._choose()

    def _look(self) -> None:
        """Take down the losses that wait."""
        if self._waiting:
            losses = torch.cat([each for _, each in self._waiting]).float().cpu().numpy()
            self._seen[np.concatenate([ids for ids, _ in self._waiting])] = encoded(losses)
            self._waiting.clear()

    def _gather(self) -> None:
        """What all ranks saw, into what is remembered. Collective."""
        self._look()
        self._comm.wait([self._comm.iallreduce(self._sums)], "the samples' losses")
        self._scores = remembered(self._scores, self._seen)
        self._sums[:] = UNKNOWN

    def _agreed(self, epoch: int) -> npt.NDArray[np.int64]:
        """The chances by code: those that rank 0 computes. Collective."""
        if self.rule.sees_all(epoch):
            return np.full(256, CERTAIN, np.int64)
        table = np.zeros(256, np.int64)
        if self._comm.rank == 0:
            table += chances(np.bincount(self._scores, minlength=256), self.rule)
        self._comm.wait([self._comm.iallreduce(table)], "the samples' chances")
        return table

    def _choose(self) -> None:
        self.kept = None
        if (self._table < CERTAIN).any():
            args = (self._table, self._seed, self._epoch, self.rule.revisit)
            kept = kept_of(self._scores, *args)
            self.kept = kept if kept.count < self.total else None
