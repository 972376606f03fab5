"""`--case slow-rank`: speed of ranks next to one that computes four times as long."""

from typing import Any, Final

from dlio_bench.bench_ranks import run
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions

_EXCHANGES: Final = ("allreduce", "gossip", "local-sgd", "asgd")
_RANKS: Final = 4
_FACTOR: Final = 4.0
_FORWARD_S: Final = 0.02


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Samples per second of each of three ranks that mostly sleep, with a fourth that is slow, and
    with one that is not."""
    from dlio_bench.results.repeats import spread

    task = {
        "exchanges": options.exchanges or _EXCHANGES,
        "repeats": options.repeats,
        "factor": _FACTOR,
        "forward_s": _FORWARD_S,
        "seconds": options.seconds,
    }
    report: dict[str, Any] = run("dlio_bench.exchange_cases.slow_rank_program", task, _RANKS)
    rows = []
    for name, passes in report.items():
        alike = [_mean(each["1.0"]["rates"][:-1]) for each in passes]
        slowed = [_mean(each[str(_FACTOR)]["rates"][:-1]) for each in passes]
        rows.append(
            {
                "exchange": name,
                "alike_per_s": spread(alike),
                "beside_a_slow_rank_per_s": spread(slowed),
                "kept_percent": spread(
                    [100 * b / a for a, b in zip(alike, slowed, strict=True)],
                ),
                "slow_rank_per_s": spread([each[str(_FACTOR)]["rates"][-1] for each in passes]),
                "close_s": spread([max(each[str(_FACTOR)]["close_s"]) for each in passes]),
            }
        )
    return {
        "rows": rows,
        "said": [
            "Samples a second of a rank; 100 % kept is the ceiling, a quarter is left to "
            "ranks that wait for the slow one."
        ],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
