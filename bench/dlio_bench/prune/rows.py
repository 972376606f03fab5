"""`--case rows`: a wide perceptron that skips rows that it has learnt."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

import dlio
from dlio_bench.prune.curves import TrainingCurve
from dlio_bench.prune.prune_options import PruneBenchOptions
from dlio_bench.prune.tabular import (
    BATCH,
    by_seed,
    make_task,
    perceptron,
    pruned_by,
    train,
)

_ROWS: Final = 400_000
"""So many that a network of this width hardly overfits: else it is best before any row is easy."""
_WIDTH: Final = 128
_EPOCHS: Final = 10
_SKIPPING_EPOCHS: Final = 12
"""Epochs of trainings that leave rows out: they spend a part of the saved time on more epochs."""


def measure(options: PruneBenchOptions) -> dict[str, object]:
    """By seed, one after another on one thread, rows from a file through `dlio.DataLoader`: with
    all of them, with samples left out, with neurons removed as well; and, with all samples, of as
    many whole epochs as those that leave some out train on samples."""
    return by_seed(options, _variants, _WIDTH, _EPOCHS)


class _RowReading:
    """Rows of a file; with `epochs` those that a SampleSkipper keeps in a run of so many."""

    def __init__(self, path: str, seed: int, epochs: int | None) -> None:
        self._loader = dlio.DataLoader(dlio.open(path), BATCH, shuffle=True, seed=seed)
        self._skipper = (
            None if epochs is None else dlio.SampleSkipper(self._loader, epochs, seed=seed)
        )
        self.extra = {"read_MB": 0.0, "trained_on": 0.0}

    def __enter__(self) -> "_RowReading":
        return self

    def __exit__(self, *_: object) -> None:
        if self._skipper is not None:
            self._skipper.close()
        self._loader.close()

    def epoch(self, number: int) -> tuple[int, Iterable[tuple[torch.Tensor, torch.Tensor]]]:
        if self._skipper is None:
            self._loader.set_epoch(number)
        else:
            self._skipper.begin(number)
        return len(self._loader), self._batches()

    def _batches(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self._loader:
            yield batch["rows"], batch["labels"]
        statistics = self._loader.stats()
        self.extra["read_MB"] += sum(statistics["bytes"].values()) / 1e6
        self.extra["trained_on"] += statistics["samples"]

    @property
    def lr_factor(self) -> float:
        return 1.0 if self._skipper is None else self._skipper.lr_factor

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        return losses if self._skipper is None else self._skipper.weigh(losses)


def _variants(
    seed: int, widths: Sequence[int], epochs: int, options: PruneBenchOptions
) -> dict[str, TrainingCurve]:
    task = make_task(seed, options.rows or _ROWS)
    more = options.longer(epochs, _SKIPPING_EPOCHS / _EPOCHS)
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as folder:
        path = os.path.join(folder, "rows.npz")
        np.savez(path, rows=task.rows.numpy(), labels=task.labels.numpy())
        source = f"{path}::rows,labels"

        def run(epochs: int, skip: bool, prune: bool) -> TrainingCurve:
            model = perceptron(widths, seed)
            pruning = pruned_by(model, task, options.tolerance) if prune else None
            with _RowReading(source, seed, epochs if skip else None) as feed:
                curve, _ = train(model, task, epochs, feed, options.lr, apoptosis=pruning)
            curve.extra.update(feed.extra)
            return curve

        by_name = {
            "unpruned": run(epochs, skip=False, prune=False),
            "samples left out": run(more, skip=True, prune=False),
            "both": run(more, skip=True, prune=True),
        }
        work = by_name["samples left out"].extra["trained_on"]
        fewer = max(1, round(work / by_name["unpruned"].extra["trained_on"] * epochs))
        by_name["fewer epochs"] = run(fewer, skip=False, prune=False)
    return by_name
