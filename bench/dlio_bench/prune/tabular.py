"""`--case tabular` and `--case rows`: a wide perceptron that learns the labels of a small one for
rows of numbers; and one that skips rows that it has learnt.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import NeuronGroup
from dlio.util.closable import Closable
from dlio_bench.bench_processes import one_thread
from dlio_bench.prune import removal_case
from dlio_bench.prune.curves import TrainingCurve, summary
from dlio_bench.prune.prune_options import PruneBenchOptions
from dlio_bench.results.terminal import steps

_FEATURES: Final = 64
_CLASSES: Final = 10
_TEACHER: Final = 24
"""Neurons of the teacher's only hidden layer."""
_FLIPPED: Final = 0.05
"""Share of the training labels that are drawn anew."""
BATCH: Final = 128
_ROWS: Final = 40_000
_WIDTH: Final = 1024
_LAYERS: Final = 3
_EPOCHS: Final = 6
_SHRUNK_EPOCHS: Final = 10
"""Steps of a small network are cheap: a part of the time that they save goes into more of them."""
_FILE_ROWS: Final = 400_000
"""Rows of the case rows: so many that a network of this width hardly overfits, as it is best
before any row is easy otherwise."""
_FILE_WIDTH: Final = 128
_FILE_EPOCHS: Final = 10
_SKIPPING_EPOCHS: Final = 12
"""Epochs of trainings that leave rows out: they spend a part of the saved time on more epochs."""
_PROBE: Final = 1024
"""Rows that a round is tried with."""


@dataclass(frozen=True, slots=True)
class TabularTask:
    """Rows and labels."""

    rows: torch.Tensor
    """Shape (n, features)."""
    labels: torch.Tensor
    """Shape (n,)."""
    held_out_rows: torch.Tensor
    held_out_labels: torch.Tensor
    """As the teacher says, none flipped."""
    probe_rows: torch.Tensor
    probe_labels: torch.Tensor
    """Of neither."""


