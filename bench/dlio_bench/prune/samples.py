"""`--case samples`: ways to train on fewer samples, and trainings of fewer epochs.

The yardstick is the time of a training on all samples that reaches the same accuracy, and not the
time that the whole training took: a training of fewer epochs, its learning rate fitted to its
length, is the simplest way to train on fewer samples.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch

import dlio
from dlio.errors import UsageError
from dlio.image import crop_transforms
from dlio.train.compute_device import channels_last
from dlio.train.learning_rate import learning_rate
from dlio.train.model import make_model
from dlio.train.names import DEFAULT_OPTIMIZER
from dlio.train.optimizers import make_optimizer, usual_lr
from dlio.util.input_files import as_usage, read_json
from dlio.util.units import counted
from dlio.util.whole_files import make_folder, write_json
from dlio_bench.bench_processes import one_thread
from dlio_bench.prune.curves import TrainingCurve
from dlio_bench.prune.prune_options import SAMPLES, PruneBenchOptions
from dlio_bench.prune.skipping_rivals import (
    DensityBlocking,
    InfoBatch,
    InstanceEarlyStopping,
    Make,
    OwnSkipping,
    SkippingContender,
    accuracy_on,
    batches,
)
from dlio_bench.results.repeats import deviation
from dlio_bench.results.terminal import steps

_BATCH: Final = 64
_MOMENTUM: Final = 0.9
_EPOCHS: Final = 12
_WIDTH: Final = 16
_CROP: Final = 0.5
"""Least area of crops: with less, a network of this size stays unsure of its training samples."""
_TIERS: Final = "ram:2GiB:decoded"
_ALL: Final = "all samples"
_SHORTER: Final = 0.8, 0.6
"""Lengths of shorter trainings on all samples, relative to the whole one."""
_CONTENDERS: Final[dict[str, Make]] = {
    "dlio": OwnSkipping,
    "dlio(0.4)": partial(OwnSkipping, share=0.4),
    "infobatch": InfoBatch,
    "ies": InstanceEarlyStopping,
    "ies(0.3)": partial(InstanceEarlyStopping, threshold=0.3),
    "pfb": DensityBlocking,
}
"""By the names in SAMPLES."""


def measure(options: PruneBenchOptions) -> dict[str, object]:
    """By seed, in one process with one thread of torch: all samples, for the epochs of `options`
    and for fewer; and the contenders. Seconds are CPU time of the process."""
    source, val = options.check_images("samples")
    epochs = options.epochs or _EPOCHS
    lengths = sorted({max(1, round(each * epochs)) for each in _SHORTER} - {epochs}, reverse=True)
    variants: dict[str, tuple[Make, int]] = {_ALL: (SkippingContender, epochs)}
    variants |= {f"{_ALL}, {each} epochs": (SkippingContender, each) for each in lengths}
    variants |= {name: (_CONTENDERS[name], epochs) for name in options.chosen(SAMPLES)}
    by_name: dict[str, list[TrainingCurve]] = {}
    with one_thread():
        for seed in steps(range(options.seeds), "seed {}".format):
            for name, (make, length) in variants.items():
                train = partial(_trained, options, source, val, seed, make, length)
                settings: dict[str, object] = {
                    "source": os.path.abspath(source),
                    "val": os.path.abspath(val),
                    "image_size": options.image_size,
                    "width": options.width or _WIDTH,
                    "epochs": length,
                    "seed": seed,
                }
                curve = kept_curve(options.keep, f"samples {name} {seed}", settings, train)
                by_name.setdefault(name, []).append(curve)
    return table(by_name)


def _trained(
    options: PruneBenchOptions, source: str, val: str, seed: int, make: Make, epochs: int
) -> TrainingCurve:
    """Train as `dlio train` does on one rank."""
    size = options.image_size
    crop = crop_transforms.Compose(
        [
            crop_transforms.RandomResizedCrop(size, (_CROP, 1.0)),
            crop_transforms.RandomHorizontalFlip(),
        ]
    )
    data = dlio.open(source, image_size=size, train=True, transform=crop, seed=seed, tiers=_TIERS)
    torch.manual_seed(seed)
    model = channels_last(
        make_model(f"resnet(width={options.width or _WIDTH})", len(data.classes), size)
    )
    optimizer = make_optimizer(DEFAULT_OPTIMIZER, model, _MOMENTUM, None)
    peak, curve = usual_lr(DEFAULT_OPTIMIZER, _BATCH), TrainingCurve()
    with (
        dlio.DataLoader(data, _BATCH, True, num_workers=1, seed=seed) as loader,
        dlio.DataLoader(dlio.open(val, image_size=size, train=False), 200, num_workers=1) as held,
    ):
        contender = make(loader, epochs, seed)
        spent = 0.0
        for epoch in range(epochs):
            began = time.process_time()
            contender.begin(epoch)
            batch = contender.total / len(loader)
            model.train()
            for number, (images, labels) in enumerate(batches(loader)):
                rate = learning_rate(
                    peak * contender.lr_factor,
                    epoch * contender.total + number * batch,
                    batch,
                    epochs * contender.total,
                )
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(contender.loss(model, images, labels))
                optimizer.step()
            contender.end(epoch, model)
            spent += time.process_time() - began
            curve.seconds.append(spent)
            curve.accuracy.append(accuracy_on(model, held))
            curve.parameters.append(sum(p.numel() for p in model.parameters()))
            curve.widths.append(())
        curve.extra["forward"] = contender.work.forward / contender.total
        curve.extra["backward"] = contender.work.backward / contender.total
        curve.extra["work"] = contender.work.samples / contender.total
        contender.close()
    return curve


def table(by_name: Mapping[str, Sequence[TrainingCurve]]) -> dict[str, object]:
    """Return rows: accuracy, passes, CPU seconds, and the times less work and time than trainings
    on all samples that are as accurate."""
    rows: list[dict[str, Any]] = []
    whole = by_name[_ALL]
    costs: dict[str, Callable[[TrainingCurve], float]] = {
        "times_less_work": lambda run: run.extra["work"],
        "times_less_cpu": lambda run: run.seconds[-1],
    }
    accuracies = {name: _mean(runs, lambda run: run.accuracy[-1]) for name, runs in by_name.items()}
    for name, runs in by_name.items():
        pairs = zip(runs, whole, strict=True)
        row: dict[str, Any] = {
            "variant": name,
            "held_out_percent": deviation([100 * run.accuracy[-1] for run in runs]),
            "points_gained": deviation(
                [100 * (run.accuracy[-1] - other.accuracy[-1]) for run, other in pairs]
            ),
            "epochs_forward": _mean(runs, lambda run: run.extra["forward"]),
            "epochs_backward": _mean(runs, lambda run: run.extra["backward"]),
            "epochs_of_work": _mean(runs, costs["times_less_work"]),
            "cpu_seconds": deviation([run.seconds[-1] for run in runs]),
        }
        for key, cost_of in costs.items():
            points = [
                (_mean(those, cost_of), accuracies[each])
                for each, those in by_name.items()
                if each.startswith(_ALL)
            ]
            cost, sign = cost_of_all(accuracies[name], points)
            row[key] = f"{sign}{cost / _mean(runs, cost_of):.2f}"
        rows.append(row)
    return {
        "rows": rows,
        "raw": {name: [asdict(run) for run in runs] for name, runs in by_name.items()},
        "said": [
            f"{counted(len(by_name[_ALL]), 'seed')}: mean ± standard deviation. Work: a forward "
            "pass is a "
            "third, a backward pass two thirds of an epoch of all samples. Times less: work or CPU "
            "time of a training on all samples that is as accurate, interpolated between trainings "
            "of different lengths, over the variant's; > and < where it is longer or shorter than "
            "all of these."
        ],
    }


def cost_of_all(accuracy: float, points: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """Interpolate the least cost of a training on all samples that reaches an accuracy, from the
    (cost, accuracy) of such trainings.

    Returns (cost, sign): the sign is `>` for an accuracy above those of all trainings, with the
    cost of the longest; `<` for one below, with the cost of the shortest; or empty.
    """
    ordered = sorted(points)
    if accuracy < ordered[0][1]:
        return ordered[0][0], "<"
    for (less, low), (more, high) in pairwise(ordered):
        if low <= accuracy <= high:
            share = (accuracy - low) / (high - low) if high > low else 0.0
            return less + share * (more - less), ""
    return ordered[-1][0], ">"


def _mean(runs: Sequence[TrainingCurve], figure: Callable[[TrainingCurve], float]) -> float:
    return statistics.mean(map(figure, runs))


# Curves that are kept in a folder, so that an interrupted benchmark goes on


def kept_curve(
    folder: str | None,
    name: str,
    settings: Mapping[str, object],
    train: Callable[[], TrainingCurve],
) -> TrainingCurve:
    """Return the curve of a training; the one in `folder` if there is one of the same name and
    settings. Raises UsageError if it is of other settings."""
    if folder is None:
        return train()
    make_folder(folder, "--keep")
    path = os.path.join(folder, re.sub(r"[^\w.]+", "-", name) + ".json")
    if os.path.exists(path):
        with as_usage(path, "remove it"):
            record: Any = read_json(path)
            if record["settings"] != dict(settings):
                raise UsageError(
                    f"{path} is of another training: name another folder by --keep, or remove it"
                )
            return TrainingCurve(**record["curve"])
    curve = train()
    write_json(path, {"settings": dict(settings), "curve": asdict(curve)})
    return curve
