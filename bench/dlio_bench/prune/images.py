"""`--case images`: an over-wide convolutional network."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

import dlio
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_size import count_parameters
from dlio.features.pruning.pruning_report import RoundRecord
from dlio.train.model import make_model
from dlio.util.whole_files import write_json
from dlio_bench.prune import removal_case
from dlio_bench.prune.curves import TrainingCurve, summary
from dlio_bench.prune.prune_options import IMAGES, PruneBenchOptions
from dlio_bench.prune.rivals import Size
from dlio_bench.prune.skipping_rivals import accuracy_on
from dlio_bench.results.terminal import steps
from dlio_bench.trainings import TrainedEpoch, TrainingReport, kept_folder, trained

_WIDTH: Final = 64
_EPOCHS: Final = 5
_SHRUNK_EPOCHS: Final = 7
"""Steps of a small network are cheap: a part of the time that they save goes into more of them."""
_TARGET: Final = 0.25
"""Fraction of the parameters that the variants with a given size keep, or somewhat less."""
_RIVALS: Final = {
    "prunetrain": ("PruneTrain", "PruneTrain(sizes={path!r})"),
    "torch-pruning": (
        "torch-pruning, magnitude",
        "GroupMagnitude(sizes={path!r},steps={steps})",
    ),
    "group-norm": ("torch-pruning, group norm", "GroupNorm(sizes={path!r},steps={steps})"),
}
"""Names in tables, and callbacks, of other ways to prune, by variant."""


def measure(options: PruneBenchOptions) -> dict[str, object]:
    """Runs of `dlio train` by seed: the wide network, as it is, with apoptosis, with a size that is
    given, and with other ways to prune; and, of the widths that apoptosis came to: the rest of the
    wide one after training, by magnitude; neurons removed by chance at the steps at which apoptosis
    did; and a network about as large from the start. Those that are or become small are trained for
    more epochs. Seconds are CPU time if there is one rank."""
    with kept_folder(options.keep) as folder:
        runs = _Runs(options, folder, options.epochs or _EPOCHS)
        width = options.width or _WIDTH
        by_name: dict[str, list[TrainingCurve]] = {}
        for seed in steps(range(options.seeds), "seed {}".format):
            for name, curve in _variants(runs, seed, width):
                by_name.setdefault(name, []).append(curve)
    return summary(by_name, options.tolerance)


class _Runs:
    """Trainings of a case, by variant and seed."""

    def __init__(self, options: PruneBenchOptions, folder: str, epochs: int) -> None:
        self.source, self.val = options.check_images("images")
        self.options, self.folder, self.epochs = options, folder, epochs

    def model(self, width: int) -> torch.nn.Module:
        """As `dlio train` makes it."""
        classes = len(dlio.open(self.source).classes)
        return make_model(f"resnet(width={width})", classes, self.options.image_size)

    def report(self, name: str, seed: int, width: int, **more: Any) -> TrainingReport:
        """The report of a run, which is not repeated where its report is there."""
        cpu = f"dlio_bench.prune.rivals:CpuTime(path={self._cpu(name, seed)!r})"
        settings = {
            "source": self.source,
            "val": self.val,
            "epochs": self.epochs,
            "seed": seed,
            "image_size": self.options.image_size,
            "model": f"resnet(width={width})",
            **more,
            "callback": [cpu, *more.get("callback", ())],
        }
        return trained(f"{name}-{seed}", self.folder, self.options.ranks, settings)

    def curve(self, name: str, seed: int, width: int, **more: Any) -> TrainingCurve:
        return self.curve_of(self.report(name, seed, width, **more), width, name, seed)

    def curve_of(self, report: TrainingReport, width: int, name: str, seed: int) -> TrainingCurve:
        """The curve of a report, in CPU time if there is one rank."""
        curve = curve_of(report, self.model(width), self.options.image_size)
        if self.options.ranks > 1:
            return curve
        with open(self._cpu(name, seed), encoding="utf-8") as file:
            return replace(curve, seconds=json.load(file))

    def _cpu(self, name: str, seed: int) -> str:
        return os.path.join(self.folder, f"cpu-{name}-{seed}.json")


def _variants(runs: _Runs, seed: int, width: int) -> Iterator[tuple[str, TrainingCurve]]:
    options = runs.options
    chosen = options.chosen(IMAGES)
    weights = os.path.join(runs.folder, f"weights-{seed}.pt")
    # The weights are needed in addition to the report.
    report = runs.report("unpruned", seed, width, save=weights)
    unpruned = runs.curve_of(report, width, "unpruned", seed)
    yield "unpruned", unpruned
    epochs = options.longer(runs.epochs, _SHRUNK_EPOCHS / _EPOCHS)
    same = {"epochs": epochs, "prune": "apoptosis"}
    report = runs.report("apoptosis", seed, width, **same, prune_tolerance=options.tolerance)
    pruned = runs.curve_of(report, width, "apoptosis", seed)
    yield "apoptosis", pruned
    given: TrainingCurve | None = None
    if "target" in chosen:
        given = runs.curve("target", seed, width, **same, prune_target=_TARGET)
        yield f"apoptosis, target {_TARGET:g}", given
    rounds = [each for epoch in report["epochs"] for each in _rounds(epoch)]
    if "magnitude" in chosen:
        yield "magnitude, after training", _cut(runs, weights, width, rounds, unpruned)
    if "chance" in chosen:
        path = os.path.join(runs.folder, f"rounds-{seed}.json")
        if not os.path.exists(path):
            write_json(path, [{"step": each["step"], "widths": each["widths"]} for each in rounds])
        by_chance = f"dlio_bench.prune.removal_case:Chance(rounds={path!r},seed={seed})"
        chance = runs.curve("chance", seed, width, epochs=epochs, callback=[by_chance])
        # Its report does not know that it was cut: to the same widths, at the same steps.
        yield (
            "by chance, as apoptosis",
            replace(chance, parameters=pruned.parameters, widths=pruned.widths),
        )
    for name in chosen:
        if name in _RIVALS:
            yield _RIVALS[name][0], _rival(runs, name, seed, width, epochs, report)
    if "narrow" in chosen:
        narrow = _as_large(runs, pruned.parameters[-1], width)
        yield "narrow from the start", runs.curve("narrow", seed, narrow, epochs=epochs)
        if given is not None:
            narrow = _as_large(runs, given.parameters[-1], width)
            curve = runs.curve("narrow-target", seed, narrow, epochs=epochs)
            yield "narrow from the start, as the target", curve


def _rival(
    runs: _Runs, name: str, seed: int, width: int, epochs: int, report: TrainingReport
) -> TrainingCurve:
    """The curve of a way to prune that is a callback, and writes the sizes of the network.

    Args:
        report: of a run on the same ranks.
    """
    path = os.path.join(runs.folder, f"sizes-{name}-{seed}.json")
    batch = int(str(report["config"]["batch_size"])) * report["ranks"]
    steps_ = epochs * math.ceil(report["epochs"][0]["samples"] / batch)
    callback = "dlio_bench.prune.rivals:" + _RIVALS[name][1].format(path=path, steps=steps_)
    curve = runs.curve(name, seed, width, epochs=epochs, callback=[callback])
    with open(path, encoding="utf-8") as file:
        sizes: list[Size] = json.load(file)
    return replace(
        curve,
        parameters=[each["parameters"] for each in sizes],
        widths=[tuple(each["widths"]) for each in sizes],
    )


def _rounds(epoch: TrainedEpoch) -> Sequence[RoundRecord]:
    pruning = epoch["pruning"]
    return () if pruning is None else pruning["rounds"]


def _cut(
    runs: _Runs, weights: str, width: int, rounds: Sequence[RoundRecord], trained_: TrainingCurve
) -> TrainingCurve:
    """The trained wide network, cut by magnitude to the widths that rounds came to."""
    model = runs.model(width)
    model.load_state_dict(torch.load(weights, weights_only=True))
    size = runs.options.image_size
    widths = {name: left for each in rounds for name, left in each["widths"].items()}
    removal_case.cut_by_magnitude(model, torch.zeros(2, 3, size, size), widths)
    held_out = dlio.open(runs.val, image_size=size, train=False)
    with dlio.DataLoader(held_out, 100, shuffle=False) as loader:
        accuracy = accuracy_on(model, loader)
    return TrainingCurve(
        trained_.seconds[-1:],
        [accuracy],
        [count_parameters(model)],
        [tuple(widths_of(model, size).values())],
        dict(trained_.extra),
    )


def _as_large(runs: _Runs, parameters: int, widest: int) -> int:
    """The width of the network whose number of parameters is nearest."""
    sizes = {width: count_parameters(runs.model(width)) for width in range(1, widest + 1)}
    return min(sizes, key=lambda width: abs(sizes[width] - parameters))


def widths_of(model: torch.nn.Module, image_size: int) -> dict[str, int]:
    """Widths of prunable layers, in the model's order; those that share neurons count once."""
    example = torch.zeros(2, 3, image_size, image_size)
    return {group.name: group.width for group in find_groups(model, example).groups}


def curve_of(report: TrainingReport, model: torch.nn.Module, image_size: int) -> TrainingCurve:
    """The curve of a report of `dlio train`, and of the model before training."""
    curve = TrainingCurve(extra={"read_MB": 0.0, "trained_on": 0.0})
    widths, parameters = widths_of(model, image_size), count_parameters(model)
    seconds = 0.0
    for epoch in report["epochs"]:
        seconds += epoch["seconds"]
        curve.seconds.append(seconds)
        curve.accuracy.append(epoch["val_accuracy"])
        pruned = epoch["pruning"]
        for each in pruned["rounds"] if pruned else ():
            widths |= each["widths"]
        curve.parameters.append(pruned["parameters"] if pruned else parameters)
        curve.widths.append(tuple(widths.values()))
        curve.extra["read_MB"] += sum(epoch["bytes"].values()) / 1e6
        curve.extra["trained_on"] += epoch["samples"]
    return curve
