"""Randomness of the samples of each mode and source order, and accuracy of a network trained on
them."""

import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio_bench.bench_data import packed_noise
from dlio_bench.trainings import trained

MODES: Final = ("batch", "global", "ring", "partial(0.1)", "local")
_NODES, _SAMPLES, _BINS = 8, 80_000, 16
_EPOCHS: Final = 8
_PARTS: Final = 8
"""Parts of the data, as they are stored, on which a batch should draw evenly."""
_SAMPLE_BYTES: Final = 4096
_GLOBAL_BATCH: Final = 1024


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
            cuts = range(0, job.steps - 1, max(1, job.steps // 16))
            batches = (
                np.concatenate([w.samples[w.starts[k] : w.starts[k + 1]] for w in windows])
                for k in cuts
            )
            uneven += _unevenness(batches, _SAMPLES)
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


def _unevenness(batches: Iterable[npt.NDArray[np.int64]], samples: int) -> list[float]:
    """For each batch, the root mean square deviation of the counts of the data's eighths, over that
    of a uniformly random draw."""
    deviations = []
    for batch in batches:
        counts = np.bincount(batch * _PARTS // samples, minlength=_PARTS)
        expected = len(batch) / _PARTS
        chance = expected * (1 - 1 / _PARTS)
        deviations.append(math.sqrt(((counts - expected) ** 2).mean() / chance))
    return deviations


def training(
    source: str, held_out: str, seeds: int, epochs: int = 3, ranks: int = 2
) -> dict[str, list[float]]:
    """Held-out accuracy of a small network trained in each mode, by seed; `source` is meant to be
    sorted by class."""
    accuracies: dict[str, list[float]] = {mode: [] for mode in MODES}
    options = {"source": source, "val": held_out, "pretend_nodes": ranks, "epochs": epochs}
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as folder:
        for seed, mode in itertools.product(range(seeds), MODES):
            one = {**options, "shuffle": mode, "seed": seed}
            report = trained(f"{mode}-{seed}", folder, ranks, one)
            accuracies[mode].append(report["epochs"][-1]["val_accuracy"])
    return accuracies


# Gain of `--source-order block` where samples are small and no tier holds them


def source_order(
    orders: Sequence[str] = ("sample", "block(4)", "block(16)", "block(64)"),
    samples: int = 60_000,
    at_most: int = 12_000,
    latency_s: float = 0.002,
) -> dict[str, object]:
    """Samples a second of small ones, in shards behind slowfs, that no tier holds; requests
    a sample; and, of the order alone, how unevenly a global batch of 1,024 draws on eighths of the
    data as they are stored, in units of a random draw (1.0 is a uniformly random draw).

    Args:
        at_most: samples that are timed of each pass.
    """
    import dlio
    from dlio_bench.emulated.emulated_mount import slow_mount, stats

    results: dict[str, Any] = {}
    with packed_noise(samples, _SAMPLE_BYTES) as packed:
        for order in orders:
            with (
                slow_mount(packed, latency_s=latency_s) as slow,
                dlio.open(slow, tiers="none") as source,
                dlio.DataLoader(
                    source, 64, shuffle=True, source_order=order, num_workers=4
                ) as loader,
            ):
                before = stats(slow)["reads"]
                began, seen = time.perf_counter(), 0
                for _ in loader:
                    seen += len(loader.last_samples)
                    if seen >= at_most:
                        break
                seconds = time.perf_counter() - began
                results[order] = {
                    "samples_per_s": seen / seconds,
                    "reads_a_sample": (stats(slow)["reads"] - before) / seen,
                    "unevenness": _unevenness_of(source.reader.layout, order),
                }
    return results


def _unevenness_of(layout: Any, source_order: str) -> float:
    from dlio.plan.block_order import BlockOrder, window_of
    from dlio.plan.order import Order

    count, window = int(layout.starts[-1]), window_of(source_order)
    order = Order(count, 1) if window is None else BlockOrder(count, 1, 0, True, layout, window)
    stored = layout.order.positions(order.samples(np.arange(count, dtype=np.int64)))
    batches = stored[: count // _GLOBAL_BATCH * _GLOBAL_BATCH].reshape(-1, _GLOBAL_BATCH)
    return float(np.sqrt(np.mean(np.square(_unevenness(batches, count)))))
