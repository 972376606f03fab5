"""Utilisation of an accelerator and throughput of an epoch, as MLPerf Storage defines them. Pure.

An epoch of a rank is a sequence of steps: load a batch, compute, wait for the other ranks. The
first step is left out, because it contains the start of the loader. As in DLIO
(`statscounter.py`), the time until the last rank's barrier counts, and so does the loader's search
for a batch that does not come any more:

    utilisation = sum of compute times from the second step on
                  / (time of the epoch - load and compute time of the first step)

Where the benchmark's own comparison of a step's samples takes longer than the step, the time beyond
the step is neither the accelerator's nor the loader's: it does not count.

Source: MLCommons, MLPerf Storage rules, "Accelerator Utilization"; DLIO, commit e1919d7.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEFT_OUT = 1
"""Steps at the beginning of an epoch that do not count."""
LEAST_STEPS = 10
"""Steps that have to count for a utilisation: of fewer, one that is late by its own time is more
than 10 points, and so is the end of a loader's pass, which counts, too."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One rank's epoch; times in seconds."""

    load_s: Sequence[float]
    """Time until each batch came; shape (steps,)."""
    compute_s: Sequence[float]
    """Time that the accelerator was busy; shape (steps,)."""
    over_s: Sequence[float]
    """Time beyond each step that the benchmark compared its samples; shape (steps,)."""
    seconds: float
    """Time from the start of the loader's pass to the end of the last step."""
    batch_size: int

    @property
    def counted_s(self) -> float:
        """Time of the epoch without the first step, and without the benchmark's own part."""
        first = sum(self.load_s[:LEFT_OUT]) + sum(self.compute_s[:LEFT_OUT])
        return self.seconds - first - sum(self.over_s)

    @property
    def utilisation(self) -> float:
        """Share of time that the accelerator was busy, 0 to 1; 0 for an epoch of one step."""
        busy = sum(self.compute_s[LEFT_OUT:])
        return busy / self.counted_s if busy else 0.0

    @property
    def throughput(self) -> float:
        """Samples per second of this rank without the first step; 0 for an epoch of one step."""
        steps = len(self.load_s) - LEFT_OUT
        return steps * self.batch_size / self.counted_s if steps > 0 else 0.0

    @property
    def dlio_throughput(self) -> float:
        """Samples per second as DLIO counts them: it leaves out one step more than its time."""
        steps = len(self.load_s) - LEFT_OUT - 1
        return steps * self.batch_size / self.counted_s if steps > 0 else 0.0


def least_seconds(steps: int, step_s: float, step_bytes: float, storage_rate: float) -> float:
    """Return the shortest time in which an epoch could end, in seconds.

    The accelerator cannot begin before its first batch has come, nor end before it has computed
    on the last one. All ranks together need `step_bytes` for a step; the storage gives
    `storage_rate` bytes per second to a parallel reader.
    """
    load_s = step_bytes / storage_rate
    return max(load_s + steps * step_s, steps * load_s + step_s)


# An accelerator that takes the time of a step and computes nothing


class Accelerator:
    """Emulates the compute time of steps.

    The host may work meanwhile, as it may while a real accelerator computes. Step times are drawn
    from a normal distribution, with a seed for each rank; the absolute value of a negative one is
    taken, as DLIO does.
    """

    def __init__(self, step_s: float, stdev_s: float, seed: int) -> None:
        self._step_s, self._stdev_s = step_s, stdev_s
        self._generator = np.random.default_rng(seed)

    def compute(self, host: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Come back after a step's time, and at least when `host` has returned.

        Returns seconds that the accelerator was busy, and seconds that it idled afterwards, as the
        host's work took longer than the step.
        """
        began = time.perf_counter()
        wanted = self._step_s
        if self._stdev_s:
            wanted = abs(float(self._generator.normal(self._step_s, self._stdev_s)))
        host()
        took = time.perf_counter() - began
        if took >= wanted:
            return wanted, took - wanted
        time.sleep(wanted - took)
        return time.perf_counter() - began, 0.0
