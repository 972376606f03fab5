"""`--case suspicions`: a job that nobody hurts, on a busy machine, whose ranks pause at random.

No rank of it may be suspected, killed or named.
"""

import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dlio.train.callbacks import Callback, Run
from dlio_bench.bench_processes import spinning_processes
from dlio_bench.chaos.chaos_job import ChaosCase

_WORDS: Final = ("hangs and is killed", "times slower than", " lost at step", " lost: ")
"""Parts of what a job says about a rank that it suspects, or has lost."""


def measure(case: ChaosCase) -> dict[str, object]:
    """Train `options.steps` steps with pauses of `options.pause_s`, next to spinning processes.

    Raises UsageError if the job fails.
    """
    options = case.options
    in_epoch = -(-case.samples() // (options.ranks * options.batch_size))
    case = replace(case, options=replace(options, epochs=-(-options.steps // in_epoch)))
    own = os.path.join(case.folder, "job")
    pauses = (
        f"dlio_bench.chaos.suspicions:Pauses(seed={options.seed}, ranks={options.ranks}, "
        f"steps={options.steps}, count={options.pauses}, seconds={options.pause_s})"
    )
    more = ["--fault-tolerance", "shrink", "--evict-slow", "--callback", pauses]
    began = time.monotonic()
    with spinning_processes(options.spinning), case.job(case.train_argv(own, more), own) as job:
        job.finish()
    steps = [each.steps[-1]["step"] if each.steps else 0 for each in job.stamps.ranks]
    suspicions = suspicions_in([*job.output.splitlines(), *job.errors.splitlines()])
    longest = max(
        after["t"] - before["t"] for before, after in itertools.pairwise(job.stamps.ranks[0].steps)
    )
    row = {
        "ranks": options.ranks,
        "steps": min(steps),
        "pauses": options.pauses,
        "spinning": options.spinning,
        "longest_step_s": longest,
        "seconds": time.monotonic() - began,
        "suspicions": len(suspicions),
    }
    said = f"Pauses of {options.pause_s:g} s outside MPI, each of one rank at one step."
    return {"rows": [row], "said": [said, *suspicions]}


def suspicions_in(lines: Sequence[str]) -> list[str]:
    """Return the lines of a job's output that suspect or lose a rank."""
    return [line.strip() for line in lines if any(words in line for words in _WORDS)]


def pauses_of(seed: int, ranks: int, steps: int, count: int) -> dict[int, int]:
    """Return the rank that pauses after each of `count` of the steps, by step from 1."""
    drawn = random.Random(seed)
    chosen = drawn.sample(range(1, steps + 1), min(count, steps))
    return {step: drawn.randrange(ranks) for step in chosen}


class Pauses(Callback):
    """Sleeps at this rank's pauses."""

    def __init__(self, seed: int, ranks: int, steps: int, count: int, seconds: float) -> None:
        self._pauses = pauses_of(seed, ranks, steps, count)
        self._seconds = seconds
        self._rank = -1

    def begins(self, run: Run) -> None:
        self._rank = run.comm.rank

    def after_step(self, run: Run) -> None:
        if self._pauses.get(run.updates) == self._rank:
            time.sleep(self._seconds)
