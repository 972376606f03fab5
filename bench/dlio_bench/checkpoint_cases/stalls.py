"""A training loop on this processor that checkpoints interrupt."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch import nn

from dlio.comm.comm_protocol import Communicator
from dlio_bench.checkpoint_cases.methods import METHODS, Method
from dlio_bench.results.repeats import median
from dlio_bench.results.report_values import Figure, Ratio

STALLING: Final = ("dlio", "dcp async_save", "dcp save")
"""Methods whose stalls are measured."""
_WARM_UP: Final = 3
_LAYERS: Final = 4


@dataclass(frozen=True, slots=True)
class Stall:
    """One checkpoint of a method during training; seconds."""

    method: str
    blocked_s: float
    """Time in which training could not go on, because of calls."""
    slower_s: float
    """Time that the steps until the next checkpoint took beyond as many plain ones, calls and the
    work of other threads included."""
    step_s: float
    """Median time of a plain step, before this checkpoint."""
    steps: int
    """Steps that were looked at."""


class TrainingLoop(Protocol):
    """A training loop."""

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Train on a batch; return the seconds that `before_update` took."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors, not copied; they change only after `before_update`."""


class StallTraining:
    """A multilayer perceptron with AdamW, as large as wanted.

    Args:
        state_bytes: bytes of parameters and both moments.
        batch_size: samples of a step.
    """

    def __init__(self, state_bytes: int, batch_size: int) -> None:
        width = max(8, int((state_bytes / (3 * 4 * _LAYERS)) ** 0.5))
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self._net = nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-4)
        self._batch = torch.randn(batch_size, width)
        self.step()

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Train on a batch; return the seconds that `before_update` took."""
        self._net(self._batch).square().mean().backward()
        began = time.perf_counter()
        before_update()
        blocked_s = time.perf_counter() - began
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return blocked_s

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and the optimizer's state, not copied."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._net.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{key}"] = value
        return tensors


def measure_stalls(
    folder: str,
    methods: tuple[str, ...],
    training: TrainingLoop,
    steps: int,
    repeats: int,
    comm: Communicator,
    advance: Callable[[str], object] = lambda _: None,
) -> list[Stall]:
    """Return the stalls of each method's checkpoints, the methods in turn.

    Before each checkpoint `steps` plain steps are timed, and `steps` after it.
    """
    for _ in range(_WARM_UP):
        training.step()
    running: dict[str, Method] = {
        name: METHODS[name](os.path.join(folder, f"stall-{k}-{comm.rank}"))
        for k, name in enumerate(methods)
    }
    stalls = []
    try:
        for repeat in range(-1, repeats):  # The first allocates memory, and does not count.
            order = list(running) if repeat % 2 == 0 else list(running)[::-1]
            for name in order:
                stall = _one(name, running[name], training, steps, repeat + 2, comm)
                advance(name)
                if repeat >= 0:
                    stalls.append(stall)
    finally:
        for method in running.values():
            method.close()
    return stalls


def _one(
    name: str, method: Method, training: TrainingLoop, steps: int, number: int, comm: Communicator
) -> Stall:
    plain = []
    for _ in range(steps):
        began = time.perf_counter()
        training.step()
        plain.append(time.perf_counter() - began)
    comm.barrier()
    began = time.perf_counter()
    method.save(number, training.tensors())
    blocked_s = time.perf_counter() - began
    for _ in range(steps):
        blocked_s += training.step(method.before_update)
    total_s = time.perf_counter() - began
    method.finish()
    step_s = median(plain)
    return Stall(name, blocked_s, total_s - sum(plain), step_s, steps)


def stall_figures(
    stalls: Sequence[Stall], every: int, common: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Figure], list[Ratio]]:
    """Return milliseconds of each method's stall, its share of `every` steps, and ratios to DCP's.

    Args:
        common: labels of all.
    """
    figures, blocked = [], {}
    for name in dict.fromkeys(each.method for each in stalls):
        mine = [each for each in stalls if each.method == name]
        labels = {**common, "method": name}
        blocked[name] = tuple(1e3 * each.blocked_s for each in mine)
        share = tuple(100 * each.blocked_s / (every * each.step_s) for each in mine)
        slower = tuple(1e3 * each.slower_s for each in mine)
        steps = tuple(1e3 * each.step_s for each in mine)
        figures += [
            Figure("blocked", "ms", blocked[name], labels, "lower"),
            Figure(f"blocked, of {every} steps", "%", share, labels, "lower"),
            Figure("slower", "ms", slower, labels, "lower"),
            Figure("plain step", "ms", steps, labels, "lower"),
        ]
    ratios = [
        Ratio(
            f"blocked, dlio / {name}",
            tuple(a / b for a, b in zip(blocked["dlio"], values, strict=True)),
            dict(common),
            better="lower",
        )
        for name, values in blocked.items()
        if name != "dlio"
    ]
    return figures, ratios
