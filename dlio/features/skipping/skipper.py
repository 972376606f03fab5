"""Skip samples whose loss has stayed low, in a training loop over a `dlio.DataLoader`."""

from collections.abc import Mapping, Sized
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator
from dlio.comm.data_ranks import communicator
from dlio.comm.survival.recovery import uniform
from dlio.errors import UsageError
from dlio.features.skipping.skip_rule import (
    CERTAIN,
    EASY,
    SHARE,
    UNKNOWN,
    Codes,
    SkipRule,
    Table,
    encode_losses,
    keep_probabilities,
    probability_table,
    sample_mask,
    update_codes,
)
from dlio.loader.dataloader import DataLoader
from dlio.plan.sample_mask import SampleMask
from dlio.util.units import counted

_BATCHES: Final = 64
"""Batches whose losses stay on the device until they are copied together."""


class SampleSkipper:
    """Choose each epoch's samples by their past losses, and weight them accordingly.

        skipper = dlio.SampleSkipper(loader, epochs)
        for epoch in range(epochs):
            skipper.begin(epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr(epoch) * skipper.lr_factor
            for images, labels in loader:
                losses = cross_entropy(model(images), labels, reduction="none")
                skipper.weigh(losses).mean().backward()
                ...

    Skipped samples are neither read, moved, decoded nor computed. Each kept sample is consumed
    exactly once per epoch. The first and the last epochs use all samples. `skip_rule` explains
    the rule and gives the papers.

    Communication: once per epoch, all ranks sum an array of one byte per sample and one of 256
    integers. Memory: two bytes and one bit per sample.

    The constructor, `begin` and `close` are collective over the ranks that share the data.

    Args:
        loader: a loader with dlio's own order. `begin` calls its `set_epoch`.
        epochs: epochs of the whole run.
        share: largest share of samples that an epoch skips; above 0, up to 0.6.
        seed: seeds the choice of samples; equal on all ranks.
        easy, floor, revisit, first, last: see `dlio.features.skipping.skip_rule.SkipRule`.

    Raises UsageError for a loader with a sampler or without a seed, and for values out of range.
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
                "skipping samples needs dlio's own order: give the loader seed=, and no sampler"
            )
        self.rule = SkipRule(epochs, share, floor, easy, revisit, first, last)
        self._loader, self._seed = loader, seed
        self.total = len(cast(Sized, loader.dataset))
        """Samples in the data set."""
        self._comm: Communicator = communicator(loader.group, loader.mesh)
        self._scores = np.zeros(self.total, np.uint8)
        # Eight one-byte codes are summed as one integer. Only one rank has a code for each sample,
        # so that no byte overflows into the next.
        self._sums = np.zeros(-(-self.total // 8), np.int64)
        self._seen: npt.NDArray[np.uint8] = self._sums.view(np.uint8)[: self.total]
        self._table = np.full(256, CERTAIN, np.int64)
        self._waiting: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []
        self._epoch = -1
        self.sample_mask: SampleMask | None = None
        """Samples of the epoch; None for all."""

    @property
    def samples(self) -> int:
        """Number of samples of the epoch, over all ranks."""
        return self.total if self.sample_mask is None else self.sample_mask.count

    @property
    def skip_share(self) -> float:
        """Fraction of the data set that the epoch skips."""
        return 1 - self.samples / self.total

    @property
    def lr_factor(self) -> float:
        """Factor for the epoch's learning rate: samples of the data set over samples kept.

        A kept sample stands for this many samples on average, and a step for a batch larger by this
        factor. With the larger learning rate, an epoch of fewer steps makes as much progress as one
        of all samples. (InfoBatch does not normalise its weights 1/q to a mean of 1, which has the
        same effect with SGD, and none with Adam.)
        """
        return self.total / max(1, self.samples)

    def close(self) -> None:
        """Close the communicator. Collective."""
        self._comm.close()

    def begin(self, epoch: int) -> None:
        """Choose an epoch's samples and pass them to the loader. Collective.

        After `load_state` in the middle of an epoch, the choice for that epoch is the same again.
        """
        if epoch != self._epoch:
            self._look()
            # If a rank is lost meanwhile, all do this again, without the losses that it knew.
            self._scores, self._table = uniform(self._comm, lambda: self._agreed(epoch))
            self._sums[:] = UNKNOWN
            self._epoch = epoch
            self._choose()
        self._loader.set_epoch(epoch, self.sample_mask)

    def weigh(
        self, losses: torch.Tensor, samples: npt.NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """Record the losses, and return them times their weights; shape (n,).

        In expectation, the mean of the result over an epoch equals the mean loss over all samples
        of the data set.

        Args:
            losses: loss of each sample; shape (n,).
            samples: sample indices, by default those of the loader's last batch; shape (n,).

        Raises UsageError if the shapes differ.
        """
        ids = self._loader.last_samples if samples is None else samples
        if not len(ids) and losses.numel():
            raise UsageError(
                "the loader does not report the samples of its batches: give it num_workers=1 or "
                "more"
            )
        if losses.shape != ids.shape:
            raise UsageError(
                f"losses of shape {tuple(losses.shape)} for {counted(len(ids), 'sample')}: give "
                "one loss per sample, as torch's losses with reduction='none'"
            )
        self.record(losses, ids)
        return losses * self.weights(ids).to(losses.device, non_blocking=True)

    def record(self, losses: torch.Tensor, samples: npt.NDArray[np.int64]) -> None:
        """Record the losses of some samples; both of shape (n,)."""
        self._waiting.append((samples, losses.detach()))
        if len(self._waiting) >= _BATCHES:
            self._look()

    def weights(self, samples: npt.NDArray[np.int64]) -> torch.Tensor:
        """Weights of some samples of this epoch: proportional to 1/q, with mean 1 over the epoch.

        Args:
            samples: sample indices; shape (n,).

        Returns float32 (n,), on the CPU.
        """
        if self.sample_mask is None:
            return torch.ones(len(samples))
        args = (self._table, self._seed, self._epoch, self.rule.revisit)
        probabilities = keep_probabilities(samples, self._scores[samples], *args)
        weights = CERTAIN / probabilities * (self.sample_mask.count / self.total)
        return torch.from_numpy(weights.astype(np.float32))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state as tensors; `seen` is this rank's, the others are equal on all ranks."""
        self._look()
        return {
            "scores": torch.from_numpy(self._scores),
            "table": torch.from_numpy(self._table),
            "epoch": torch.tensor([self._epoch]),
            "seen": torch.from_numpy(self._seen),
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state`, on any number of ranks.

        If this rank takes over from several saved ranks, their `seen` has to be summed.

        Raises UsageError if the state belongs to a data set of another size.
        """
        if state["scores"].shape != self._scores.shape:
            raise UsageError(
                f"the state has losses of {counted(len(state['scores']), 'sample')}, this data set "
                f"has {self.total}: load it with the data set that it was saved with"
            )
        self._waiting.clear()
        self._scores[:] = state["scores"].numpy()
        self._table = state["table"].numpy().copy()
        self._seen[:] = state["seen"].numpy()
        self._epoch = int(state["epoch"][0])
        self._choose()

    def _look(self) -> None:
        """Copy waiting losses from the device and encode them."""
        if self._waiting:
            losses = torch.cat([each for _, each in self._waiting]).float().cpu().numpy()
            ids = np.concatenate([samples for samples, _ in self._waiting])
            self._seen[ids] = encode_losses(losses)
            self._waiting.clear()

    def _agreed(self, epoch: int) -> tuple[Codes, Table]:
        """Return (the codes that all ranks recorded merged into the stored ones, the probabilities
        by code, computed on rank 0). Collective; changes nothing."""
        sums = self._sums.copy()
        self._comm.wait([self._comm.iallreduce(sums)], "the samples' losses")
        scores = update_codes(self._scores, sums.view(np.uint8)[: self.total])
        if self.rule.sees_all(epoch):
            return scores, np.full(256, CERTAIN, np.int64)
        table = np.zeros(256, np.int64)
        if self._comm.rank == 0:
            table += probability_table(np.bincount(scores, minlength=256), self.rule)
        self._comm.wait([self._comm.iallreduce(table)], "the samples' probabilities")
        return scores, table

    def _choose(self) -> None:
        self.sample_mask = None
        if (self._table < CERTAIN).any():
            args = (self._table, self._seed, self._epoch, self.rule.revisit)
            mask = sample_mask(self._scores, *args)
            self.sample_mask = mask if mask.count < self.total else None
