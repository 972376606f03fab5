"""An accelerator that takes the time of a step and computes nothing."""

import time
from collections.abc import Callable

import numpy as np

__all__ = ["Accelerator"]


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

    def compute(self, host: Callable[[], object] = lambda: None) -> float:
        """Return after a step's time, and at least when `host` has returned. Return the seconds
        that it took."""
        began = time.perf_counter()
        wanted = self._step_s
        if self._stdev_s:
            wanted = abs(float(self._generator.normal(self._step_s, self._stdev_s)))
        host()
        left = began + wanted - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return time.perf_counter() - began
