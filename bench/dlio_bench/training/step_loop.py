"""Training steps in parts: loading, forward and backward, exchange, optimizer."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlio.exchange.distribute import ExchangeHandle

PARTS: Final = ("load wait", "forward and backward", "exchange", "optimizer")
Batches = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


@dataclass(slots=True)
class LoopTimes:
    """Times of consecutive steps of one rank."""

    steps_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    """Processor time of all threads, of all steps."""
    held_s: float = 0.0
    """Time of the calls of `before_update`, of all steps."""
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Mean seconds of a step by part."""


class BenchLoop:
    """A network that is trained step by step.

    Args:
        batches: returns an iterator of batches; called again whenever one ends.
    """

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        self.before_update: Callable[[], object] = lambda: None
        """Called in each step before the parameters change."""
        self._batches = batches
        self._left = batches()

    @property
    def bytes(self) -> int:
        """Bytes of all gradients as float32."""
        return 4 * sum(parameter.numel() for parameter in self.model.parameters())

    def steps(self, count: int, exchange: ExchangeHandle | None) -> LoopTimes:
        """Make steps and return their times."""
        times = LoopTimes()
        before = time.process_time()
        for _ in range(count):
            self._step(exchange, times)
        times.cpu_s = time.process_time() - before
        times.parts_s = {name: total / count for name, total in times.parts_s.items()}
        return times

    def _step(self, exchange: ExchangeHandle | None, times: LoopTimes) -> None:
        began = time.perf_counter()
        inputs, labels = self._next()
        loaded = time.perf_counter()
        waited = _waited(exchange)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(cross_entropy(self.model(inputs), labels))
        waited = _waited(exchange) - waited
        computed = time.perf_counter()
        if exchange is not None:
            exchange.before_step()
        exchanged = time.perf_counter()
        self.before_update()
        ready = time.perf_counter()
        times.held_s += ready - exchanged
        self.optimizer.step()
        stepped = time.perf_counter()
        if exchange is not None:
            exchange.after_step()
        ended = time.perf_counter()
        times.steps_s.append(ended - began)
        seconds = (
            loaded - began,
            computed - loaded - waited,
            waited + exchanged - computed + ended - stepped,
            stepped - ready,
        )
        for name, each in zip(PARTS, seconds, strict=True):
            times.parts_s[name] += each

    def _next(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(self._left, None)
        if batch is None:
            self._left = self._batches()
            batch = next(self._left)
        return batch


def _waited(exchange: ExchangeHandle | None) -> float:
    return 0.0 if exchange is None else exchange.statistics()["wait_s"]
