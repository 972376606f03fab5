"""A planned pass that is under way: its parts, its streamed blocks, its batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dlio.comm import Communicator
from dlio.loader.batch_stream import BatchResult, PassCounters
from dlio.loader.dataset import Dataset
from dlio.loader.passes import PlannedPass
from dlio.loader.planned_engine.mixup_partners import EpochPartners
from dlio.loader.planned_engine.pipeline import SKIPPED, Batch, first_failure
from dlio.loader.planned_engine.slots import BatchBuilder
from dlio.loader.shuffle.sample_message import MessageMemory
from dlio.loader.shuffle.sample_shuffle import windows_of
from dlio.loader.trace import Spans
from dlio.plan.block_order import BlockOrder
from dlio.plan.epoch import EpochPlan
from dlio.plan.order import Order
from dlio.storage.block_fetcher import filler_threads
from dlio.storage.block_stream import BlockStream
from dlio.storage.mount import Mount


@dataclass(frozen=True, slots=True)
class PassContext:
    """A planned pass, with all that its work needs."""

    order: Order
    steps: int
    epoch: int
    """Number of the epoch, for crops."""
    data: Dataset
    mounted: Mount
    comm: Communicator
    """For this loader's messages alone."""
    maker: BatchBuilder
    mode: str
    threads: int
    ahead: int
    """Batches under way at a time."""
    generation: int
    """Number of this pass over the loader, the same on all ranks."""
    skip: bool
    spans: Spans | None
    memory: MessageMemory
    stats: PassCounters
    pairing: EpochPartners | None = None


def order_facts(batches: PlannedPass, mode: str) -> dict[str, object]:
    """Return the facts that all ranks' parts of a pass follow from, by the names of options."""
    formula, cursor = batches.formula, batches.cursor
    return {
        "mode": mode,
        "seed": cursor.seed,
        "batch_size": formula.batch_size,
        "shuffle": formula.shuffled,
        "drop_last": formula.drop_last,
        "shares": None if formula.shares is None else formula.shares.counts,
        "source_order": formula.source_order,
        "epoch": cursor.epoch,
        "position in the epoch": cursor.position,
        "samples that come again": batches.again,
        "keep": batches.digest,
    }


@contextmanager
def streamed_blocks(
    planned: PassContext, epoch: EpochPlan, order: BlockOrder
) -> Iterator[BlockStream]:
    """Bring the blocks of this pass that no tier pins, ahead of their use."""
    hierarchy, ranks = planned.mounted.hierarchy, planned.mounted.ranks
    steps = planned.ahead
    if ranks.nodes > 1:
        # Messages of two windows are under way.
        steps += 2 * max(map(len, windows_of(epoch, float(hierarchy.reader.sizes.mean()))))
    window = int(np.diff(order.edges).max(initial=1))
    here = (epoch.home == planned.mounted.nodes.here) & (planned.mounted.placement.home < 0)
    streamed = BlockStream(
        hierarchy,
        order,
        here,
        epoch.position,
        ahead=steps * epoch.global_batch + window,
        progress=planned.mounted.stream_progress,
        generation=planned.generation,
        threads=filler_threads(planned.mounted.block_bytes, planned.mounted.requests),
    )
    try:
        yield streamed
    finally:
        streamed.close()


def fed_of(batch: Batch, planned: PassContext) -> BatchResult:
    """Return a batch as it is handed out, or the error in its place."""
    samples, data, skip, stats = batch.step.samples, planned.data, planned.skip, planned.stats
    if batch.failed:
        error = first_failure(batch)
        if -1 in batch.failed or not skip or not isinstance(error, SKIPPED):
            slot = min(batch.failed)
            is_named = isinstance(error, SKIPPED) or getattr(error, "__notes__", None)
            if slot >= 0 and not is_named:
                error.add_note(f"for sample {data.reader.name(int(samples[slot]))!r}")
            return BatchResult(None, len(samples), samples, error)
        for slot in sorted(batch.failed):
            stats.skipped.append(data.reader.name(int(samples[slot])))
        samples = samples[[k for k in range(len(samples)) if k not in batch.failed]]
    made, batch.data = batch.data, None
    return BatchResult(made, len(samples), samples, epoch=planned.epoch)
