"""Which engine makes the batches of a pass, and what it keeps from pass to pass."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, default_collate

from dlio.comm import Communicator, world
from dlio.errors import UsageError
from dlio.loader.dataset import Dataset
from dlio.loader.device import device_feed, transformed_feed
from dlio.loader.empty import EmptyAware
from dlio.loader.feed import Feed
from dlio.loader.foreign import accelerate
from dlio.loader.passes import BatchesPass, Pass, PlannedPass
from dlio.loader.planned.feed import Planned, planned_feed
from dlio.loader.planned.makers import Maker, maker_for
from dlio.loader.ranks import communicator
from dlio.loader.stats import Stats
from dlio.loader.threads import Fetching, pin_with, thread_feed, torch_feed
from dlio.loader.trace import Spans
from dlio.plan.block_order import BlockOrder
from dlio.plan.order import Order
from dlio.plan.sample_mask import SampleMask
from dlio.plan.shares import Shares
from dlio.shuffle.wire import MessageMemory
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.mount import Mount
from dlio.util.cores import available_cores

_MOST_THREADS: Final = 16
_AHEAD_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Begun:
    """A pass whose work is under way."""

    engine: str
    """`planned`, `threads` or `torch`."""
    state: dict[str, Any]
    """Where it begins."""
    shares: Shares | None
    """Of the global batch, where they are not even."""
    kept: SampleMask | None
    """The epoch's samples, where they are not all."""
    stats: Stats
    feed: Feed
    spans: Spans | None


