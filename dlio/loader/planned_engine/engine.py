"""The engine for data sets of dlio: blocks in tiers, samples pushed between nodes, threads that
decode."""

import functools
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import numpy as np
import torch
import xxhash

from dlio.comm import Communicator, world
from dlio.comm.data_ranks import communicator, covers_world
from dlio.comm.deadlines import default_timeout_s
from dlio.comm.world import membership
from dlio.data.agreement import check_same_order
from dlio.data.schema import IMAGES
from dlio.errors import UsageError
from dlio.loader.batch_stream import BatchStream, RunningPass
from dlio.loader.dataset import Dataset
from dlio.loader.delivery import HostMemoryKind, target_of
from dlio.loader.loader_options import LoaderOptions, pinning
from dlio.loader.passes import Pass, PassCounters, PlannedPass
from dlio.loader.planned_engine.batch_builders import BatchFactory
from dlio.loader.planned_engine.batch_memory import batches_together
from dlio.loader.planned_engine.device_builders import DeviceDecoder, DeviceTierCrops
from dlio.loader.planned_engine.mixup_partners import step_partners
from dlio.loader.planned_engine.native_pool import NativePool, files_of
from dlio.loader.planned_engine.pipeline import PassContext, Pipeline
from dlio.loader.planned_engine.sample_builders import host_batches
from dlio.loader.recipe import CropRecipe
from dlio.loader.shuffle.sample_message import message_memory
from dlio.loader.shuffle.sample_shuffle import Shuffle, windows_of
from dlio.loader.trace import Spans
from dlio.plan.block_order import BlockOrder
from dlio.plan.epoch import EpochPlan, WindowPlan, is_exact, plan_epoch
from dlio.plan.listed_order import ListedOrder
from dlio.plan.order import Order
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import masked_layout
from dlio.plan.schedule import RankNodes
from dlio.plan.tail_order import blocks_of
from dlio.storage.block_fetcher import filler_threads
from dlio.storage.block_stream import BlockStream
from dlio.storage.device_tier import DeviceTier
from dlio.storage.mount import Mount
from dlio.util.cores import available_cores
from dlio.util.printable import log_warning
from dlio.util.settings import DEVICE_TIER, settings
from dlio.util.units import format_bytes

_MOST_THREADS: Final = 16
# For each thread, not in all: 64 MiB of batches left threads without work where there are 16
# (docs/LOG.md, #gpu-26).
_AHEAD_BYTES: Final = 64 << 20
_AHEAD_BYTES_A_THREAD: Final = 16 << 20
_PARTS: Final = 4
_STEP_BITS: Final = 40
"""Of the number of a batch among those of all passes: a step has fewer."""


