"""`--case script`: what `dlio run` adds to the steps of a script, to see that it trains as one
process does.

One job runs a plain script, and turns what it watches off and on again every few steps: digests of
the ranks' calls, weights and losses, the search for the terms of a loss and their messages, and the
lines that read numbers. Both halves of a pair of blocks are neighbours in time; which one comes
first changes from pair to pair. A block's time is the median of its steps.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, Final

from dlio.comm import Communicator
from dlio.integrations.script.guard import ScriptGuard
from dlio.integrations.script.loss_weights import ScriptLossWeights
from dlio.integrations.script.readings import Readings
from dlio.integrations.script.run_options import RunOptions
from dlio.integrations.script.runner import run_script
from dlio_bench.bench_ranks import TaskValue, run
from dlio_bench.results.repeats import interval_of_median
from dlio_bench.results.report_values import Figure, Ratio, Results
from dlio_bench.results.terminal import show_figures, show_notes, steps, working
from dlio_bench.training.scaling_measurements import batch_of, side_of
from dlio_bench.training.training_options import TrainingBenchOptions

_RANKS: Final = 2
_WARM_UP: Final = 2
"""Blocks that are left out."""
_PAIRS: Final = 20
_TIMEOUT_S: Final = 1800.0
_NO_LOSSES: Final = nullcontext[list[object]]([])
_SCRIPT: Final = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from dlio_bench.training.bench_networks import make_batch, make_network

network, side, batch_size, batches, seed = sys.argv[1], *map(int, sys.argv[2:])
model = make_network(network, side, seed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs, targets = make_batch(network, batch_size * 4, side, seed)
data = torch.utils.data.ConcatDataset([TensorDataset(inputs, targets)] * (batches // 4))
for inputs, targets in DataLoader(data, batch_size):
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
"""


def measure(options: TrainingBenchOptions, results: Results) -> None:
    """Measure each network on two ranks, and print the ratios of step times."""
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    with working("scripts"):
        for network in steps(options.network_names):
            task = {
                "network": network,
                "side": side_of(options, network),
                "batch_size": batch_of(options, network, 1, "weak"),
                "block": options.steps,
                "pairs": _PAIRS * options.repeats,
                "seed": options.seed,
            }
            answer = run(blocks_of, task, _RANKS, timeout_s=_TIMEOUT_S)
            labels = {"network": network, "ranks": str(_RANKS)}
            on, off = answer["on"], answer["off"]
            for key, seconds in (("watched", on), ("not watched", off)):
                values = tuple(1000 * each for each in seconds)
                figures.append(Figure("step", "ms", values, {**labels, "script": key}, "lower"))
            paired = tuple(a / b for a, b in zip(on, off, strict=True))
            ratios.append(Ratio("watched / not watched", paired, labels, "lower"))
    show_figures("what `dlio run` watches", figures, ratios)
    intervals = [
        f"{each.labels['network']}: 95 % interval of the median ratio {low:.4f} to {high:.4f}"
        for each in ratios
        for low, high in [interval_of_median(each.values) or (0.0, 0.0)]
    ]
    show_notes(intervals)
    results.figures += figures
    results.ratios += ratios
    results.notes += intervals


def blocks_of(_: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Seconds of a step in blocks that are watched, and in those that are not."""
    block, pairs = task["block"], task["pairs"]
    batches = -(-block * (2 * pairs + _WARM_UP) // 4) * 4 + 4
    clock = _BlockClock(block)
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as folder, clock.installed():
        path = os.path.join(folder, "step.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(_SCRIPT)
        arguments = ("network", "side", "batch_size")
        argv = [*(str(task[name]) for name in arguments), str(batches), str(task["seed"])]
        run_script(path, argv, RunOptions())
    seconds = {False: list[float](), True: list[float]()}
    for is_on, of_steps in clock.blocks[_WARM_UP : _WARM_UP + 2 * pairs]:
        seconds[is_on].append(median(of_steps))
    return {"on": seconds[True], "off": seconds[False]}


class _BlockClock:
    """Measures blocks of steps of a script, every second of which is not watched."""

    def __init__(self, block: int) -> None:
        self._block = block
        self.blocks: list[tuple[bool, list[float]]] = [(True, [])]
        """By block, whether it was watched, and the seconds of its steps."""
        self._began: float | None = None

    @property
    def _is_on(self) -> bool:
        return self.blocks[-1][0]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over parts of `dlio run` inside the `with` block."""
        originals = []

        def put(owner: type, name: str, otherwise: Callable[..., Any]) -> None:
            original = getattr(owner, name)
            originals.append((owner, name, original))

            def either(*args: Any, **options: Any) -> Any:
                return (original if self._is_on else otherwise)(*args, **options)

            setattr(owner, name, either)

        put(ScriptGuard, "note", lambda *_: None)
        put(ScriptGuard, "stepped", lambda *_: None)
        put(ScriptGuard, "backward", lambda *_: _NO_LOSSES)
        put(ScriptGuard, "depart", lambda _, into, *__: into.zero_())
        put(ScriptGuard, "arrive", lambda *_: None)
        put(ScriptLossWeights, "_quick", lambda *_: False)
        put(ScriptLossWeights, "_weighed", _weighed_by_samples)
        put(Readings, "_note", lambda *_: None)
        took = ScriptGuard.took_batch
        originals.append((ScriptGuard, "took_batch", took))

        def next_batch(guard: ScriptGuard, use: object = None) -> None:
            self._next()
            if self._is_on:
                took(guard, use)

        setattr(ScriptGuard, "took_batch", next_batch)  # noqa: B010 - mypy refuses a method
        try:
            yield
        finally:
            for owner, name, original in reversed(originals):
                setattr(owner, name, original)

    def _next(self) -> None:
        now = time.perf_counter()
        if self._began is not None:
            self.blocks[-1][1].append(now - self._began)
        if len(self.blocks[-1][1]) == self._block:
            # On, off, off, on, and so on.
            self.blocks.append((len(self.blocks) % 4 in (0, 3), []))
        self._began = time.perf_counter()


@contextmanager
def _weighed_by_samples(weights: Any, _: object, __: object, batch: Any) -> Iterator[None]:
    for exchange in weights._exchanges():
        exchange.weigh(batch.weight)
    yield None
