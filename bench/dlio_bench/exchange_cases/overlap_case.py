"""`--case overlap`: share of an exchange's time that backward hides, and overhead for one rank."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

import dlio
from dlio.comm import Communicator
from dlio_bench.bench_ranks import FABRICS, LINK, TIMEOUT_S, run, timed, why_no_link
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.variants import OneBatchTraining
from dlio_bench.results.repeats import interval_of_median, spread
from dlio_bench.results.terminal import advance, steps

_EXCHANGES: Final = (
    "allreduce",
    "hierarchical",
    "tree",
    "parameter-server",
    "gossip",
    "asgd",
    "local-sgd(2)",
    "diloco(2)",
    "allreduce+bf16",
    "allreduce+int8",
    "allreduce+onebit",
    "allreduce+threshold",
    "allreduce+adaptive",
)
_STEPS: Final = 2
_OVERHEAD_STEPS: Final = 40
_OVERHEAD_BATCH: Final = 4
"""Hidden units: in short steps, work done once a step would be the larger part."""


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """On 2 ranks of one thread each: share of an exchange's time that is hidden, 1 - (T1 - T0) /
    Tx, with T0 seconds of a step without it, T1 with it, and Tx of the exchange alone, of the same
    repeat. On 1 rank: the processor's seconds under `dlio.distribute` over those of the plain loop,
    less one; the median of neighbouring steps, and its 95 % confidence interval."""
    rows, said = [], []
    fabrics, lacking = fabrics_of(options)
    if lacking is not None:
        said.append(f"No link: {lacking}")
    for fabric in fabrics:
        for name in steps(options.exchanges or _EXCHANGES):
            runs = _ranks(2, hiding, options, fabric, exchange=name)["runs"]
            hidden = [1 - (t["with_s"] - t["without_s"]) / t["alone_s"] for t in runs]
            rows.append(
                {
                    "fabric": fabric,
                    "exchange": name,
                    **{
                        heading: spread([t[key] for t in runs])
                        for heading, key in (
                            ("step_without_s", "without_s"),
                            ("with_s", "with_s"),
                            ("exchange_alone_s", "alone_s"),
                        )
                    },
                    "hidden_percent": spread([100 * each for each in hidden]),
                }
            )
    advance("overhead of one rank", 0)
    repeats = _OVERHEAD_STEPS * options.repeats
    short = replace(options, batch_size=_OVERHEAD_BATCH, repeats=repeats)
    alone = _ranks(1, overhead, short, "memory")
    return {
        "rows": rows,
        "overhead_of_one_rank_percent": _middle([100 * each for each in alone["overhead"]]),
        "said": [
            *said,
            "Hidden: 1 - (with - without) / alone. Without a link of its own an exchange is "
            "copying and adding, by the same cores that compute: only waiting can be hidden, and "
            "the ceiling lies below 100 %.",
        ],
    }


def fabrics_of(options: ExchangeBenchOptions) -> tuple[list[str], str | None]:
    """The fabrics asked for, else all that work here; and the reason why a link is missing."""
    if options.fabrics:
        return list(options.fabrics), None
    lacking = why_no_link()
    return [*FABRICS, *([] if lacking else [LINK])], lacking


def _ranks(
    ranks: int,
    function: Callable[..., object],
    options: ExchangeBenchOptions,
    fabric: str,
    **more: str,
) -> dict[str, Any]:
    task = {"network": options.network, "batch_size": options.batch_size, **more}
    return run(
        function,
        {**task, "repeats": options.repeats},
        ranks,
        fabric,
        timeout_s=3 * TIMEOUT_S,
    )


def _middle(values: Sequence[float]) -> dict[str, float]:
    """Median, and in `min` and `max` its confidence interval: single steps are told by chance."""
    low, high = interval_of_median(values) or (values[0], values[0])
    return {"median": statistics.median(values), "min": low, "max": high}


# The ranks


def hiding(
    comm: Communicator, network: str, batch_size: int, repeats: int, exchange: str
) -> dict[str, list[dict[str, float]]]:
    """Per repeat, seconds of a step without an exchange, before and after; with it; and of it
    alone."""
    training = OneBatchTraining(network, batch_size, comm.rank)
    runs = []
    for _ in range(repeats):
        before = timed(partial(training.step, None), _STEPS, comm)
        handle = training.distribute(exchange, comm.size)
        # Its memory is touched for the first time. Background work of a later step is under way
        # when the time begins, and when it ends.
        training.step(handle)
        training.step(handle)
        within = timed(partial(training.step, handle), _STEPS, comm)
        handle.finish()
        training.alone(handle)
        alone = timed(partial(training.alone, handle), 2 * _STEPS, comm)
        handle.close()
        alone -= timed(partial(training.alone, None), 2 * _STEPS, comm)
        after = timed(partial(training.step, None), _STEPS, comm)
        runs.append({"without_s": (before + after) / 2, "with_s": within, "alone_s": alone})
    return {"runs": runs}


def overhead(
    comm: Communicator, network: str, batch_size: int, repeats: int
) -> dict[str, list[float]]:
    """For one rank, seconds of a step under `dlio.distribute` over those of the same loop without,
    less one; of neighbouring steps, each after one that finds out where memory is. Of the
    processor: other processes' do not count."""
    training = OneBatchTraining(network, batch_size, comm.rank)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-4)

    def seconds() -> float:
        training.step(None, optimizer=optimizer)
        began = time.process_time()
        training.step(None, optimizer=optimizer)
        return time.process_time() - began

    results = []
    for number in range(repeats):
        before = seconds() if number % 2 else None
        with dlio.distribute(training.model, optimizer):
            ours = seconds()
        results.append(ours / (before or seconds()) - 1)
    return {"overhead": results}
