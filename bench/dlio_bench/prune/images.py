"""`--case images`: an over-wide convolutional network."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

import dlio
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_size import count_parameters
from dlio.train.model import make_model
from dlio.train.weights import stored_state
from dlio.util.whole_files import write_json
from dlio_bench.prune import removal_case
from dlio_bench.prune.curves import TrainingCurve, summary
from dlio_bench.prune.prune_options import IMAGES, PruneBenchOptions
from dlio_bench.prune.skipping_rivals import accuracy_on
from dlio_bench.results.terminal import steps
from dlio_bench.trainings import TrainedEpoch, TrainingReport, kept_folder, trained

_WIDTH: Final = 64
_EPOCHS: Final = 5
_SHRUNK_EPOCHS: Final = 7
"""Steps of a small network are cheap: a part of the time that they save goes into more of them."""
_TARGET: Final = 0.25
"""Fraction of the parameters that the variants with a given size keep, or somewhat less."""
_CALLBACKS: Final = "dlio_bench.prune.rivals"
_RIVALS: Final = {
    "chance": ("by chance, as apoptosis", "Chance(rounds={rounds!r},seed={seed})"),
    "prunetrain": ("PruneTrain", "PruneTrain()"),
    "torch-pruning": ("torch-pruning, magnitude", "GroupMagnitude()"),
    "group-norm": ("torch-pruning, group norm", "GroupNorm()"),
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
    def __init__(self, options: PruneBenchOptions, folder: str, epochs: int) -> None:
        self.source, self.val = options.check_images("images")
        self.options, self.folder, self.epochs = options, folder, epochs

    def model(self, width: int) -> torch.nn.Module:
        """As `dlio train` makes it."""
        classes = len(dlio.open(self.source).classes)
        return make_model(f"resnet(width={width})", classes, self.options.image_size)

    def report(self, name: str, seed: int, width: int, **more: Any) -> TrainingReport:
        """The report of a run, which is not repeated where its report is there."""
        settings = {
            "source": self.source,
            "val": self.val,
            "epochs": self.epochs,
            "seed": seed,
            "image_size": self.options.image_size,
            "model": f"resnet(width={width})",
            **more,
            "callback": [f"{_CALLBACKS}:CpuTime", *more.get("callback", ())],
        }
        return trained(f"{name}-{seed}", self.folder, self.options.ranks, settings)

    def curve(self, name: str, seed: int, width: int, **more: Any) -> TrainingCurve:
        return self.curve_of(self.report(name, seed, width, **more), width)

    def curve_of(self, report: TrainingReport, width: int) -> TrainingCurve:
        return curve_of(report, self.model(width), self.options.image_size)


def _variants(runs: _Runs, seed: int, width: int) -> Iterator[tuple[str, TrainingCurve]]:
    options = runs.options
    chosen = options.chosen(IMAGES)
    weights = os.path.join(runs.folder, f"weights-{seed}.pt")
    # The weights are needed in addition to the report.
    report = runs.report("unpruned", seed, width, save=weights)
    unpruned = runs.curve_of(report, width)
    yield "unpruned", unpruned
    epochs = options.longer(runs.epochs, _SHRUNK_EPOCHS / _EPOCHS)
    same = {"epochs": epochs, "prune": "apoptosis"}
    report = runs.report("apoptosis", seed, width, **same, prune_tolerance=options.tolerance)
    pruned = runs.curve_of(report, width)
    yield "apoptosis", pruned
    given: TrainingCurve | None = None
    if "target" in chosen:
        given = runs.curve("target", seed, width, **same, prune_target=_TARGET)
        yield f"apoptosis, target {_TARGET:g}", given
    rounds = [each for epoch in report["epochs"] for each in _rounds(epoch)]
    if "magnitude" in chosen:
        yield "magnitude, after training", _cut(runs, weights, width, rounds, unpruned)
    path = os.path.join(runs.folder, f"rounds-{seed}.json")
    if not os.path.exists(path):
        write_json(path, [{"step": each["step"], "widths": each["widths"]} for each in rounds])
    for name in chosen:
        if name in _RIVALS:
            title, callback = _RIVALS[name]
            callback = f"{_CALLBACKS}:{callback.format(rounds=path, seed=seed)}"
            yield title, runs.curve(name, seed, width, epochs=epochs, callback=[callback])
    if "narrow" in chosen:
        narrow = _as_large(runs, pruned.parameters[-1], width)
        yield "narrow from the start", runs.curve("narrow", seed, narrow, epochs=epochs)
        if given is not None:
            narrow = _as_large(runs, given.parameters[-1], width)
            curve = runs.curve("narrow-target", seed, narrow, epochs=epochs)
            yield "narrow from the start, as the target", curve


def _rounds(epoch: TrainedEpoch) -> Sequence[Mapping[str, Any]]:
    pruning = epoch["pruning"]
    return () if pruning is None else pruning["rounds"]


def _cut(
    runs: _Runs,
    weights: str,
    width: int,
    rounds: Sequence[Mapping[str, Any]],
    trained_: TrainingCurve,
) -> TrainingCurve:
    """The trained wide network, cut by magnitude to the widths that rounds came to."""
    model = runs.model(width)
    model.load_state_dict(stored_state(weights))
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
    """The curve of a report of `dlio train`, and of the model before training; in CPU time if there
    is one rank."""
    curve = TrainingCurve(extra={"read_MB": 0.0, "trained_on": 0.0})
    widths, parameters = widths_of(model, image_size), count_parameters(model)
    seconds = 0.0
    for epoch in report["epochs"]:
        seconds += epoch["seconds"]
        curve.seconds.append(epoch["cpu_s"] if report["ranks"] == 1 else seconds)
        curve.accuracy.append(epoch["val_accuracy"])
        pruned = epoch["pruning"]
        for each in pruned["rounds"] if pruned else ():
            widths |= each["widths"]
        size = epoch.get("cut") or pruned or {"parameters": parameters}
        curve.parameters.append(size["parameters"])
        curve.widths.append(tuple(size.get("widths", widths.values())))
        curve.extra["read_MB"] += sum(epoch["bytes"].values()) / 1e6
        curve.extra["trained_on"] += epoch["samples"]
    return curve
