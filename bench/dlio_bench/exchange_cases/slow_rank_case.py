"""`--case slow-rank`: speed of ranks next to one that computes four times as long."""

import statistics
import time
from typing import Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.comm import Communicator
from dlio.exchange.exchange_spec import parse_exchange
from dlio_bench.bench_ranks import TaskValue, run
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.paced_network import PacedNetwork
from dlio_bench.results.repeats import spread

_EXCHANGES: Final = ("allreduce", "gossip", "local-sgd", "asgd")
_RANKS: Final = 4
_FACTOR: Final = 4.0
_FORWARD_S: Final = 0.02
_FEATURES: Final = 64
_BATCH: Final = 8


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Samples per second of each of three ranks that mostly sleep, with a fourth that is slow, and
    with one that is not."""
    task = {
        "exchanges": options.exchanges or _EXCHANGES,
        "repeats": options.repeats,
        "seconds": options.seconds,
    }
    report = run(rates, task, _RANKS)
    rows = []
    for name, passes in report.items():
        alike = [statistics.mean(each["alike"]["rates"][:-1]) for each in passes]
        slowed = [statistics.mean(each["slow"]["rates"][:-1]) for each in passes]
        rows.append(
            {
                "exchange": name,
                "alike_per_s": spread(alike),
                "beside_a_slow_rank_per_s": spread(slowed),
                "kept_percent": spread([100 * b / a for a, b in zip(alike, slowed, strict=True)]),
                "slow_rank_per_s": spread([each["slow"]["rates"][-1] for each in passes]),
                "close_s": spread([max(each["slow"]["close_s"]) for each in passes]),
            }
        )
    return {
        "rows": rows,
        "said": [
            "Samples a second of a rank; 100 % kept is the ceiling, a quarter is left to "
            "ranks that wait for the slow one."
        ],
    }


# The ranks


def rates(
    comm: Communicator, exchanges: list[str], repeats: int, seconds: float
) -> dict[str, list[dict[str, TaskValue]]]:
    """Throughput of each exchange and repeat, where all ranks are alike and where one is slow."""
    return {
        name: [
            {
                "alike": _throughput(name, 1.0, seconds, comm),
                "slow": _throughput(name, _FACTOR, seconds, comm),
            }
            for _ in range(repeats)
        ]
        for name in exchanges
    }


def _throughput(
    name: str, factor: float, for_s: float, comm: Communicator
) -> dict[str, list[float]]:
    """Samples a second of each rank, the last of which sleeps `factor` times as long, and seconds
    that giving the exchange back took.

    An asynchronous exchange runs for so many seconds. Of one whose ranks wait for each other all
    make as many steps, about as many as fit.
    """
    slow = comm.rank == comm.size - 1
    torch.manual_seed(0)
    layers = (nn.Linear(_FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    # A forward pass is mostly asleep, so that ranks that share cores do not slow each other.
    sample_s = _FORWARD_S / _BATCH * (factor if slow else 1.0)
    model = PacedNetwork(nn.Sequential(*layers, nn.Linear(256, 10)), sample_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(_BATCH, _FEATURES, generator=generator)
    labels = torch.randint(0, 10, (_BATCH,), generator=generator)
    alone = parse_exchange(name).merge == "parzen"
    limit = int(for_s / _FORWARD_S / factor)
    ranks = dlio.distribute(model, optimizer, name)
    comm.barrier()
    steps, began = 0, time.perf_counter()
    while (time.perf_counter() - began < for_s) if alone else steps < limit:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(cross_entropy(model(inputs), labels))
        optimizer.step()
        steps += 1
    seconds = time.perf_counter() - began
    ranks.finish()
    comm.barrier()
    began = time.perf_counter()
    ranks.close()
    closed = time.perf_counter() - began
    everyone = comm.allgather([steps * _BATCH / seconds, closed])
    return {"rates": [rate for rate, _ in everyone], "close_s": [each for _, each in everyone]}
