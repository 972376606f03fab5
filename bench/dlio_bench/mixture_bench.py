"""Randomness of the samples of each mode, and accuracy of a network trained on them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

MODES: Final = ("batch", "global", "ring", "partial(0.1)", "local")
_NODES, _SAMPLES, _BINS = 8, 80_000, 16
_EPOCHS: Final = 8


def statistics() -> dict[str, dict[str, float]]:
    """For each mode, of a rank's stream and of the global batches, over some epochs:

    - `chi2_sigma`: chi-square of position in the epoch against sample number, over all ranks, in
      standard deviations of a uniformly random draw;
    - `serial_sigma`: serial correlation of one rank's sample numbers, likewise;
    - `repeated`: share of a rank's samples that it had in the epoch before, too (1 / nodes by
      chance);
    - `unevenness_sigma`: of how many of a global batch's samples are of each eighth of the data.
    """
    from dlio.loader.planned_traffic import job_of
    from dlio.plan.epoch import plan_epoch
    from dlio.plan.placement import HomeNode

    nodes = tuple(HomeNode(f"node{number}", (1 << 50,)) for number in range(_NODES))
    by_mode = {}
    for mode in MODES:
        job = job_of(_SAMPLES, 100_000, nodes, 1, 32, mode, seed=1)
        table = np.zeros((_BINS, _BINS))
        serial, repeated, uneven = [], [], []
        before: set[int] = set()
        for epoch in range(_EPOCHS):
            windows = [
                plan_epoch(job.plan(epoch, rank)).window(range(job.steps)) for rank in range(_NODES)
            ]
            for window in windows:
                place = np.arange(len(window.samples)) * _BINS // len(window.samples)
                np.add.at(table, (place, window.samples * _BINS // _SAMPLES), 1)
            stream = np.argsort(np.argsort(windows[0].samples)).astype(float)
            correlation = np.corrcoef(stream[:-1], stream[1:])[0, 1]
            serial.append(correlation * math.sqrt(len(stream)))
            mine = set(windows[0].samples.tolist())
            if before:
                repeated.append(len(mine & before) / len(mine))
            before = mine
            uneven += _unevenness(windows, job.steps)
        expected = table.sum() / table.size
        chi2 = float(((table - expected) ** 2 / expected).sum())
        # Each epoch's margins are fixed: each sample once, each place once.
        degrees = (_BINS - 1) ** 2
        by_mode[mode] = {
            "chi2_sigma": (chi2 - degrees) / math.sqrt(2 * degrees),
            "serial_sigma": float(np.sum(serial) / math.sqrt(len(serial))),
            "repeated": float(np.mean(repeated)),
            "unevenness_sigma": float(np.mean(uneven)),
        }
    return by_mode


def _unevenness(windows: Sequence[Any], steps: int) -> list[float]:
    """For some global batches, the root mean square deviation of the eighths' counts, over that of
    a uniformly random draw."""
    deviations = []
    for step in range(0, steps - 1, max(1, steps // 16)):
        batch = np.concatenate([w.samples[w.starts[step] : w.starts[step + 1]] for w in windows])
        counts = np.bincount(batch * 8 // _SAMPLES, minlength=8)
        expected = len(batch) / 8
        deviations.append(math.sqrt(((counts - expected) ** 2).mean() / (expected * 7 / 8)))
    return deviations


def training(
    source: str, held_out: str, seeds: int, epochs: int = 3, ranks: int = 2
) -> dict[str, list[float]]:
    """Held-out accuracy of a small network trained in each mode, by seed; `source` is meant to be
    sorted by class."""
    accuracies: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(seeds):
        for mode in MODES:
            report = os.path.join(os.path.dirname(os.path.abspath(source)), f".mix-{os.getpid()}")
            argv = ["train", source, "--val", held_out, "-n", str(ranks), "--shuffle", mode]
            argv += ["--pretend-nodes", str(ranks), "--epochs", str(epochs), "--seed", str(seed)]
            try:
                subprocess.run(
                    [sys.executable, "-m", "dlio.cli", *argv, "--report", report],
                    stdout=subprocess.DEVNULL,
                    timeout=3600,
                    check=True,
                )
                with open(report, encoding="utf-8") as file:
                    accuracies[mode].append(json.load(file)["epochs"][-1]["val_accuracy"])
            finally:
                if os.path.exists(report):
                    os.unlink(report)
    return accuracies
