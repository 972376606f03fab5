"""`--case slow-rank`: what a rank that computes four times as long leaves of the others' speed."""

from typing import Any, Final

from dlio_bench.exchange.options import Options
from dlio_bench.ranks import run

__all__ = ["measure"]

_EXCHANGES: Final = ("allreduce", "gossip", "local-sgd", "asgd")
_RANKS: Final = 4
_FACTOR: Final = 4.0
_FORWARD_S: Final = 0.02


def measure(options: Options) -> dict[str, Any]:
    """Of 4 ranks that mostly sleep: samples a second of each of the three others, beside a slow
    rank and beside none."""
    from dlio_bench.machine import spread

    task = {
        "exchanges": options.exchanges or _EXCHANGES,
        "repeats": options.repeats,
        "factor": _FACTOR,
        "forward_s": _FORWARD_S,
        "seconds": options.seconds,
    }
    told = run("dlio_bench.exchange.slowed", task, _RANKS)
    rows = []
    for name, passes in told.items():
        alike = [_mean(each["1.0"]["rates"][:-1]) for each in passes]
        beside = [_mean(each[str(_FACTOR)]["rates"][:-1]) for each in passes]
        rows.append(
            {
                "exchange": name,
                "alike_per_s": spread(alike),
                "beside_a_slow_rank_per_s": spread(beside),
                "kept_percent": spread(
                    [100 * b / a for a, b in zip(alike, beside, strict=True)],
                ),
                "slow_rank_per_s": spread([each[str(_FACTOR)]["rates"][-1] for each in passes]),
                "close_s": spread([max(each[str(_FACTOR)]["close_s"]) for each in passes]),
            }
        )
    return {
        "rows": rows,
        "said": [
            "Samples a second of a rank; 100 % kept is the ceiling, a quarter what is left to "
            "ranks that wait for the slow one."
        ],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
