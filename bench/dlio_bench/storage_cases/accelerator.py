"""An accelerator that takes the time of a step and computes nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """A step; times in seconds."""

    busy_s: float
    """Time that the accelerator was busy."""
    over_s: float
    """Time that the host's work took longer than the step: the accelerator idled."""


class Accelerator:
    """Emulates the compute time of steps.

    The host may work meanwhile, as it may while a real accelerator computes.

    Args:
        step_s: mean compute time of a step in seconds.
        stdev_s: standard deviation of the normal distribution that step times are drawn from; the
            absolute value of a negative one is taken, as DLIO does.
        seed: of the step times; each rank has its own.
    """

    def __init__(self, step_s: float, stdev_s: float, seed: int) -> None:
        self._step_s, self._stdev_s = step_s, stdev_s
        self._generator = np.random.default_rng(seed)

    def compute(self, host: Callable[[], object] = lambda: None) -> ComputeStep:
        """Return after a step's time, and at least when `host` has returned."""
        began = time.perf_counter()
        wanted = self._step_s
        if self._stdev_s:
            wanted = abs(float(self._generator.normal(self._step_s, self._stdev_s)))
        host()
        took = time.perf_counter() - began
        if took >= wanted:
            return ComputeStep(wanted, took - wanted)
        time.sleep(wanted - took)
        return ComputeStep(time.perf_counter() - began, 0.0)
