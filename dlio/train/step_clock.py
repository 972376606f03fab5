"""The time that a rank computes in each step."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from dlio.plan.rank_shares import LEAST_S


class StepClock:
    """Time that one rank computes in each step, without the seconds `waited` for other ranks."""

    def __init__(self, waited: Callable[[], float], device: torch.device | None = None) -> None:
        self._waited = waited
        self.device = device if device is not None and device.type == "cuda" else None
        """A GPU to synchronise with at the end of a step, because it runs asynchronously."""
        self.is_on = self.device is None
        """False if steps are not timed: synchronising with a GPU at each step is slow."""
        self.steps: list[tuple[int, float]] = []
        """(samples, seconds) of each step."""

    @contextlib.contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Time the body of a `with` statement as one step."""
        if not self.is_on:
            yield
            return
        began, waited = time.perf_counter(), self._waited()
        yield
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began - (self._waited() - waited)
        self.steps.append((samples, max(seconds, LEAST_S)))

    def rate(self) -> float | None:
        """Samples per second that this rank computes; None before it has computed any."""
        rates = [samples / seconds for samples, seconds in self.steps if samples]
        return statistics.median(rates) if rates else None
