"""`--case tabular`: a wide perceptron that learns the labels of a small one for rows of numbers."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.features.pruning.neuron_groups import NeuronGroup
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


class TabularBatches(Protocol):
    """Batches of a task."""

    def epoch(self, number: int) -> tuple[int, Iterable[tuple[torch.Tensor, torch.Tensor]]]:
        """How many batches, and the batches."""

    @property
    def lr_factor(self) -> float:
        """Factor of the epoch's learning rate."""

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        """Losses of the last batch, shape (n,), times their weights."""


class ShuffledRows:
    """All rows, from memory, in another order each epoch."""

    lr_factor = 1.0

    def __init__(self, task: TabularTask, seed: int) -> None:
        self._task, self._generator = task, torch.Generator().manual_seed(seed)

    def epoch(self, number: int) -> tuple[int, Iterable[tuple[torch.Tensor, torch.Tensor]]]:
        rows, labels = self._task.rows, self._task.labels
        order = torch.randperm(len(rows), generator=self._generator)
        whole = len(rows) // BATCH
        parts = torch.split(order[: whole * BATCH], BATCH)
        return whole, ((rows[part], labels[part]) for part in parts)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        return losses


def train(
    model: nn.Module,
    task: TabularTask,
    epochs: int,
    feed: TabularBatches,
    lr: float,
    after_step: Callable[[int, torch.optim.Optimizer], object] | None = None,
    apoptosis: Callable[[torch.optim.Optimizer, int], dlio.Apoptosis] | None = None,
) -> tuple[TrainingCurve, dlio.Apoptosis | None]:
    """Adam, with the rate on a cosine to zero.

    Args:
        lr: at the beginning.
        after_step: called with the number of steps done.
        apoptosis: makes one, for an optimizer and a number of steps.

    Returns: the curve, and the apoptosis.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    pruning = apoptosis(optimizer, epochs * (len(task.rows) // BATCH)) if apoptosis else None
    curve, spent, done = TrainingCurve(), 0.0, 0
    for epoch in range(epochs):
        began = time.perf_counter()
        batches, feeding = feed.epoch(epoch)
        known = 0.0
        if pruning is not None:
            pruning.expect((epochs - epoch) * batches)
        for batch, (rows, labels) in enumerate(feeding):
            down = (1 + math.cos(math.pi * (epoch + batch / batches) / epochs)) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * feed.lr_factor * down
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
    answers = torch.cat([model(rows).argmax(1) for rows in _chunks(task.held_out_rows)])
    return float((answers == task.held_out_labels).double().mean())


def _chunks(rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows[start : start + 1024] for start in range(0, len(rows), 1024)]


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
    """Results of `variants` for each seed, for the widths of hidden layers and for epochs, told
    together.

    Args:
        width, epochs: where the options give none.
    """
    widths, epochs = [options.width or width] * _LAYERS, options.epochs or epochs
    by_variant: dict[str, list[TrainingCurve]] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in steps(range(options.seeds), "seed {}".format):
            for name, curve in variants(seed, widths, epochs, options).items():
                by_variant.setdefault(name, []).append(curve)
    finally:
        torch.set_num_threads(before)
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
    chance = removal_case.ByChance(model, task.rows[:2], pruned.rounds, seed)
    by_name["by chance, as apoptosis"] = train(
        model, task, more, ShuffledRows(task, seed), lr, after_step=chance.step
    )[0]
    narrow = fresh(by_name["apoptosis"].widths[-1])
    by_name["narrow from the start"] = train(narrow, task, more, ShuffledRows(task, seed), lr)[0]
    return by_name


def pruned_by(
    model: nn.Module, task: TabularTask, tolerance: float
) -> Callable[[torch.optim.Optimizer, int], dlio.Apoptosis]:
    """Options of the Apoptosis that `train` creates."""

    def make(optimizer: torch.optim.Optimizer, steps: int) -> dlio.Apoptosis:
        return dlio.Apoptosis(
            model,
            optimizer,
            example=task.rows[:2],
            probe=_probe(task),
            steps=steps,
            tolerance=tolerance,
        )

    return make


def _probe(task: TabularTask) -> Callable[[nn.Module], torch.Tensor]:
    def probe(model: nn.Module) -> torch.Tensor:
        return cross_entropy(model(task.probe_rows), task.probe_labels)

    return probe


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
