"""Measurements of one rank in one epoch."""

from collections.abc import Mapping, Sequence

import numpy as np

from dlio.loader.stats import PassStats
from dlio.train.report import RankEpoch, RankSpeed, loader_counts


def rank_measurements(
    speed: RankSpeed,
    stats: PassStats,
    *,
    sums: list[float],
    seconds: float,
    exchanged: Mapping[str, float],
    updates_s: Sequence[float],
    left_out: int,
    skip_share: float,
) -> RankEpoch:
    """Return the measurements as other ranks get them.

    Args:
        stats: counts of the loader.
        sums: of losses, correct answers and samples.
        exchanged: differences of the exchange's statistics.
        updates_s: seconds of each optimizer step.
        left_out: optimizer steps left out.
        skip_share: share of the data set's samples that the epoch skips.
    """
    steps_ms = np.array(updates_s) * 1000 if updates_s else np.zeros(1)
    return {
        **speed,
        "sums": sums,
        "seconds": seconds,
        "stall_s": stats["stall_s"],
        "first_batch_s": stats["first_batch_s"],
        "exchange_wait_s": exchanged["wait_s"],
        "exchange_bytes": exchanged["bytes"],
        "step_ms": [float(np.median(steps_ms)), float(np.quantile(steps_ms, 0.95))],
        "left_out": left_out,
        "skip_share": skip_share,
        **loader_counts(stats),
        "skipped": stats["skipped"],
        "notes": stats["notes"],
    }
