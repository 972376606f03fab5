"""The engine for data sets of dlio: blocks in tiers, samples pushed between nodes, threads that
decode."""

import functools
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import xxhash

from dlio.comm import Communicator, world
from dlio.comm.data_ranks import communicator
from dlio.comm.deadlines import default_timeout_s, peer_timeout_s
from dlio.comm.world import membership
from dlio.data.agreement import check_same_order
from dlio.data.schema import IMAGES, Buffer
from dlio.errors import UsageError
from dlio.loader.batch_stream import BatchStream, PassCounters, RunningPass
from dlio.loader.contract import CollateFn
from dlio.loader.dataset import Dataset
from dlio.loader.decode_device import check_recipe
from dlio.loader.delivery import target_of
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.passes import Pass, PlannedPass
from dlio.loader.planned_engine.batch_builders import CropBatchBuilder
from dlio.loader.planned_engine.device_builders import DeviceDecodeBuilder
from dlio.loader.planned_engine.makers import maker_for
from dlio.loader.planned_engine.mixup_partners import EpochPartners
from dlio.loader.planned_engine.pass_context import (
    PassContext,
    fed_of,
    order_facts,
    streamed_blocks,
)
from dlio.loader.planned_engine.pipeline import Pipeline, PipelineWork
from dlio.loader.planned_engine.slots import BatchBuilder
from dlio.loader.planned_engine.tier_maker import DeviceTierBuilder
from dlio.loader.shuffle.sample_message import MessageMemory
from dlio.loader.shuffle.sample_shuffle import Shuffle
from dlio.loader.streams import HostMemoryKind
from dlio.loader.trace import Spans
from dlio.plan.epoch import EpochPlan, WindowPlan, is_exact, plan_epoch
from dlio.plan.listed_order import ListedOrder
from dlio.plan.order import Order
from dlio.plan.sample_mask import masked_layout
from dlio.plan.schedule import RankNodes
from dlio.plan.tail_order import blocks_of
from dlio.storage.device_tier import DeviceTier
from dlio.storage.mount import Mount
from dlio.util.cores import available_cores
from dlio.util.settings import DEVICE_TIER
from dlio.util.units import format_bytes

_MOST_THREADS: Final = 16
_AHEAD_BYTES: Final = 64 << 20
_AHEAD_BYTES_A_THREAD: Final = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _KeptBuilder:
    """A maker, and the choices that it was made for."""

    data: Dataset
    collate: CollateFn
    pinned: HostMemoryKind
    decodes_on: torch.device | None
    batch_size: int
    maker: BatchBuilder

    def serves(self, data: Dataset, options: LoaderOptions, batch_size: int) -> bool:
        """True if batches of these options can be made by it."""
        return (
            self.data is data
            and self.collate is options.collate_fn
            and self.pinned is _pinned(options)
            and self.decodes_on == _decodes_on(options)
            and batch_size <= self.batch_size
        )


class _Makers:
    """The maker of a loader's passes, made anew when its options change. Owner: the engine."""

    def __init__(self) -> None:
        self._made: _KeptBuilder | None = None
        self._on_devices: list[DeviceDecodeBuilder] = []
        """Makers to close; a pass that was begun ahead may use an earlier one."""

    def get(
        self,
        options: LoaderOptions,
        data: Dataset,
        mounted: Mount,
        batch_size: int,
        threads: int,
    ) -> BatchBuilder:
        """Return the maker.

        Args:
            batch_size: samples of the largest batch.
            threads: of the loader.

        Raises UsageError for options that do not go together with the data set or its tiers.
        """
        if self._made is None or not self._made.serves(data, options, batch_size):
            pinned, device = _pinned(options), _decodes_on(options)
            if device is not None:
                maker = self._decoding(options, data, mounted, batch_size, (device, threads))
            else:
                maker = _on_host(options, data, mounted, batch_size, pinned)
            self._made = _KeptBuilder(data, options.collate_fn, pinned, device, batch_size, maker)
        return self._made.maker

    def close(self) -> None:
        """End the decoders of devices."""
        for maker in self._on_devices:
            maker.close()
            self._made = None
        self._on_devices.clear()

    def _decoding(
        self,
        options: LoaderOptions,
        data: Dataset,
        mounted: Mount,
        batch_size: int,
        place: tuple[torch.device, int],
    ) -> BatchBuilder:
        """Return a maker that decodes on a device, with so many threads."""
        check_recipe(data.recipe)
        collate = None if options.collates_by_default else options.collate_fn
        counters = mounted.hierarchy.counters
        made = DeviceDecodeBuilder(data.recipe, batch_size, collate, *place, counters)
        self._on_devices.append(made)
        return made


