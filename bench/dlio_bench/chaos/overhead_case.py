"""`--case overhead`: step times of jobs without faults, with and without fault tolerance."""

import itertools
import os
import statistics
from collections.abc import Sequence
from typing import Any, Final

from dlio.errors import UsageError
from dlio.util.units import counted
from dlio_bench.chaos.chaos_job import ChaosCase
from dlio_bench.chaos.stamps import RankStamps
from dlio_bench.chaos.torchft_job import torchft_argv
from dlio_bench.results.repeats import interval_of_median, spread
from dlio_bench.results.terminal import steps

_MEGABYTES: Final = (25, 100)
_WARM_UP: Final = 5
"""Steps of a run that are left out."""
_MODES: Final = ("off", "shrink")
_OTHERS: Final = ("ddp", "torchft")
"""Training with --torchft, without and with torchft."""


def measure(case: ChaosCase) -> dict[str, object]:
    """Measure pairs of runs, one without and one with `--fault-tolerance shrink`, in turn.

    With `--torchft` also pairs without and with torchft.

    Which one comes first changes from pair to pair. A run's step time is the median over the steps
    of rank 0; the overhead is the median over the pairs of the ratio of both, with a confidence
    interval by the bootstrap over pairs (Efron and Tibshirani, "An Introduction to the Bootstrap",
    1993, chapter 13).

    Raises UsageError if a run fails.
    """
    options = case.options
    rows: list[dict[str, Any]] = []
    for megabytes in options.megabytes or _MEGABYTES:
        row = {"parameters_MB": megabytes, **_pairs(case, megabytes, _MODES)}
        if options.torchft is not None:
            other = _pairs(case, megabytes, _OTHERS)
            row |= {
                key if "ddp" in key or "torchft" in key else f"torchft_{key}": figure
                for key, figure in other.items()
            }
        rows.append(row)
    return {
        "rows": rows,
        "said": [
            f"{counted(options.repeats, 'pair')} of runs on {counted(options.ranks, 'rank')}, "
            f"{options.exchange}. "
            "shrink over off: median of the pairs' ratios of step times, and its 95 % confidence "
            "interval by the bootstrap. Memory is the largest of a rank. ddp: torch's "
            "DistributedDataParallel over gloo, which torchft has under it."
        ],
    }


def _pairs(case: ChaosCase, megabytes: int, modes: tuple[str, str]) -> dict[str, Any]:
    """Measure pairs of runs with a model, and return the second mode over the first."""
    options = case.options
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    peaks: dict[str, list[float]] = {mode: [] for mode in modes}
    for pair in steps(range(options.repeats), f"{megabytes} MB, pair {{}}".format):
        for mode in modes[:: -1 if pair % 2 else 1]:
            own = os.path.join(case.folder, f"{megabytes}-{pair}-{mode}")
            ranks = _run(case, own, megabytes, mode)
            seconds[mode].append(statistics.median(step_seconds(ranks[0])))
            peaks[mode].append(max(each.peak_kib or 0 for each in ranks) / 1024)
    without, with_ = modes
    ratios = [on / off for off, on in zip(seconds[without], seconds[with_], strict=True)]
    low, high = interval_of_median(ratios) or (ratios[0], ratios[0])
    return {
        **{f"step_s_{mode}": spread(seconds[mode]) for mode in modes},
        f"{with_}_over_{without}": statistics.median(ratios),
        "from_95_percent": low,
        "to_95_percent": high,
        **{f"peak_MiB_{mode}": statistics.median(peaks[mode]) for mode in modes},
        "ratios": ratios,
    }


def _run(case: ChaosCase, folder: str, megabytes: int, mode: str) -> list[RankStamps]:
    model = f"dlio_bench.chaos.stamps:sized(megabytes={megabytes})"
    if mode in _OTHERS:
        argv = torchft_argv(case.options, case.source, folder, model, plain=mode == "ddp")
    else:
        argv = case.train_argv(folder, ["--fault-tolerance", mode, "--lr", "0.001"], model)
    with case.job(argv, folder) as job:
        job.finish(f"a training ({mode})")
    ranks = job.stamps.ranks
    if len(step_seconds(ranks[0])) < 1:
        raise UsageError(
            f"an epoch has too few steps to time after {_WARM_UP}: give more data or --epochs"
        )
    return ranks


def step_seconds(rank: RankStamps) -> Sequence[float]:
    """Return the seconds between a rank's steps: without the first ones, nor between epochs."""
    steps = rank.steps[_WARM_UP:]
    return [
        after["t"] - before["t"]
        for before, after in itertools.pairwise(steps)
        if before["epoch"] == after["epoch"]
    ]
