"""`--case checkpoint`: how long checkpoints stop the steps of networks.

All ranks train with the first exchange that is asked for, and each writes the network's parameters
and momenta with dlio, and with torch.distributed.checkpoint's async_save and save, in turn.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from typing import Any, Final

import numpy as np
import torch

from dlio.comm import Communicator
from dlio.exchange.distribute import ExchangeHandle
from dlio.util.units import format_bytes
from dlio_bench.bench_ranks import TaskValue, run
from dlio_bench.checkpoint_cases.methods import STALLING, Stall, measure_stalls, stall_figures
from dlio_bench.results.report_values import Results, Waterfall
from dlio_bench.results.terminal import show_figures, steps, working
from dlio_bench.training.bench_networks import make_batch, make_network
from dlio_bench.training.scaling_measurements import batch_of, side_of
from dlio_bench.training.training_options import TrainingBenchOptions
from dlio_bench.training.training_rank import BenchLoop, exchange_of

_EVERY: Final = 50
"""Steps from one checkpoint to the next, of which a stall is a share."""
_TIMEOUT_S: Final = 1800.0


class InterruptibleTraining:
    """Steps of a network between which checkpoints are taken."""

    def __init__(self, loop: BenchLoop, exchange: ExchangeHandle | None) -> None:
        self._loop, self._exchange = loop, exchange

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Train on a batch; return the seconds that `before_update` took."""
        self._loop.before_update = before_update
        return self._loop.steps(1, self._exchange).held_s

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and momenta, not copied."""
        tensors = {}
        for name, parameter in self._loop.model.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
            tensors[f"momentum/{name}"] = self._loop.optimizer.state[parameter]["momentum_buffer"]
        return tensors


def measure(options: TrainingBenchOptions, results: Results) -> None:
    """Measure each network on the largest number of ranks, and print the stalls."""
    ranks = options.rank_counts[-1]
    exchange = options.exchange_names[0]
    answers: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="dlio-bench-", dir=options.checkpoints) as folder,
        working("checkpoints"),
    ):
        for network in steps(options.network_names):
            task = {
                "network": network,
                "side": side_of(options, network),
                "batch_size": batch_of(options, network, ranks, "weak"),
                "exchange": exchange,
                "steps": options.steps,
                "repeats": options.repeats,
                "seed": options.seed,
                "folder": folder,
            }
            answers[network] = run(stalls_of, task, ranks, timeout_s=_TIMEOUT_S)
    for network, answer in answers.items():
        stalls = [Stall(**each) for each in answer["stalls"]]
        labels = {"network": network, "ranks": str(ranks), "exchange": exchange}
        report(labels, stalls, answer["bytes"], results)


def report(labels: Mapping[str, str], stalls: Sequence[Stall], size: int, results: Results) -> None:
    """Print the stalls of a network, which is among the labels, and add them to the results.
    `size` is that of a rank's checkpoint in bytes."""
    figures, ratios = stall_figures(stalls, _EVERY, labels)
    title = f"{labels['network']}: checkpoints of {format_bytes(size)} a rank"
    show_figures(title, figures, ratios)
    results.figures += figures
    results.ratios += ratios
    for method in dict.fromkeys(each.method for each in stalls):
        mine = [each for each in stalls if each.method == method]
        step = float(np.median([each.step_s for each in mine]))
        blocked = float(np.median([each.blocked_s for each in mine]))
        slower = float(np.median([each.slower_s for each in mine]))
        parts = {
            "steps": _EVERY * step,
            "blocked by a checkpoint": blocked,
            "slowed down by a checkpoint": max(0.0, slower - blocked),
        }
        results.waterfalls.append(Waterfall(f"{_EVERY} steps", parts, {**labels, "method": method}))


def stalls_of(comm: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Stalls of a network's steps, and bytes of a rank's checkpoint."""
    network, side, size = task["network"], task["side"], task["batch_size"]
    batch = make_batch(network, size, side, seed=task["seed"] + comm.rank)
    loop = BenchLoop(make_network(network, side, task["seed"]), lambda: repeat(batch))
    exchange = exchange_of(task["exchange"], loop, comm) if comm.size > 1 else None
    try:
        training = InterruptibleTraining(loop, exchange)
        training.step()
        stalls = measure_stalls(
            task["folder"], STALLING, training, task["steps"], task["repeats"], comm
        )
        written = sum(tensor.nbytes for tensor in training.tensors().values())
    finally:
        if exchange is not None:
            exchange.close()
    return {"stalls": [asdict(each) for each in stalls], "bytes": written}