class PlannedEngine:
    """Makes the batches of planned passes. Owner: the loader, which closes it.

    Keeps from pass to pass: communicators, memory of batches and of messages.
    """

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._other_comm: Communicator | None = None
        self.generation = 0
        """Number of passes; the same on all ranks."""
        self._makers = _Makers()
        self._memory = MessageMemory()

    def mount(self, options: LoaderOptions, data: Dataset) -> Mount:
        """Open the data set's tiers, once. Collective over the ranks that share the data."""
        if self._comm is None:
            self._comm = communicator(options.group, options.mesh)
        whole = options.group is None and options.mesh is None
        return data.mount(world() if whole else self._comm, options.pretend_nodes)

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
        self._check_order(batches, options.mode)
        if blocks_of(batches.order) is not None:
            mounted.open_stream()
        homes = None
        if not is_exact(options.mode):
            homes = xxhash.xxh3_64_hexdigest(mounted.placement.home.tobytes())
        batches.bind(options.mode, homes)
        planned = self._pass(
            options,
            data,
            mounted,
            (batches.order, batches.steps, batches.epoch, batches.own_batch),
            spans,
        )
        if data.recipe.pairs and is_exact(options.mode):
            planned = replace(planned, pairing=_pairing(planned, batches))
        formula = batches.formula
        ranks = mounted.ranks if formula.left is None else mounted.ranks_of(formula.members)
        epoch = epoch_plan(batches, mounted, options.mode, ranks)
        if isinstance(planned.maker, DeviceTierBuilder):
            planned.maker.keeps = epoch.keeps
        return _begun(batches, planned, epoch, epoch)

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
        steps, largest = len(sizes), int(sizes.max())
        self._check_order(None, options.mode)
        planned = self._pass(options, data, mounted, (listed, steps, data.epoch, largest), spans)
        alone = RankNodes(np.zeros(1, np.int32))
        placement, layout = mounted.placement, data.reader.layout
        epoch = EpochPlan(listed, 0, largest, steps, "batch", alone, 0, placement.home, layout)
        return _begun(batches, planned, epoch, None)

    def _check_order(self, batches: PlannedPass | None, mode: str) -> None:
        """Have the ranks compare their orders before the first pass. Collective.

        Later passes follow from it, unless a rank alone chooses another epoch. Ranks that may be
        lost, and spares, which take no part yet, are not waited for here.

        Args:
            batches: the pass; None if each rank has an order of its own.
            mode: how samples are dealt to ranks.
        """
        comm = self._comm
        if comm is None or comm.size == 1 or self.generation or membership() is not None:
            return
        if batches is None:
            check_same_order({"order": "a sampler's"}, comm)
        elif not batches.formula.members and batches.formula.ranks == comm.size:
            check_same_order({"order": "dlio's"} | order_facts(batches, mode), comm)

    def _pass(
        self,
        options: LoaderOptions,
        data: Dataset,
        mounted: Mount,
        about: tuple[Order, int, int, int],
        spans: Spans | None,
    ) -> PassContext:
        """Return all that the work of a pass needs.

        Args:
            about: (order, steps, epoch, samples of the largest batch).
        """
        order, steps, number, largest = about
        threads = options.num_workers or decode_threads(mounted)
        maker = self._makers.get(options, data, mounted, largest, threads)
        on_error = data.on_error if options.on_error is None else options.on_error
        # Made before the first block is brought, so that filling the tiers counts as this pass's.
        images = any(kind in IMAGES for _, kind in data.reader.schema.fields)
        stats = PassCounters(mounted.hierarchy, threads, "planned", images)
        return PassContext(
            order=order,
            steps=steps,
            epoch=number,
            data=data,
            mounted=mounted,
            comm=self._next_comm(options),
            maker=maker,
            mode=options.mode,
            threads=threads,
            ahead=_ahead(options.prefetch_factor, threads, maker.batch_bytes),
            generation=self.generation,
            skip=on_error == "skip",
            spans=spans,
            memory=self._memory,
            stats=stats,
        )

    def close(self) -> None:
        """Give the communicators back, and end what decodes on devices."""
        self._makers.close()
        for comm in (self._comm, self._other_comm):
            if comm is not None:
                comm.close()
        self._comm = self._other_comm = None

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


def _begun(
    batches: Pass, planned: PassContext, epoch: EpochPlan, shared: EpochPlan | None
) -> RunningPass:
    """Begin the work of a pass.

    Args:
        shared: the plan, if all ranks have the same.
    """
    feed = _feed(planned, epoch, alone=shared is None)
    next(feed)
    return RunningPass(batches, planned.stats, feed, planned.spans, shared)


def _on_host(
    options: LoaderOptions, data: Dataset, mounted: Mount, batch_size: int, pinned: HostMemoryKind
) -> BatchBuilder:
    """Return a maker that decodes in the loader's threads."""
    recipe, collate = data.recipe, options.collate_fn
    decoded = mounted.decoded(recipe.decoder.recipe)
    tier = _device_tier(options, mounted)
    if tier is not None:
        return DeviceTierBuilder(recipe, batch_size, pinned, tier, decoded)
    default = options.collates_by_default
    if recipe.crops:
        return CropBatchBuilder(recipe, batch_size, None if default else collate, pinned, decoded)
    return maker_for(recipe, batch_size, collate, default, pinned)


