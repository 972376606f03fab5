"""The measurements of one rank in an epoch, as reports take them."""

from collections.abc import Mapping, Sequence

import numpy as np

from dlio.loader.stats import PassStats
from dlio.train.report import RankEpoch, RankSpeed, loader_counts

__all__ = ["measured"]


def measured(
    speed: RankSpeed,
    stats: PassStats,
    exchanged: Mapping[str, float],
    update_s: Sequence[float],
    *,
    sums: list[float],
    seconds: float,
    left_out: int,
    skip_share: float,
) -> RankEpoch:
    """Return this rank's measurements of an epoch.

    Args:
        stats: of its loader.
        exchanged: statistics of the exchange, of this epoch.
        update_s: seconds of each optimizer step.
        sums: of losses, right answers and samples.
        left_out: optimizer steps that were left out.
        skip_share: share of the samples that the epoch skipped.
    """
    steps_ms = np.array(update_s) * 1000 if update_s else np.zeros(1)
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