class PlannedEngine:
    """Makes the batches of planned passes. Owner: the loader, which closes it.

    Keeps from pass to pass: communicators, memory of batches and of messages; with
    persistent_workers, native threads too.
    """

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._has_met = False
        """True once the ranks know that they all follow torch's seed."""
        self._other_comm: Communicator | None = None
        self.generation = 0
        """Number of passes; the same on all ranks."""
        self._factory: BatchFactory | None = None
        self._made_for: tuple[object, ...] = ()
        self._largest = 0
        """Choices that the factory was made for, and samples of its largest batch."""
        self._to_close: list[BatchFactory] = []
        """Those of devices; a pass that was begun ahead may use an earlier one."""
        self._pool: NativePool | None = None
        """Native threads that are kept."""
        self._pool_closer: weakref.finalize[..., PlannedEngine] | None = None
        # Kept from pass to pass: the kernel clears the pages of fresh memory, which costs as much
        # as receiving into it.
        self._memory = message_memory()

    def mount(self, options: LoaderOptions, data: Dataset) -> Mount:
        """Open the data set's tiers, once. Collective over the ranks that share the data."""
        if self._comm is None:
            self._comm = communicator(options.group, options.mesh)
        whole = options.group is None and options.mesh is None
        return data.mount(world() if whole else self._comm, options.pretend_nodes)

    def meet(
        self, options: LoaderOptions, data: Dataset | None, batches: PlannedPass
    ) -> Communicator:
        """Return the communicator of the ranks that agree on the random numbers of passes: those
        that share the data, and in a mesh those of one model, too. Collective; the first time, the
        tiers are opened and the ranks' orders compared.

        Raises UsageError if they differ.
        """
        if data is not None:
            self.mount(options, data)
        elif self._comm is None:
            self._comm = communicator(options.group, options.mesh)
        assert self._comm is not None
        if not self._has_met:
            # Before any other message: a rank of another order would wait for different ones.
            own = {"order": "dlio's"} | _order_facts(batches, options) | {"seed": "torch's"}
            check_same_order(own, self._comm)
            self._has_met = True
            if options.mesh is None and options.group is not None:
                log_warning(
                    "group=: ranks of other groups draw random numbers of their own: where they "
                    "are parts of one model, seed torch alike on all of them, or give seed="
                )
        # Ranks of one model are in different groups, and get the same samples.
        return world() if options.mesh is not None and covers_world(options.mesh) else self._comm

    def fill(self, options: LoaderOptions, data: Dataset) -> Mount:
        """Open the tiers and start filling them, for other engines that read the data set."""
        mounted = self.mount(options, data)
        mounted.fill(Order(len(data), 0, 0, shuffled=False))
        return mounted

    def begin(
        self,
        options: LoaderOptions,
        data: Dataset,
        batches: PlannedPass,
        spans: Spans | None,
    ) -> RunningPass:
        """Begin the work of a pass. Collective.

        Raises UsageError when the pass resumes one of another mode or with other homes.
        """
        mounted = self.mount(options, data)
        self._check_order(batches, options)
        if blocks_of(batches.order) is not None:
            mounted.open_stream()
        # Inexact modes deal by where blocks lie. A digest of it in the state tells whether a
        # resumed epoch would be dealt as it was; the homes themselves would be a number for each
        # block.
        homes = None
        if not is_exact(options.mode):
            homes = xxhash.xxh3_64_hexdigest(mounted.placement.home.tobytes())
        batches.bind(options.mode, homes)
        formula = batches.formula
        ranks = mounted.ranks if formula.left is None else mounted.ranks_of(formula.members)
        plan = epoch_plan(batches, mounted, options.mode, ranks)
        return self._begin(options, data, mounted, batches, plan, batches.own_batch, spans)

    def begin_listed(
        self,
        options: LoaderOptions,
        data: Dataset,
        batches: Pass,
        listed: ListedOrder,
        spans: Spans | None,
    ) -> RunningPass:
        """Begin a pass whose samples a sampler has listed for this rank alone. Collective."""
        mounted = self.mount(options, data)
        sizes = np.diff(listed.starts)
        self._check_order(None, options)
        this_rank = RankNodes(np.zeros(1, np.int32))
        home, layout, largest = mounted.placement.home, data.reader.layout, int(sizes.max())
        shares = RankShares.even(largest, 1)
        plan = EpochPlan(listed, 0, shares, len(sizes), "batch", this_rank, 0, home, layout)
        return self._begin(options, data, mounted, batches, plan, largest, spans)

    def close(self) -> None:
        """Give the communicators back, and end what decodes on devices."""
        for factory in self._to_close:
            assert factory.close is not None
            factory.close()
            self._factory = None
        self._to_close.clear()
        self._keep_pool(None)
        for comm in (self._comm, self._other_comm):
            if comm is not None:
                comm.close()
        self._comm = self._other_comm = None

    def _check_order(self, batches: PlannedPass | None, options: LoaderOptions) -> None:
        """Compare the ranks' orders before the first pass; None if each rank has one of its own.
        Collective.

        Later passes follow from it, unless a rank alone chooses another epoch. Ranks that may be
        lost, and spares, which take no part yet, are not waited for here.
        """
        comm = self._comm
        if comm is None or comm.size == 1 or self.generation or membership() is not None:
            return
        if self._has_met:
            return
        if batches is None:
            check_same_order({"order": "a sampler's"}, comm)
        elif not batches.formula.members and batches.formula.ranks == comm.size:
            check_same_order({"order": "dlio's"} | _order_facts(batches, options), comm)

    def _begin(
        self,
        options: LoaderOptions,
        data: Dataset,
        mounted: Mount,
        batches: Pass,
        plan: EpochPlan,
        largest: int,
        spans: Spans | None,
    ) -> RunningPass:
        """Begin the work of a pass along a plan, whose largest batch has so many samples of this
        rank."""
        is_shared = isinstance(batches, PlannedPass)
        threads = options.num_workers or decode_threads(mounted)
        factory = self._factory_for(options, data, mounted, largest, threads)
        if factory.follow_plan is not None:
            factory.follow_plan(plan)
        # Made before the first block is brought, so that filling the tiers counts as this pass's.
        images = any(kind in IMAGES for _, kind in data.reader.schema.fields)
        counters = PassCounters(mounted.hierarchy, threads, "planned", images)
        skip = (data.on_error if options.on_error is None else options.on_error) == "skip"
        comm = self._next_comm(options)
        partners_of = None
        if data.recipe.pairs and isinstance(batches, PlannedPass) and is_exact(options.mode):
            # A sample is mixed with itself if its partner cannot be read.
            partners_of = functools.partial(
                step_partners,
                batches.order,
                batches.cursor.position,
                batches.samples,
                batches.global_batch,
                lambda sample: mounted.hierarchy.read_one(sample)[0],
                skip,
            )
        ahead = _ahead(options.prefetch_factor, threads, factory.batch_bytes)
        context = PassContext(
            hierarchy=mounted.hierarchy,
            factory=factory,
            counters=counters,
            spans=spans,
            # A sampler's pass has the crops of the data set's epoch, which its user may choose.
            epoch=batches.epoch if is_shared else data.epoch,
            steps=plan.steps,
            threads=threads,
            pool=self._pool_for(options, factory, mounted, threads),
            order=self.generation << _STEP_BITS,
            ahead=ahead,
            # Blocks that come ahead of their use come for batches that are begun one by one.
            together=1 if partners_of or blocks_of(plan.order) else _together(factory, ahead),
            skip=skip,
            timeout_s=default_timeout_s(),
            peer_timeout_s=settings().peer_timeout_s,
            partners_of=partners_of,
        )
        # Alone, too, once a rank was lost, before this epoch or in it.
        alone = not is_shared or plan.ranks.size != comm.size or plan.left is not None
        stream = self._run(context, plan, mounted, comm, alone)
        next(stream)
        return RunningPass(batches, counters, stream, spans, plan if is_shared else None)

    def _factory_for(
        self, options: LoaderOptions, data: Dataset, mounted: Mount, batch_size: int, threads: int
    ) -> BatchFactory:
        """Return the factory of batches of up to so many samples.

        Raises UsageError for options that do not go together with the data set or its tiers.
        """
        kind, device = _memory_kind(options), _decodes_on(options)
        made_for = data, data.recipe, options.collate_fn, kind, device
        # Torch lets `collate_fn` and others be assigned between passes, so the options are compared
        # each time.
        if self._factory is None or made_for != self._made_for or batch_size > self._largest:
            if device is not None:
                collate = None if options.collates_by_default else options.collate_fn
                counters = mounted.hierarchy.counters
                decoder = DeviceDecoder(data.recipe, collate, device, threads, counters)
                self._factory = decoder.factory(batch_size)
                self._to_close.append(self._factory)
            else:
                self._factory = _on_host(options, data, mounted, batch_size, kind)
            self._made_for, self._largest = made_for, batch_size
        return self._factory

    def _pool_for(
        self, options: LoaderOptions, factory: BatchFactory, mounted: Mount, threads: int
    ) -> NativePool | None:
        """Return native threads for a pass: those of the passes before, if they are kept."""
        if factory.native is None:
            return None
        try:
            files = files_of(factory.hierarchy or mounted.hierarchy)
            if self._pool is not None and self._pool.is_for(threads, files):
                return self._pool
            pool = NativePool(threads, files)
        except OSError:  # Python's threads do as well.
            return None
        self._keep_pool(pool if options.persistent_workers else None)
        return pool

    def _keep_pool(self, pool: NativePool | None) -> None:
        """Keep native threads in place of those that were kept, which end with their last pass."""
        before, self._pool = self._pool, pool
        if before is not None and not before.passes:
            before.close()
        if self._pool_closer is not None:
            self._pool_closer.detach()
        # A loader that is dropped is not closed.
        self._pool_closer = None if pool is None else weakref.finalize(self, pool.close)

    @contextmanager
    def _using(self, pool: NativePool) -> Iterator[None]:
        """Have native threads stay during a pass, and end behind it if they are not kept."""
        pool.passes += 1
        try:
            yield
        finally:
            pool.passes -= 1
            if pool is not self._pool and not pool.passes:
                pool.close()

    def _run(
        self,
        context: PassContext,
        plan: EpochPlan,
        mounted: Mount,
        comm: Communicator,
        alone: bool,
    ) -> BatchStream:
        """Yield None when the work of a pass has begun, then its batches. An `alone` rank exchanges
        no samples with others."""
        hierarchy, generation = mounted.hierarchy, self.generation
        with ExitStack() as stack:
            if context.pool is not None:
                stack.enter_context(self._using(context.pool))
            planner = _hurry_first_batch(mounted, plan)
            streamed = None
            if (blocks := blocks_of(plan.order)) is not None:
                # Before the shuffle starts, so that samples of these blocks are not read one by
                # one.
                streamed = _streamed_blocks(mounted, plan, blocks, context.ahead, generation)
                stack.callback(streamed.close)
            shuffle = Shuffle(comm, hierarchy, plan, generation, self._memory, planner, alone=alone)

            def taken(step: int) -> None:
                if streamed is not None:
                    done = min(step + 1, shuffle.sent)
                    streamed.done(plan.position + done * plan.shares.global_batch)

            pipeline = Pipeline(shuffle, context)
            stack.callback(pipeline.close)
            pipeline.start()
            yield None
            yield from pipeline.batches(taken)

    def _next_comm(self, options: LoaderOptions) -> Communicator:
        """The communicator of this pass: passes take turns with two where the last one's messages
        may be under way while the next one begins."""
        assert self._comm is not None
        if self._other_comm is None and options.persistent_workers:
            self._other_comm = communicator(options.group, options.mesh)
        self.generation += 1
        if self._other_comm is not None and self.generation % 2:
            return self._other_comm
        return self._comm


