"""Data sets of dlio's: blocks in tiers, samples pushed between nodes, threads that decode."""

import functools
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import xxhash

from dlio.comm import Communicator
from dlio.comm.waiting import default_timeout_s, peer_timeout_s
from dlio.loader.dataset import Dataset
from dlio.loader.feed import Fed, Feed
from dlio.loader.passes import PlannedPass
from dlio.loader.planned.makers import Maker
from dlio.loader.planned.pipeline import (
    SKIPPED,
    Batch,
    Pipeline,
    Work,
    first_failure,
)
from dlio.loader.stats import Stats
from dlio.loader.trace import Spans
from dlio.plan.block_order import BlockOrder
from dlio.plan.epoch import EpochPlan, is_exact, plan_epoch
from dlio.plan.sample_mask import masked_layout
from dlio.shuffle.shuffle import Shuffle, windows_of
from dlio.shuffle.wire import MessageMemory
from dlio.storage.fill import filler_threads
from dlio.storage.mount import Mount
from dlio.storage.streamed import Passing


@dataclass(frozen=True, slots=True)
class Planned:
    """What a pass over a data set of dlio's needs."""

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
    trace: Spans | None
    memory: MessageMemory


def planned_feed(plan: Planned, batches: PlannedPass, stats: Stats) -> Feed:
    """The batches of a pass."""
    mounted, home = plan.mounted, plan.mounted.placement.home
    if isinstance(batches.order, BlockOrder):
        home = mounted.passing_home(batches.order)
    layout = mounted.hierarchy.reader.layout
    if batches.kept is not None:
        layout = masked_layout(layout, batches.kept)
    epoch = EpochPlan(
        order=batches.order,
        position=batches.cursor.position,
        batch_size=batches.batch_size,
        steps=batches.steps,
        mode=plan.mode,
        ranks=mounted.ranks,
        rank=plan.comm.rank,
        home=home,
        layout=layout,
        shares=batches.shares,
    )
    if is_exact(plan.mode):
        batches.unbound(plan.mode)
    else:
        batches.bind(plan.mode, xxhash.xxh3_64_hexdigest(mounted.placement.home.tobytes()))
    planner = None
    if mounted.hierarchy.missing():
        planner = plan_epoch(epoch)
        first = planner.window(range(min(1, batches.steps)))
        wanted = np.concatenate([first.samples[first.senders < 0], *first.sends.values()])
        mounted.hierarchy.hurry(wanted, functools.partial(mounted.fill, batches.order))
    work = Work(
        hierarchy=mounted.hierarchy,
        maker=plan.maker,
        clock=stats.clock,
        epoch=batches.epoch,
        threads=plan.threads,
        ahead=plan.ahead,
        timeout_s=default_timeout_s(),
        peer_timeout_s=peer_timeout_s(),
        skip=plan.skip,
        trace=plan.trace,
    )
    with ExitStack() as stack:
        passing = None
        if isinstance(batches.order, BlockOrder):
            # Before anything is read: what passes through is not read sample by sample.
            passing = _passing(plan, epoch, batches.order)
            stack.callback(passing.close)
        hierarchy = mounted.hierarchy
        shuffle = Shuffle(plan.comm, hierarchy, epoch, plan.generation, plan.memory, planner)
        pipeline = stack.enter_context(Pipeline(shuffle, range(batches.steps), work))
        pipeline.start()
        yield None
        while (batch := pipeline.take()) is not None:
            if passing is not None:
                done = min(batch.step.number + 1, shuffle.sent)
                passing.done(epoch.position + done * epoch.global_batch)
            fed = _fed(batch, plan.data, plan.skip, stats)
            del batch
            yield fed
            del fed


def _passing(plan: Planned, epoch: EpochPlan, order: BlockOrder) -> Passing:
    """What brings the blocks of this pass that no tier pins."""
    hierarchy, ranks = plan.mounted.hierarchy, plan.mounted.ranks
    steps = plan.ahead
    if ranks.nodes > 1:
        # Messages of two windows are under way.
        steps += 2 * max(map(len, windows_of(epoch, float(hierarchy.reader.sizes.mean()))))
    window = int(np.diff(order.edges).max(initial=1))
    here = (epoch.home == plan.mounted.nodes.here) & (plan.mounted.placement.home < 0)
    return Passing(
        hierarchy,
        order,
        here,
        epoch.position,
        ahead=steps * epoch.global_batch + window,
        progress=plan.mounted.progress,
        generation=plan.generation,
        threads=filler_threads(plan.mounted.block_bytes, plan.mounted.requests),
    )


def _fed(batch: Batch, data: Dataset, skip: bool, stats: Stats) -> Fed:
    samples = batch.step.samples
    if batch.failed:
        error = first_failure(batch)
        if -1 in batch.failed or not skip or not isinstance(error, SKIPPED):
            slot = min(batch.failed)
            if slot >= 0 and not isinstance(error, SKIPPED):
                error.add_note(f"for sample {data.reader.name(int(samples[slot]))!r}")
            return Fed(None, len(samples), samples, error)
        for slot in sorted(batch.failed):
            stats.skipped.append(data.reader.name(int(samples[slot])))
        samples = samples[[k for k in range(len(samples)) if k not in batch.failed]]
    made, batch.data = batch.data, None
    return Fed(made, len(samples), samples)