class Engines:
    """What a loader's engines keep from pass to pass: communicators, batch memory, and the pass
    that is begun ahead. Owned by the loader, whose options are read anew for each pass."""

    def __init__(self) -> None:
        self.base_seed_drawn = False
        """Whether torch's persistent workers would have their seeds."""
        self._comm: Communicator | None = None
        self._other_comm: Communicator | None = None
        self._generation = 0
        self._maker: tuple[Any, Maker] | None = None
        self._maker_batch = 0
        """Samples that a batch of its memory takes."""
        self._ahead: Begun | None = None
        self._memory = MessageMemory()

    def begin(self, loader: Any, data: Dataset | None, batches: Pass) -> Begun:
        """Have the work of a pass under way.

        Args:
            data: the loader's data set as dlio reads it; None where it does not.
        """
        spans = Spans() if loader.trace is not None else None
        engine, stats, feed = self._chosen(loader, data, batches, spans)
        stats.engine = engine
        target = _target_device(loader)
        if target is not None:
            feed = device_feed(feed, target)
        if engine == "planned" and data is not None and loader.collate_fn is default_collate:
            feed = transformed_feed(feed, data.batch_transform)
        next(feed)
        kept = batches.kept if isinstance(batches, PlannedPass) else None
        return Begun(engine, batches.state(), _shares(batches), kept, stats, feed, spans)

    def begin_ahead(self, loader: Any, data: Dataset | None, batches: Pass) -> None:
        """Begin the pass that is likely to be next, while the last batches of this one are
        consumed; it is dropped if another is wanted then."""
        if self._ahead is None:
            self._ahead = self.begin(loader, data, batches)

    def taken_ahead(self, batches: Pass) -> Begun | None:
        """The pass that was begun ahead, where it is this one."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        kept = batches.kept if isinstance(batches, PlannedPass) else None
        same = ahead.shares == _shares(batches) and ahead.kept is kept
        if ahead.state != batches.state() or not same:
            ahead.feed.close()
            return None
        ahead.stats.restart()
        return ahead

    def drop_ahead(self) -> None:
        """End the pass that was begun ahead."""
        if self._ahead is not None:
            self._ahead.feed.close()
            self._ahead = None

    def close(self) -> None:
        """End what is ahead, and give the communicators back."""
        self.drop_ahead()
        for comm in (self._comm, self._other_comm):
            if comm is not None:
                comm.close()
        self._comm = self._other_comm = None

    def _chosen(
        self, loader: Any, data: Dataset | None, batches: Pass, spans: Spans | None
    ) -> tuple[str, Stats, Feed]:
        """(its name, counts that have begun, batches)"""
        in_threads = _in_threads(loader, data)
        if data is not None and isinstance(batches, PlannedPass) and in_threads:
            return self._planned(loader, data, batches, spans)
        if data is not None:
            self._mount(loader, data).fill(Order(len(data), 0, 0, shuffled=False))
        if in_threads and (loader.num_workers > 0 or data is not None):
            return self._threads(loader, data, batches, spans)
        stats = Stats(_hierarchy(data))
        skip = batches.skip if isinstance(batches, BatchesPass) else 0
        if loader.on_error == "skip":
            raise UsageError("on_error='skip' works with threads: set num_workers=1 or more")

        def begin() -> Iterator[Any]:
            given, loader.collate_fn = loader.collate_fn, _collating(loader, data, batches)
            try:
                return TorchLoader.__iter__(loader)
            finally:
                loader.collate_fn = given

        return "torch", stats, torch_feed(begin, skip)

    def _planned(
        self, loader: Any, data: Dataset, batches: PlannedPass, spans: Spans | None
    ) -> tuple[str, Stats, Feed]:
        mounted = self._mount(loader, data)
        if isinstance(batches.order, BlockOrder):
            mounted.let_pass()
        if self._other_comm is None and loader.persistent_workers:
            self._other_comm = communicator(loader.group, loader.mesh)
        assert self._comm is not None
        key = (id(data), loader.collate_fn, loader.pin_memory)
        size = batches.own_batch
        if self._maker is None or self._maker[0] != key or size > self._maker_batch:
            pinned = loader.pin_memory and torch.cuda.is_available()
            default = loader.collate_fn is default_collate
            decoded = mounted.decoded(data.decoder.recipe)
            maker = maker_for(data, size, loader.collate_fn, default, pinned, decoded)
            self._maker, self._maker_batch = (key, maker), size
        self._generation += 1
        # The last pass's messages may be under way while the next one begins.
        comm = self._comm
        if self._other_comm is not None and self._generation % 2:
            comm = self._other_comm
        threads = loader.num_workers or _own_cores(mounted)
        on_error = data.on_error if loader.on_error is None else loader.on_error
        plan = Planned(
            data=data,
            mounted=mounted,
            comm=comm,
            maker=self._maker[1],
            mode=loader.mode,
            threads=threads,
            ahead=_ahead(loader.prefetch_factor, threads, self._maker[1].batch_bytes),
            generation=self._generation,
            skip=on_error == "skip",
            trace=spans,
            memory=self._memory,
        )
        # Before the first block is brought: what fills tiers is counted in this pass.
        stats = Stats(mounted.hierarchy, threads)
        return "planned", stats, planned_feed(plan, batches, stats)

    def _threads(
        self, loader: Any, data: Dataset | None, batches: Pass, spans: Spans | None
    ) -> tuple[str, Stats, Feed]:
        threads = loader.num_workers
        if not threads and data is not None and data.mounted is not None:
            threads = _own_cores(data.mounted)
        stats = Stats(_hierarchy(data), threads)
        pin = None
        if loader.pin_memory and torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            pin = pin_with(accelerator.type if accelerator is not None else None)
        factor = 2 if loader.prefetch_factor is None else max(1, loader.prefetch_factor)
        work = Fetching(
            dataset=loader.dataset if data is None else data,
            collate=_collating(loader, data, batches),
            batched=loader._auto_collation,
            threads=threads,
            ahead=threads * factor,
            in_order=loader.in_order,
            timeout_s=loader.timeout,
            skip=loader.on_error == "skip",
            pin=pin,
            init=loader.worker_init_fn,
        )
        if not (loader.persistent_workers and self.base_seed_drawn):
            # As torch does, so that what is drawn next is the same.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self.base_seed_drawn = True
        return "threads", stats, thread_feed(work, batches, stats, spans)

    def _mount(self, loader: Any, data: Dataset) -> Mount:
        if self._comm is None:
            self._comm = communicator(loader.group, loader.mesh)
        whole = loader.group is None and loader.mesh is None
        return data.mount(world() if whole else self._comm, loader.pretend_nodes)


def _shares(batches: Pass) -> Shares | None:
    return batches.shares if isinstance(batches, PlannedPass) else None


def _ahead(factor: int | None, threads: int, batch_bytes: int) -> int:
    """Batches under way at a time: as torch's loader has them, within a budget of bytes where the
    user did not ask for a number; what is beyond the processor's caches costs, and gains nothing.
    """
    if factor is not None:
        return max(2, factor) * threads
    return max(2, min(2 * threads, _AHEAD_BYTES // max(1, batch_bytes)))


def _own_cores(mounted: Mount) -> int:
    """A rank's part of its node's cores, for threads that decode."""
    here = len(mounted.ranks.local(mounted.nodes.here)) * mounted.nodes.per_machine
    return max(1, min(_MOST_THREADS, available_cores() // max(1, here)))


def _in_threads(loader: Any, data: Dataset | None) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return False
    if loader.workers is not None:
        return bool(loader.workers == "thread")
    wants = loader.worker_init_fn is not None or loader.multiprocessing_context is not None
    return data is not None or not wants


def _collating(loader: Any, data: Dataset | None, batches: Pass) -> Callable[[list[Any]], Any]:
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    if not isinstance(batches, PlannedPass):
        return collate
    return EmptyAware(collate, loader.dataset if data is None else data)


def _target_device(loader: Any) -> torch.device | None:
    """Where batches are to be; None to leave them where they are made."""
    if loader.device is None:
        return accelerate.device(loader)
    target = torch.device(loader.device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _hierarchy(data: Dataset | None) -> Hierarchy | None:
    return data.mounted.hierarchy if data is not None and data.mounted is not None else None