def epoch_plan(batches: PlannedPass, mounted: Mount, mode: str, ranks: RankNodes) -> EpochPlan:
    """Return the facts of a pass that all its ranks agree on; `ranks` are those that share it, or
    that began it, of an inexact one that survivors continue."""
    formula = batches.formula
    home = mounted.placement.home
    if (blocks := blocks_of(batches.order)) is not None:
        home = mounted.streamed_home(blocks)
    layout = mounted.hierarchy.reader.layout
    if batches.mask is not None:
        layout = masked_layout(layout, batches.mask)
    return EpochPlan(
        order=batches.order,
        position=batches.cursor.position,
        shares=batches.shares,
        steps=batches.steps,
        mode=mode,
        ranks=ranks,
        rank=formula.rank,
        home=home,
        layout=layout,
        left=formula.left,
        on_devices=mounted.on_devices,
    )


def decode_threads(mounted: Mount) -> int:
    """Return the number of decode threads for one rank: its part of its node's cores."""
    here = len(mounted.ranks.local(mounted.nodes.here)) * mounted.nodes.per_machine
    return max(1, min(_MOST_THREADS, available_cores() // max(1, here)))


def _hurry_first_batch(mounted: Mount, plan: EpochPlan) -> WindowPlan | None:
    """Start filling the tiers, the first batch's samples first; return the planner used for it."""
    if not mounted.hierarchy.missing():
        return None
    planner = plan_epoch(plan)
    first = planner.window(range(min(1, plan.steps)))
    wanted = np.concatenate([first.samples[first.senders < 0], *first.sends.values()])
    # A sample of a mixture may occur twice, and is read once.
    _, firsts = np.unique(wanted, return_index=True)
    wanted = wanted[np.sort(firsts)]
    mounted.hierarchy.fetcher.hurry(wanted, functools.partial(mounted.fill, plan.order))
    return planner


def _streamed_blocks(
    mounted: Mount, plan: EpochPlan, order: BlockOrder, batches_ahead: int, generation: int
) -> BlockStream:
    """Bring the blocks of this pass that no tier pins, ahead of their use."""
    assert mounted.progress is not None
    steps = batches_ahead
    if mounted.ranks.nodes > 1:
        # Messages of two windows are under way.
        sample_bytes = float(mounted.hierarchy.reader.sizes.mean())
        steps += 2 * max(map(len, windows_of(plan, sample_bytes)))
    window = int(np.diff(order.edges).max(initial=1))
    here = (plan.home == mounted.nodes.here) & (mounted.placement.home < 0)
    return BlockStream(
        mounted.hierarchy,
        order,
        here,
        plan.position,
        ahead=steps * plan.shares.global_batch + window,
        progress=mounted.progress,
        generation=generation,
        threads=filler_threads(mounted.block_bytes, mounted.requests),
    )


def _ahead(factor: int | None, threads: int, batch_bytes: int) -> int:
    """Batches under way at a time.

    As many as torch's loader has, within a budget of bytes unless the user asked for a number:
    batches beyond the processor's caches cost memory bandwidth and gain nothing.
    """
    if factor is not None:
        return max(2, factor) * threads
    budget = max(_AHEAD_BYTES, threads * _AHEAD_BYTES_A_THREAD)
    return max(2, min(2 * threads, budget // max(1, batch_bytes)))


def _together(factory: BatchFactory, ahead: int) -> int:
    """Batches that may be made as one: of large ones a part of those under way, so that some are
    always complete."""
    return min(factory.together, max(batches_together(factory.batch_bytes), ahead // _PARTS))


def _order_facts(batches: PlannedPass, options: LoaderOptions) -> dict[str, object]:
    """Return the facts that all ranks' parts of a pass follow from, by the names of options."""
    formula, cursor = batches.formula, batches.cursor
    return {
        "mode": options.mode,
        "seed": cursor.seed,
        "batch_size": options.batch_size,
        "shuffle": formula.shuffled,
        "drop_last": formula.drop_last,
        "shares": formula.shares.counts,
        "source_order": formula.source_order,
        "epoch": cursor.epoch,
        "position in the epoch": cursor.position,
        "samples that come again": batches.requeued,
        "keep": batches.digest,
    }


# The kind of batches that a loader's options ask for


def _on_host(
    options: LoaderOptions, data: Dataset, mounted: Mount, batch_size: int, kind: HostMemoryKind
) -> BatchFactory:
    """Return the factory of batches that the loader's threads decode."""
    recipe = data.recipe
    decoded = None
    if isinstance(recipe, CropRecipe):
        decoded = mounted.decoded(recipe.decoder.recipe)
    tier = _device_tier(options, mounted)
    if tier is not None:
        return DeviceTierCrops(recipe, batch_size, kind, tier, decoded).factory()
    collate = None if options.collates_by_default else options.collate_fn
    # Accelerate moves batches by itself; bytes are a quarter of the floats.
    stays = "accelerate.state" not in sys.modules and (
        options.device is None or torch.device(options.device).type == "cpu"
    )
    return host_batches(recipe, batch_size, collate, kind, decoded, stays)


def _memory_kind(options: LoaderOptions) -> HostMemoryKind:
    if options.device is not None and torch.device(options.device).type == "cuda":
        return HostMemoryKind.IN_POOL
    pins = options.pin_memory and pinning(options) is not None and torch.cuda.is_available()
    return HostMemoryKind.BY_TORCH if pins else HostMemoryKind.NO


def _decodes_on(options: LoaderOptions) -> torch.device | None:
    """Return the device that decodes; None for the loader's threads."""
    if options.decode == "cpu" or options.device is None:
        return None
    return target_of(options.device)


def _device_tier(options: LoaderOptions, mounted: Mount) -> DeviceTier | None:
    """Return the tier on the device of the batches; None if none is specified. Raises UsageError
    for a loader that cannot use it."""
    spec = mounted.device_spec
    if spec is None:
        return None
    device = None if options.device is None else target_of(options.device)
    if device is None or (device.type != "cuda" and not os.environ.get(DEVICE_TIER)):
        raise UsageError(
            f"tier {spec} is on the GPU that batches are handed out on, and this loader's device "
            f"is {options.device}: give device='cuda' (dlio train: --device cuda), or write "
            f"ram:{format_bytes(spec.capacity).replace(' ', '')}:decoded"
        )
    if not options.collates_by_default:
        raise UsageError(
            f"tier {spec}: its crops are made on the device, where collate_fn= cannot take single "
            "samples: leave collate_fn out, or write ram:SIZE:decoded"
        )
    return mounted.on_device(device)
