"""The ranks of `dlio bench train`: runs, each of a network, a batch size and exchanges.

Processors of shared machines change their speed within seconds. So the exchanges are
passed through there and back, in an order drawn anew each round, and between any two of them steps
without an exchange are timed: what an exchange adds is its difference to those before and after it.

Two ranks that share a core evict each other's data from its caches, and wait for messages until the
other has had its turn. Both are measured with two ranks on one core: how much longer than twice as
long their steps take, between steps of one while the other sleeps, and the time that exchanges add.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlio.comm import Communicator
from dlio.exchange.buckets import in_buckets, trainable
from dlio.exchange.distribute import ExchangeHandle, distribute
from dlio.exchange.exchange_spec import parse_exchange
from dlio.util.heap import keep_freed_memory
from dlio_bench.bench_ranks import TaskValue
from dlio_bench.exchange_cases.variants import nodes_for
from dlio_bench.training.bench_networks import NETWORKS, make_batch, make_network

NONE: Final = "none"
"""Steps without any exchange."""
_WARM: Final = 2
_LEAST_S: Final = 0.3
"""Of a pass: on shared cores, ranks take turns of some milliseconds."""
_ALONE: Final = 12
"""Passes of each run of a single rank, at most."""
_CROWDED: Final = 8
"""Passes in which two ranks share a core."""
_AWAKE: Final = 7
"""Tag of the message that ends a rank's sleep."""
_ALONE_S: Final = 4.0
"""After this time for each run there are no more than two passes."""
_PARTS: Final = ("load wait", "forward and backward", "exchange", "optimizer")
Batches = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


# Training steps in parts: loading, forward and backward, exchange, optimizer


@dataclass(slots=True)
class LoopTimes:
    """Times of consecutive steps of one rank."""

    steps_s: list[float] = field(default_factory=list)
    held_s: float = 0.0
    """Time of the calls of `before_update`, of all steps."""
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    """Mean seconds of a step by part."""


