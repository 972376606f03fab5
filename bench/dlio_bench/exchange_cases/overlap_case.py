"""`--case overlap`: share of an exchange's time that backward hides, and overhead for one rank."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from dlio_bench.bench_ranks import FABRICS, LINK, TIMEOUT_S, run, why_no_link
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
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
_SURE: Final = 0.95


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """On 2 ranks of one thread each: share of an exchange's time that is hidden, 1 - (T1 - T0) /
    Tx, with T0 seconds of a step without it, T1 with it, and Tx of the exchange alone, of the same
    repeat. On 1 rank: the processor's seconds under `dlio.distribute` over those of the plain loop,
    less one; the median of neighbouring steps, and its 95 % confidence interval."""
    from dlio_bench.results.repeats import spread

    rows, said = [], []
    fabrics, lacking = fabrics_of(options)
    if lacking is not None:
        said.append(f"No link: {lacking}")
    for fabric in fabrics:
        for name in steps(options.exchanges or _EXCHANGES):
            runs = _ranks(2, options.repeats, (name,), options, fabric)["exchanges"][name]
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
    short = replace(options, batch_size=_OVERHEAD_BATCH)
    alone = _ranks(1, _OVERHEAD_STEPS * options.repeats, (), short, "memory")
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
    ranks: int, repeats: int, exchanges: tuple[str, ...], options: ExchangeBenchOptions, fabric: str
) -> dict[str, Any]:
    task = {
        "network": options.network,
        "batch_size": options.batch_size,
        "steps": _STEPS,
        "repeats": repeats,
        "nodes": ranks,
        "exchanges": exchanges,
    }
    return run(
        "dlio_bench.exchange_cases.overlap_rank", task, ranks, fabric, timeout_s=3 * TIMEOUT_S
    )


def _middle(values: Sequence[float]) -> dict[str, float]:
    """Median, and in `min` and `max` its confidence interval: single steps are told by chance.
    Whatever the distribution, the k-th of n values lies above the median as often as n tosses of a
    coin give fewer than k heads."""
    ordered = sorted(values)
    n = len(ordered)
    below, outside = 0, 1 / 2**n
    while outside <= (1 - _SURE) / 2 and below < (n - 1) // 2:
        below += 1
        outside += math.comb(n, below) / 2**n
    return {
        "median": statistics.median(ordered),
        "min": ordered[max(0, below - 1)],
        "max": ordered[n - max(1, below)],
    }