def _pinned(options: LoaderOptions) -> HostMemoryKind:
    """Kind of memory that batches are made in."""
    if options.device is not None and torch.device(options.device).type == "cuda":
        return HostMemoryKind.IN_POOL
    return (
        HostMemoryKind.BY_TORCH
        if options.pin_memory and torch.cuda.is_available()
        else HostMemoryKind.NO
    )


def _decodes_on(options: LoaderOptions) -> torch.device | None:
    """Return the device that decodes; None for the loader's threads."""
    if options.decode == "cpu" or options.device is None:
        return None
    return target_of(options.device)


def _device_tier(options: LoaderOptions, mounted: Mount) -> DeviceTier | None:
    """Return the tier on the device of the batches; None if none is specified.

    Raises UsageError for a loader that cannot use it.
    """
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


def decode_threads(mounted: Mount) -> int:
    """Return the number of decode threads for one rank: its part of its node's cores."""
    here = len(mounted.ranks.local(mounted.nodes.here)) * mounted.nodes.per_machine
    return max(1, min(_MOST_THREADS, available_cores() // max(1, here)))


def _ahead(factor: int | None, threads: int, batch_bytes: int) -> int:
    """Batches under way at a time.

    As many as torch's loader has, within a budget of bytes unless the user asked for a number:
    batches beyond the processor's caches cost memory bandwidth and gain nothing.
    """
    if factor is not None:
        return max(2, factor) * threads
    budget = max(_AHEAD_BYTES, threads * _AHEAD_BYTES_A_THREAD)
    return max(2, min(2 * threads, budget // max(1, batch_bytes)))


def _feed(planned: PassContext, epoch: EpochPlan, alone: bool) -> BatchStream:
    """Yield the batches of a pass.

    Args:
        alone: this rank exchanges no samples with others.
    """
    with ExitStack() as stack:
        planner = _hurry_first_batch(planned, epoch)
        streamed = None
        if (blocks := blocks_of(planned.order)) is not None:
            # Before the shuffle starts, so that samples of these blocks are not read one by one.
            streamed = stack.enter_context(streamed_blocks(planned, epoch, blocks))
        hierarchy = planned.mounted.hierarchy
        shuffle = Shuffle(
            planned.comm,
            hierarchy,
            epoch,
            planned.generation,
            planned.memory,
            planner,
            # A rank was lost since, or in this epoch.
            alone=alone or epoch.ranks.size != planned.comm.size or epoch.left is not None,
        )
        pipeline = Pipeline(shuffle, range(planned.steps), _work(planned))
        stack.callback(pipeline.close)
        pipeline.start()
        yield None
        while (batch := pipeline.take()) is not None:
            if streamed is not None:
                done = min(batch.step.number + 1, shuffle.sent)
                streamed.done(epoch.position + done * epoch.global_batch)
            fed = fed_of(batch, planned)
            del batch
            yield fed
            del fed


def epoch_plan(batches: PlannedPass, mounted: Mount, mode: str, ranks: RankNodes) -> EpochPlan:
    """Return the facts of a pass that all its ranks agree on.

    Args:
        ranks: those that share the pass; those that began it, of an inexact one that others go on
            with.
    """
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
        batch_size=batches.batch_size,
        steps=batches.steps,
        mode=mode,
        ranks=ranks,
        rank=formula.rank,
        home=home,
        layout=layout,
        shares=batches.shares,
        left=formula.left,
        on_devices=mounted.on_devices,
    )


def _hurry_first_batch(planned: PassContext, epoch: EpochPlan) -> WindowPlan | None:
    """Start filling the tiers, the first batch's samples first; return the planner used for it."""
    mounted = planned.mounted
    if not mounted.hierarchy.missing():
        return None
    planner = plan_epoch(epoch)
    first = planner.window(range(min(1, epoch.steps)))
    wanted = np.concatenate([first.samples[first.senders < 0], *first.sends.values()])
    # A sample of a mixture may occur twice, and is read once.
    _, firsts = np.unique(wanted, return_index=True)
    wanted = wanted[np.sort(firsts)]
    mounted.hierarchy.hurry(wanted, functools.partial(mounted.fill, epoch.order))
    return planner


def _work(planned: PassContext) -> PipelineWork:
    return PipelineWork(
        hierarchy=planned.mounted.hierarchy,
        maker=planned.maker,
        clock=planned.stats.clock,
        epoch=planned.epoch,
        threads=planned.threads,
        ahead=planned.ahead,
        timeout_s=default_timeout_s(),
        peer_timeout_s=peer_timeout_s(),
        skip=planned.skip,
        trace=planned.spans,
        pairing=planned.pairing,
    )


def _pairing(planned: PassContext, batches: PlannedPass) -> EpochPartners:
    """Return the partners of samples in a pass whose batches are mixed."""
    hierarchy = planned.mounted.hierarchy

    def fetch(sample: int) -> Buffer:
        return hierarchy.read_one(sample)[0]

    return EpochPartners(
        order=batches.order,
        position=batches.cursor.position,
        end=batches.samples,
        global_batch=batches.global_batch,
        fetch=fetch,
        skip=planned.skip,
    )