def make_task(seed: int, samples: int) -> TabularTask:
    """A teacher with random weights, of one hidden layer of 24 neurons that read 16 of 64 numbers,
    the others being noise; and rows that it has answered."""
    generator = torch.Generator().manual_seed(seed)
    reads = 16
    first = torch.randn(reads, _TEACHER, generator=generator) / reads**0.5
    second = torch.randn(_TEACHER, _CLASSES, generator=generator)

    def answered(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randn(count, _FEATURES, generator=generator)
        hidden = torch.relu(rows[:, :reads] @ first)
        scores = hidden @ second
        return rows, (scores - scores.mean(0)).argmax(1)

    rows, labels = answered(samples)
    flipped = torch.rand(samples, generator=generator) < _FLIPPED
    drawn = torch.randint(0, _CLASSES, (samples,), generator=generator)
    held_out, probe = answered(max(1000, samples // 5)), answered(_PROBE)
    return TabularTask(rows, torch.where(flipped, drawn, labels), *held_out, *probe)


def perceptron(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Return a perceptron with hidden layers of `widths`, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip((_FEATURES, *widths), widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], _CLASSES))


Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


class ShuffledRows:
    """All rows of a task, from memory, in another order each epoch."""

    def __init__(self, task: TabularTask, seed: int) -> None:
        self._rows, self._labels = task.rows, task.labels
        self._generator = torch.Generator().manual_seed(seed)

    def epoch(self, number: int) -> tuple[int, float, Batches]:
        """Number of batches, factor of the learning rate, and the batches of an epoch."""
        whole = len(self._rows) // BATCH
        order = torch.randperm(len(self._rows), generator=self._generator)
        parts = torch.split(order[: whole * BATCH], BATCH)
        return whole, 1.0, ((self._rows[part], self._labels[part]) for part in parts)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        """Return losses of the last batch, shape (n,), times their weights."""
        return losses


class RowsOfFile(Closable):
    """Rows of a file, for `train`; with `epochs` those that a SampleSkipper keeps in a run of so
    many."""

    def __init__(self, path: str, seed: int, epochs: int | None) -> None:
        self._loader = dlio.DataLoader(dlio.open(path), BATCH, shuffle=True, seed=seed)
        self._skipper = epochs and dlio.SampleSkipper(self._loader, epochs, seed=seed)
        self.extra = {"read_MB": 0.0, "trained_on": 0.0}

    def close(self) -> None:
        if self._skipper:
            self._skipper.close()
        self._loader.close()

    def epoch(self, number: int) -> tuple[int, float, Batches]:
        if not self._skipper:
            self._loader.set_epoch(number)
            return len(self._loader), 1.0, self._batches()
        self._skipper.begin(number)
        return len(self._loader), self._skipper.lr_factor, self._batches()

    def _batches(self) -> Batches:
        for batch in self._loader:
            yield batch["rows"], batch["labels"]
        statistics = self._loader.stats()
        self.extra["read_MB"] += sum(statistics["bytes"].values()) / 1e6
        self.extra["trained_on"] += statistics["samples"]

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        return self._skipper.weigh(losses) if self._skipper else losses


def train(
    model: nn.Module,
    task: TabularTask,
    epochs: int,
    feed: ShuffledRows | RowsOfFile,
    lr: float,
    after_step: Callable[[int, torch.optim.Optimizer], object] | None = None,
    apoptosis: Callable[[torch.optim.Optimizer, int], dlio.Apoptosis] | None = None,
) -> tuple[TrainingCurve, dlio.Apoptosis | None]:
    """Train by Adam, with the rate on a cosine from `lr` to zero; return the curve, and what
    `apoptosis` made for the optimizer and a number of steps. `after_step` is called with the number
    of steps done."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    pruning = apoptosis(optimizer, epochs * (len(task.rows) // BATCH)) if apoptosis else None
    curve, spent, done = TrainingCurve(), 0.0, 0
    for epoch in range(epochs):
        began = time.perf_counter()
        batches, factor, feeding = feed.epoch(epoch)
        known = 0.0
        if pruning is not None:
            pruning.expect((epochs - epoch) * batches)
        for batch, (rows, labels) in enumerate(feeding):
            down = (1 + math.cos(math.pi * (epoch + batch / batches) / epochs)) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * factor * down
            optimizer.zero_grad(set_to_none=True)
            logits = model(rows)
            losses = cross_entropy(logits, labels, reduction="none")
            known += float((logits.detach().argmax(1) == labels).double().mean()) / batches
            torch.autograd.backward(feed.weigh(losses).mean())
            optimizer.step()
            done += 1
            if pruning is not None:
                pruning.step()
            if after_step is not None:
                after_step(done, optimizer)
        spent += time.perf_counter() - began
        right = accuracy(model, task)
        if pruning is not None:
            pruning.held_out(right, known)
        curve.seconds.append(spent)
        curve.accuracy.append(right)
        curve.parameters.append(sum(p.numel() for p in model.parameters()))
        curve.widths.append(hidden_widths(model))
    if pruning is not None:
        pruning.close()
    return curve, pruning


@torch.no_grad()
def accuracy(model: nn.Module, task: TabularTask) -> float:
    """On the held-out rows."""
    answers = torch.cat([model(rows).argmax(1) for rows in torch.split(task.held_out_rows, 1024)])
    return float((answers == task.held_out_labels).double().mean())


def hidden_widths(model: nn.Module) -> tuple[int, ...]:
    """Return the number of neurons in each hidden layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return tuple(layer.out_features for layer in layers[:-1])


def measure(options: PruneBenchOptions) -> dict[str, object]:
    """By seed, one after another on one thread: the wide network, as it is and with apoptosis;
    and, of the widths that apoptosis came to: the rest of the wide one after training, by
    magnitude; neurons removed by chance at the steps at which apoptosis did; and a network of these
    widths from the start. Those that are or become small are trained for more epochs."""
    return by_seed(options, _variants, _WIDTH, _EPOCHS)


def by_seed(
    options: PruneBenchOptions,
    variants: Callable[[int, Sequence[int], int, PruneBenchOptions], Mapping[str, TrainingCurve]],
    width: int,
    epochs: int,
) -> dict[str, object]:
    """Results of `variants` for each seed, told together; `width`, of hidden layers, and `epochs`
    are those where the options give none."""
    widths, epochs = [options.width or width] * _LAYERS, options.epochs or epochs
    by_variant: dict[str, list[TrainingCurve]] = {}
    with one_thread():
        for seed in steps(range(options.seeds), "seed {}".format):
            for name, curve in variants(seed, widths, epochs, options).items():
                by_variant.setdefault(name, []).append(curve)
    return summary(by_variant, options.tolerance)


def _variants(
    seed: int, whole: Sequence[int], epochs: int, options: PruneBenchOptions
) -> dict[str, TrainingCurve]:
    task, lr = make_task(seed, options.rows or _ROWS), options.lr

    def fresh(widths: Sequence[int]) -> nn.Sequential:
        return perceptron(widths, seed)

    more = options.longer(epochs, _SHRUNK_EPOCHS / _EPOCHS)
    wide = fresh(whole)
    by_name = {"unpruned": train(wide, task, epochs, ShuffledRows(task, seed), lr)[0]}
    model = fresh(whole)
    pruning = pruned_by(model, task, options.tolerance)
    by_name["apoptosis"], pruned = train(
        model, task, more, ShuffledRows(task, seed), lr, apoptosis=pruning
    )
    assert pruned is not None
    by_name["magnitude, after training"] = _cut(wide, task, by_name["unpruned"], pruned.groups)
    model = fresh(whole)
    widths = {each.step: each.widths for each in pruned.rounds if each.widths}
    groups = find_groups(model, task.rows[:2]).groups
    generator = np.random.default_rng(seed)

    def remove_by_chance(done: int, optimizer: torch.optim.Optimizer) -> None:
        nonlocal groups
        if done in widths:
            plan = removal_case.by_chance(groups, widths[done], generator)
            groups = apply(model, groups, plan, [optimizer]).groups

    by_name["by chance, as apoptosis"] = train(
        model, task, more, ShuffledRows(task, seed), lr, after_step=remove_by_chance
    )[0]
    narrow = fresh(by_name["apoptosis"].widths[-1])
    by_name["narrow from the start"] = train(narrow, task, more, ShuffledRows(task, seed), lr)[0]
    return by_name


def pruned_by(
    model: nn.Module, task: TabularTask, tolerance: float
) -> Callable[[torch.optim.Optimizer, int], dlio.Apoptosis]:
    """Options of the Apoptosis that `train` creates."""

    def probe(model: nn.Module) -> torch.Tensor:
        return cross_entropy(model(task.probe_rows), task.probe_labels)

    def make(optimizer: torch.optim.Optimizer, steps: int) -> dlio.Apoptosis:
        example = task.rows[:2]
        return dlio.Apoptosis(
            model, optimizer, example=example, probe=probe, steps=steps, tolerance=tolerance
        )

    return make


def _cut(
    model: nn.Module, task: TabularTask, trained: TrainingCurve, smaller: Sequence[NeuronGroup]
) -> TrainingCurve:
    """A trained network, cut by magnitude to the widths of groups; at the end of its training."""
    removal_case.cut_by_magnitude(
        model, task.rows[:2], {group.name: group.width for group in smaller}
    )
    count = sum(p.numel() for p in model.parameters())
    return TrainingCurve(
        trained.seconds[-1:], [accuracy(model, task)], [count], [hidden_widths(model)]
    )


# The case rows


def measure_rows(options: PruneBenchOptions) -> dict[str, object]:
    """By seed, one after another on one thread, rows from a file through `dlio.DataLoader`: with
    all of them, with samples left out, with neurons removed as well; and, with all samples, of as
    many whole epochs as those that leave some out train on samples."""
    return by_seed(options, _skipping_variants, _FILE_WIDTH, _FILE_EPOCHS)


def _skipping_variants(
    seed: int, widths: Sequence[int], epochs: int, options: PruneBenchOptions
) -> dict[str, TrainingCurve]:
    task = make_task(seed, options.rows or _FILE_ROWS)
    more = options.longer(epochs, _SKIPPING_EPOCHS / _FILE_EPOCHS)
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as folder:
        path = os.path.join(folder, "rows.npz")
        np.savez(path, rows=task.rows.numpy(), labels=task.labels.numpy())
        source = f"{path}::rows,labels"

        def run(epochs: int, skip: bool, prune: bool) -> TrainingCurve:
            model = perceptron(widths, seed)
            pruning = pruned_by(model, task, options.tolerance) if prune else None
            with RowsOfFile(source, seed, epochs if skip else None) as feed:
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
