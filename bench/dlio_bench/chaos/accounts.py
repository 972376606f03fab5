"""Arithmetic of `dlio bench chaos`, without a job."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dlio.train.ledger_file import LedgerLine, check_ledger
from dlio_bench.chaos.stamps import FinishedStep

UnevenEpoch = dict[str, int]
"""An epoch in which some samples were not trained on exactly once: its number, `epoch`, samples
that nobody trained on, `lost`, times that one was trained on after the first, `doubled`, and wrong
lines of its trace, `problems`."""


def uneven_epochs(trace: Iterable[LedgerLine], samples: int, epochs: int) -> list[UnevenEpoch]:
    """Return the epochs of a trace in which not every sample came exactly once."""
    return [
        {
            "epoch": each.epoch,
            "lost": each.lost,
            "doubled": each.doubled,
            "problems": len(each.problems),
        }
        for each in check_ledger(trace, samples, epochs)
        if not each.exact
    ]


def uneven_totals(jobs: Sequence[Sequence[UnevenEpoch] | None]) -> dict[str, int | None]:
    """Return the samples that were lost and doubled, and wrong lines of traces.

    Jobs without a trace are None, and so are the figures if no job has one.
    """
    known = [job for job in jobs if job is not None]
    names = {"samples_lost": "lost", "samples_doubled": "doubled", "ledger_problems": "problems"}
    return {
        name: sum(each[key] for job in known for each in job) if known else None
        for name, key in names.items()
    }


@dataclass(frozen=True, slots=True)
class EffectiveSteps:
    """Time of a job, and the part of it that counts."""

    counted_s: float
    """Time in steps that count."""
    wall_s: float
    """Time from the end of the first step to that of the last one."""
    steps: int
    """Steps of the job, each counted once."""
    redone: int
    """Times that a step was made which a later process made again."""


def effective_time(
    runs: Sequence[Sequence[FinishedStep]], disturbed: Sequence[tuple[float, float]]
) -> EffectiveSteps:
    """Return the effective time of a job. Its quotient is the effective training time ratio:

        ETTR = time in steps that count / wall time from the first step to the end

    A step counts once, in the last process that made it: steps that are made again after a restart
    do not count before it. A step lasts from the end of the one before to its own end. One that a
    fault disturbed counts at most as long as the median step of as many ranks, and so does the
    first one of a process, whose beginning is not seen. Waiting, regrouping, starting and steps
    made again are thus lost time; a step that takes longer because fewer ranks share it is not.

    Source: Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
    Clusters", arXiv 2410.21680: productive over available time of a job.

    Args:
        runs: steps of each process of the job, ascending; one that survives its faults has one.
        disturbed: (begin, end) of the times in which a fault was felt.
    """
    made = [list(run) for run in runs if run]
    if not made:
        return EffectiveSteps(0.0, 0.0, 0, 0)
    last_run = {step.number: number for number, run in enumerate(made) for step in run}
    whole: dict[int, list[float]] = {}
    others: list[tuple[int, float | None]] = []
    counted_s = 0.0
    for number, run in enumerate(made):
        for place, step in enumerate(run):
            counts = last_run[step.number] == number
            if not place:
                if number and counts:
                    others.append((step.ranks, None))
                continue
            before = run[place - 1].at
            if any(begin <= step.at and end >= before for begin, end in disturbed):
                if counts:
                    others.append((step.ranks, step.at - before))
                continue
            whole.setdefault(step.ranks, []).append(step.at - before)
            counted_s += step.at - before if counts else 0.0
    everything = [seconds for each in whole.values() for seconds in each]
    for ranks, seconds in others:
        usual = statistics.median(whole.get(ranks) or everything or [0.0])
        counted_s += usual if seconds is None else min(seconds, usual)
    return EffectiveSteps(
        counted_s=counted_s,
        wall_s=made[-1][-1].at - made[0][0].at,
        steps=len(last_run),
        redone=sum(map(len, made)) - len(last_run),
    )


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return `count`, and `median`, `p90`, `p99` and `max` if there is a value.

    Quantiles are values that were measured: of few, p99 is the largest one.
    """
    if not values:
        return {"count": 0}
    shares = {"p90": 0.9, "p99": 0.99, "max": 1.0}
    chosen = np.quantile(values, list(shares.values()), method="higher").tolist()
    return {
        "count": len(values),
        "median": statistics.median(values),
        **dict(zip(shares, chosen, strict=True)),
    }