class BenchLoop:
    """A network that is trained step by step, on iterators that `batches` returns: another one
    whenever one ends."""

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
        for _ in range(count):
            self._step(exchange, times)
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
        for name, each in zip(_PARTS, seconds, strict=True):
            times.parts_s[name] += each

    def _next(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(self._left, None)
        if batch is None:
            self._left = self._batches()
            batch = next(self._left)
        return batch


def _waited(exchange: ExchangeHandle | None) -> float:
    return 0.0 if exchange is None else exchange.statistics()["wait_s"]


# The ranks


def measure_steps(comm: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Return the times of each run's steps by exchange, and the size of its network.

    The task has `runs`, `steps`, `data` and the number of the `round`.
    """
    keep_freed_memory()
    return {"runs": (_alone if comm.size == 1 else _together)(task, comm)}


def _together(task: dict[str, Any], comm: Communicator) -> list[dict[str, Any]]:
    results = []
    for run in task["runs"]:
        with ExitStack() as stack:
            loop = _loop(run, task, comm, stack)
            extra: dict[str, Any] = {}
            if run.get("one_core"):
                stack.enter_context(_one_core(comm))
                extra = {"crowding": _crowding(loop, task, comm)}
            steps = _there_and_back(run["exchanges"], loop, task, comm)
        results.append({**_result(run, loop, steps), **extra})
    return results


def _alone(task: dict[str, Any], comm: Communicator) -> list[dict[str, Any]]:
    """Measure a single rank, which exchanges nothing: all runs in turn, again and again, because
    forecasts multiply their errors."""
    runs = task["runs"]
    with ExitStack() as stack:
        loops = [_loop(run, task, comm, stack) for run in runs]
        passes: list[list[dict[str, Any]]] = [[] for _ in runs]
        began = time.monotonic()
        for number in range(_ALONE):
            if number >= 2 and time.monotonic() - began > _ALONE_S * len(runs):
                break
            for loop, times in zip(loops, passes, strict=True):
                times.append(_pass(NONE, loop, task, comm))
        return [
            _result(run, loop, {NONE: _mean(times)})
            for run, loop, times in zip(runs, loops, passes, strict=True)
        ]


def _loop(
    run: dict[str, Any], task: dict[str, Any], comm: Communicator, stack: ExitStack
) -> BenchLoop:
    batches = _batches(run, task["data"], comm, stack)
    loop = BenchLoop(make_network(run["network"], run["side"], run["seed"]), batches)
    loop.steps(_WARM, None)
    return loop


def _result(run: dict[str, Any], loop: BenchLoop, steps: Mapping[str, object]) -> dict[str, Any]:
    buckets = len(in_buckets(trainable(loop.model)))
    return {**run, "bytes": loop.bytes, "buckets": buckets, "steps": steps}


def _there_and_back(
    exchanges: Sequence[str], loop: BenchLoop, task: dict[str, Any], comm: Communicator
) -> dict[str, dict[str, Any]]:
    """Return the times of steps by exchange, NONE among them."""
    names = [name for name in exchanges if name != NONE]
    np.random.default_rng(task["round"]).shuffle(names)
    passes = {NONE: [_pass(NONE, loop, task, comm)]}
    for name in (*names, *reversed(names)):
        before = passes[NONE][-1]["step_s"]
        passes.setdefault(name, []).append(_pass(name, loop, task, comm))
        passes[NONE].append(_pass(NONE, loop, task, comm))
        beside = (before + passes[NONE][-1]["step_s"]) / 2
        passes[name][-1]["added_s"] = passes[name][-1]["step_s"] - beside
    return {name: _mean(each) for name, each in passes.items()}


def _mean(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {
        name: float(np.mean([each[name] for each in passes]))
        for name in ("step_s", "mean_s", "added_s")
    }
    parts = {
        name: float(np.mean([each["parts_s"][name] for each in passes]))
        for name in passes[0]["parts_s"]
    }
    return {**means, "parts_s": parts}


@contextmanager
def _one_core(comm: Communicator) -> Iterator[None]:
    """Have all ranks compute on the same core. Collective."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(comm.allgather(min(cores)))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _crowding(loop: BenchLoop, task: dict[str, Any], comm: Communicator) -> list[float]:
    """Return, of each pass, how many times as long as in turns the steps take of ranks that share a
    core."""
    alone = [_while_others_sleep(loop, task, comm)]
    ratios = []
    for _ in range(_CROWDED):
        count = _enough(loop.steps(_WARM, None), task["steps"], comm)
        comm.barrier()
        together = _gathered(loop.steps(count, None), comm)["mean_s"]
        alone.append(_while_others_sleep(loop, task, comm))
        ratios.append(together / comm.size / (sum(alone[-2:]) / 2))
    return ratios


def _while_others_sleep(loop: BenchLoop, task: dict[str, Any], comm: Communicator) -> float:
    """Return the seconds of a step of rank 0, whose core nobody else uses meanwhile."""
    comm.barrier()
    if comm.rank:
        request = comm.irecv(np.empty(1, np.uint8), 0, _AWAKE)
        while not request.done():
            time.sleep(_LEAST_S / 100)
        return float(comm.tell(0.0))
    warm = loop.steps(_WARM, None)
    count = max(task["steps"], math.ceil(_LEAST_S * _WARM / sum(warm.steps_s)))
    times = loop.steps(count, None).steps_s
    sent = [comm.isend(np.zeros(1, np.uint8), k, _AWAKE) for k in range(1, comm.size)]
    comm.wait(sent, "waking the other ranks")
    return float(comm.tell(sum(times) / count))


def exchange_of(name: str, loop: BenchLoop, comm: Communicator) -> ExchangeHandle:
    """Return the exchange of a loop's steps, named as for `--exchange`; the caller closes it.
    Collective."""
    nodes = nodes_for(name, 1, comm.size)
    return distribute(loop.model, loop.optimizer, name, pretend_nodes=nodes, follow_steps=False)


def _pass(name: str, loop: BenchLoop, task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    if name == NONE:
        count = _enough(loop.steps(_WARM, None), task["steps"], comm)
        comm.barrier()
        return _gathered(loop.steps(count, None), comm)
    period = parse_exchange(name).period
    exchange = exchange_of(name, loop, comm)
    try:
        # Whole periods before and in what is timed: each period ends with an exchange.
        warm = loop.steps(period if period > 1 else _WARM, exchange)
        count = -(-_enough(warm, task["steps"], comm) // period) * period
        comm.barrier()
        times = loop.steps(count, exchange)
    finally:
        exchange.close()
    return _gathered(times, comm)


def _enough(warm: LoopTimes, steps: int, comm: Communicator) -> int:
    """Return the number of steps that take _LEAST_S at least, the same on all ranks."""
    step_s = sum(warm.steps_s) / len(warm.steps_s)
    return max(comm.allgather(max(steps, math.ceil(_LEAST_S / step_s))))


def _gathered(times: LoopTimes, comm: Communicator) -> dict[str, Any]:
    """Return the times of a step: its seconds are those of the slowest rank, whom an exchange
    makes all wait for."""
    everywhere = comm.allgather((float(np.mean(times.steps_s)), list(times.parts_s.values())))
    steps_s, parts_s = zip(*everywhere, strict=True)
    parts = np.mean(parts_s, axis=0).tolist()
    return {
        "step_s": max(steps_s),
        "mean_s": float(np.mean(steps_s)),
        "added_s": 0.0,
        "parts_s": dict(zip(times.parts_s, parts, strict=True)),
    }


def _batches(
    run: dict[str, Any], data: str | None, comm: Communicator, stack: ExitStack
) -> Batches:
    """Return a source of batches: one of random samples again and again, or pictures of a data set
    through dlio's loader."""
    name, side, count = run["network"], run["side"], run["batch_size"]
    if data is None:
        batch = make_batch(name, count, side, seed=run["seed"] + comm.rank)
        return lambda: repeat(batch)
    return _pictures(data, side, count, NETWORKS[name].channels, stack)


def _pictures(data: str, side: int, batch_size: int, channels: int, stack: ExitStack) -> Batches:
    import dlio
    from dlio.train.model import normalised

    dataset = stack.enter_context(dlio.open(data, tiers="ram:1GiB", image_size=side))
    loader = stack.enter_context(
        dlio.DataLoader(dataset, batch_size, shuffle=True, drop_last=True, num_workers=1)
    )
    epoch = count()

    def one_epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader.set_epoch(next(epoch))
        for images, labels in loader:
            inputs = normalised(images, torch.device("cpu"))
            yield inputs[:, :channels], labels.long()

    return one_epoch
