"""Gain of `--source-order block` where samples are small and no tier holds them, and how random
its batches still are."""

import math
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dlio_bench.bench_data import packed_noise

_SAMPLE_BYTES: Final = 4096
_BATCH: Final = 64
_GLOBAL_BATCH: Final = 1024
_PARTS: Final = 8


def source_order(
    orders: Sequence[str] = ("sample", "block(4)", "block(16)", "block(64)"),
    samples: int = 60_000,
    at_most: int = 12_000,
    latency_s: float = 0.002,
) -> dict[str, object]:
    """Samples a second of small ones, in shards behind slowfs, that no tier holds; requests
    a sample; and, of the order alone, how unevenly a global batch of 1,024 draws on eighths of the
    data as they are stored, in units of a random draw (1.0 is a uniformly random draw).

    Args:
        at_most: samples that are timed of each pass.
    """
    import dlio
    from dlio_bench.emulated.emulated_mount import slow_mount, stats

    results: dict[str, Any] = {}
    with packed_noise(samples, _SAMPLE_BYTES) as packed:
        for order in orders:
            with (
                slow_mount(packed, latency_s=latency_s) as slow,
                dlio.open(slow, tiers="none") as source,
                dlio.DataLoader(
                    source, _BATCH, shuffle=True, source_order=order, num_workers=4
                ) as loader,
            ):
                before = stats(slow)["reads"]
                began, seen = time.perf_counter(), 0
                for _ in loader:
                    seen += len(loader.last_samples)
                    if seen >= at_most:
                        break
                seconds = time.perf_counter() - began
                results[order] = {
                    "samples_per_s": seen / seconds,
                    "reads_a_sample": (stats(slow)["reads"] - before) / seen,
                    "unevenness": _unevenness(source.reader.layout, order),
                }
    return results


def _unevenness(layout: Any, source_order: str) -> float:
    from dlio.plan.block_order import BlockOrder, window_of
    from dlio.plan.order import Order

    count, window = int(layout.starts[-1]), window_of(source_order)
    order = Order(count, 1) if window is None else BlockOrder(count, 1, 0, True, layout, window)
    stored = layout.order.positions(order.samples(np.arange(count, dtype=np.int64)))
    batches = stored[: count // _GLOBAL_BATCH * _GLOBAL_BATCH].reshape(-1, _GLOBAL_BATCH)
    parts = batches * _PARTS // count
    counts = np.stack([np.bincount(row, minlength=_PARTS) for row in parts])
    share = 1 / _PARTS
    chance = math.sqrt(_GLOBAL_BATCH * share * (1 - share))
    return float(np.sqrt(((counts - _GLOBAL_BATCH * share) ** 2).mean()) / chance)
