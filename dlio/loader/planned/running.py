"""A planned pass that is under way: its parts, its streamed blocks, its batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dlio.comm import Communicator
from dlio.loader.dataset import Dataset
from dlio.loader.feed import Fed, Stats
from dlio.loader.passes import PlannedPass
from dlio.loader.planned.pairs import Pairing
from dlio.loader.planned.pipeline import SKIPPED, Batch, first_failure
from dlio.loader.planned.slots import Maker
from dlio.loader.trace import Spans
from dlio.plan.block_order import BlockOrder
from dlio.plan.epoch import EpochPlan
from dlio.plan.order import Order
from dlio.shuffle.windows import windows_of
from dlio.shuffle.wire import MessageMemory
from dlio.storage.fill import filler_threads
from dlio.storage.mount import Mount
from dlio.storage.streamed import BlockStream


@dataclass(frozen=True, slots=True)
class Running:
    """A planned pass, with all that its work needs."""

    order: Order
    steps: int
    epoch: int
    """Number of the epoch, for crops."""
    data: Dataset
    mounted: Mount
    comm: Communicator
    """For this loader's messages alone."""
    maker: Maker
    mode: str
    threads: int
    ahead: int
    """Batches under way at a time."""
    generation: int
    """Number of this pass over the loader, the same on all ranks."""
    skip: bool
    spans: Spans | None
    memory: MessageMemory
    stats: Stats
    pairing: Pairing | None = None


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
def streamed_blocks(planned: Running, epoch: EpochPlan, order: BlockOrder) -> Iterator[BlockStream]:
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


def fed_of(batch: Batch, planned: Running) -> Fed:
    """Return a batch as it is handed out, or the error in its place."""
    samples, data, skip, stats = batch.step.samples, planned.data, planned.skip, planned.stats
    if batch.failed:
        error = first_failure(batch)
        if -1 in batch.failed or not skip or not isinstance(error, SKIPPED):
            slot = min(batch.failed)
            is_named = isinstance(error, SKIPPED) or getattr(error, "__notes__", None)
            if slot >= 0 and not is_named:
                error.add_note(f"for sample {data.reader.name(int(samples[slot]))!r}")
            return Fed(None, len(samples), samples, error)
        for slot in sorted(batch.failed):
            stats.skipped.append(data.reader.name(int(samples[slot])))
        samples = samples[[k for k in range(len(samples)) if k not in batch.failed]]
    made, batch.data = batch.data, None
    return Fed(made, len(samples), samples, epoch=planned.epoch)
