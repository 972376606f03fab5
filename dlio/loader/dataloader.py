"""The loader: torch's DataLoader, fed from the hierarchy, shared among the ranks of a job."""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, Sampler

from dlio.errors import UsageError
from dlio.loader.dataset import Dataset, open_dataset
from dlio.loader.engines import Engines
from dlio.loader.feed import Fed, LoaderIterator
from dlio.loader.foreign import accelerate
from dlio.loader.foreign.adapt import adapted
from dlio.loader.passes import BatchesPass, Pass, PlannedPass, SamplerPass, check_state
from dlio.loader.ranks import place
from dlio.loader.stats import Stats, diagnose
from dlio.loader.trace import Spans, path_of
from dlio.plan.block_order import window_of
from dlio.plan.epoch import check_mode, check_shares, is_exact
from dlio.plan.order import Cursor
from dlio.plan.sample_mask import SampleMask
from dlio.plan.schedule import steps_in_epoch
from dlio.plan.shares import checked_shares
from dlio.util.cores import available_cores

_log = logging.getLogger("dlio")
Workers = Literal["thread", "process"]


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader, with the same arguments and the same behaviour, and:

    - data sets of `dlio.open`, and those that dlio understands (torchvision's ImageFolder and
      DatasetFolder, Subset and ConcatDataset of them), are read through their tiers, in an order
      that is a formula of (seed, epoch), by threads that decode into the batch's own memory;
    - any other map-style data set is asked in threads, in the order that torch would have;
    - in a distributed run (MPI, or torch.distributed) without a sampler the ranks share the data:
      each gets its part of every global batch of `batch_size` x ranks samples, the last, smaller
      one shared out evenly, and an epoch's samples are the same for any number of ranks;
    - `state_dict` at any step, `load_state_dict` on any number of ranks and workers.

    Of labelled images from `dlio.open` a batch is a uint8 tensor of shape (n, 3, size, size) in
    channels-last memory, and an int64 tensor of shape (n,). With the data set's `transform` the
    first is what torch's default_collate makes of its results. Other samples come as collate_fn
    makes them of `decode_sample`'s, or of the transform's results.

    With a data set of dlio's all ranks iterate alike: constructing the iterator is collective, a
    step is not.

    Args:
        dataset ... in_order: as torch's. `num_workers` are threads, or processes; for data sets
            of dlio's 0 takes a thread a core.
        tiers: keep what the data set returns in tiers, as `dlio.open` does; without pickle.
        mode: `batch` trains a sample where it lives, `global` anywhere; `local` keeps each rank to
            what its node holds, `partial(q)` but for a fraction q, `ring` hands it on each epoch.
        source_order: of what no tier holds. `sample` reads samples as the order comes to them;
            `block(k)` whole blocks, once an epoch, for small samples: k blocks are shuffled at a
            time, 16 for `block`.
        seed: of the order; the data set's, the generator's, or 0 by default. With it, the order of
            any map-style data set is dlio's formula.
        workers: `thread`; or `process`, torch's own workers, for Python that holds the GIL. By
            default processes where `worker_init_fn` or `multiprocessing_context` ask for them,
            and threads otherwise.
        on_error: `stop` at a sample that cannot be read, or `skip` and count it; the data set's
            own choice, or `stop`, by default.
        device: hand out batches on this device, copied ahead of their use.
        mesh, group: the ranks that share the data, a DeviceMesh with a data-parallel dimension or
            a process group; the others, of one model-parallel group, get the same samples.
        shares: samples that each rank gets of a step, for ranks of different speed; the same list
            on all ranks. It sums to `batch_size` x ranks, and the last, smaller step is dealt in
            proportion. As an attribute it may be set between passes. Even for None.
        trace: write a trace of each pass for chrome://tracing or Perfetto to this file.
        writer: a SummaryWriter of TensorBoard's, for scalars after each pass.
        pretend_nodes: behave as if the ranks were spread over that many nodes.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        tiers: Any = None,
        mode: str = "batch",
        source_order: str = "sample",
        seed: int | None = None,
        workers: Workers | None = None,
        on_error: Literal["stop", "skip"] | None = None,
        device: torch.device | str | int | None = None,
        mesh: Any = None,
        group: Any = None,
        shares: Sequence[int] | None = None,
        trace: str | None = None,
        writer: Any = None,
        pretend_nodes: int | None = None,
    ) -> None:
        _check(dataset, mode, workers, on_error, tiers)
        check_shares(mode, shares is not None)
        if shares is not None and (sampler is not None or batch_sampler is not None):
            raise UsageError("shares= are of the loader's own order: leave the sampler out")
        if window_of(source_order) is not None and not is_exact(mode):
            raise UsageError(f"source_order={source_order!r} goes with mode batch or global")
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # Public, under their own names: those who make a loader anew from an old one look there.
        self.shuffle = shuffle
        self.tiers = tiers
        self.mode = mode
        self.source_order = source_order
        self.seed = seed
        self.workers = workers
        self.on_error = on_error
        self.device = device
        self.mesh, self.group = mesh, group
        self.shares = shares
        self.trace, self.writer = trace, writer
        self.pretend_nodes = pretend_nodes
        self.last_samples: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Indices of the samples of the batch that was just handed out."""
        self._is_accelerate_prepared = sampler is None and batch_sampler is None
        self._users_sampler = sampler is not None or batch_sampler is not None
        self._forget()

    def _forget(self) -> None:
        """Everything that a copy of a loader must not share with it."""
        self._state: dict[str, Any] | None = None
        self._next_epoch = 0
        self._chosen_epoch: int | None = None
        self._kept: tuple[int, SampleMask] | None = None
        self._pass: Pass | None = None
        self._handed_out = False
        self._engines = Engines()
        self._data: Dataset | None = None
        self._stats = Stats()
        self._current: weakref.ref[LoaderIterator] | None = None

    @property
    def data(self) -> Dataset:
        """The data set as dlio reads it. Raises UsageError where it cannot."""
        found = self._planned_data()
        if found is None:
            raise UsageError(f"{type(self.dataset).__name__} is not read by dlio itself")
        return found

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on all ranks; with `keep`, in the chosen one."""
        if self.follows_formula():
            assert self.batch_size is not None
            _, ranks = place(self.group, self.mesh)
            count = self._count() if self._kept is None else self._kept[1].count
            return steps_in_epoch(count, 0, self.batch_size * ranks, self.drop_last)
        if isinstance(self.dataset, IterableDataset):
            return super().__len__()
        sampler: Any = super()._index_sampler
        return len(sampler)

    def set_epoch(self, epoch: int, keep: Any = None) -> None:
        """Choose the next pass's epoch. A resumed position in that epoch is kept.

        Args:
            keep: the samples of that pass, the same on all ranks, as `SampleMask.of` takes
                them; all for None. The others are in no plan. Raises UsageError where the order
                is not dlio's own.
        """
        if keep is not None and not self.follows_formula():
            raise UsageError("keep= is for orders of dlio's own: give seed=, and no sampler")
        self._kept = None if keep is None else (epoch, SampleMask.of(keep, self._count()))
        for sampler in (self.sampler, getattr(self.batch_sampler, "sampler", None)):
            choose = getattr(sampler, "set_epoch", None)
            if choose is not None:
                choose(epoch)
        if self._state is None or self._state["epoch"] != epoch:
            self._state = None
            self._chosen_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: what was handed out is consumed, what is prefetched is not.

        The same on all ranks after the same step, and good for any number of them; whole numbers
        and text, for torch.distributed.checkpoint as for JSON.
        """
        if self._state is not None:
            return dict(self._state)
        if self._pass is not None:
            return self._pass.state() if self._handed_out else self._pass.next_state()
        return self._begin(peek=True).state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, on this number of ranks and workers.

        Raises UsageError when it is of another data set, seed or kind of order.
        """
        state = dict(state_dict)
        if self.follows_formula():
            cursor = Cursor.from_dict(state)
            seed, count = self._order_seed(), self._count()
            if (cursor.seed, cursor.samples) != (seed, count):
                raise UsageError(
                    f"state of a loader with seed {cursor.seed} over {cursor.samples} samples "
                    f"does not fit this one, with seed {seed} over {count}"
                )
        else:
            check_state(state)
        self._state = state
        self._chosen_epoch = None

    def stats(self) -> dict[str, Any]:
        """This rank's counts of the current or last pass.

        `engine`, `samples`, `batches` and `seconds`; `stall_s`, the seconds that `next` waited;
        `first_batch_s`; `threads`, and `thread_s`, their seconds by stage; `skipped` samples, by
        name. Of data sets of dlio's also `bytes` by place (`source`, `peer`, `ram`, `disk`);
        `sent` bytes and `messages` to peers; `late` samples that a peer did not send in time;
        `healed` samples that failed their checksum in a tier; `notes`, in words.
        """
        return self._stats.as_dict()

    def diagnosis(self) -> str:
        """One line on the current or last pass: its rate, what held it up, what to do about it.

        Logged after each pass, by the logger `dlio`, as information.
        """
        return diagnose(self.stats(), available_cores())

    @property
    def stall_s(self) -> float:
        """Seconds of the current or last pass that were spent waiting for batches."""
        return self._stats.stall_s

    def close(self) -> None:
        """Close what the loader and its data set hold open."""
        current = self._current() if self._current is not None else None
        if current is not None:
            current.close()
        self._engines.drop_ahead()  # It reads from the data set.
        if self._data is not None:
            self._data.close()
            if self._data is not self.dataset:
                self._data = None
        elif isinstance(self.dataset, Dataset):
            self.dataset.close()
        self._engines.close()
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins where the next pass of the original would.
        state = self._state
        if state is None and self._pass is not None:
            state = self._pass.next_state()
        copy = self.__dict__.copy()
        for name in ("_pass", "_data", "_current", "_iterator", "writer"):
            copy[name] = None
        del copy["_engines"]
        del copy["_stats"]
        return {**copy, "_state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stats = Stats()
        self._engines = Engines()

    # --- One pass -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self._begin()
        self._kept = self._kept if self._kept and self._kept[0] == batches.epoch else None
        begun = self._engines.taken_ahead(batches)
        self._pass, self._handed_out, self._state = batches, True, None
        if begun is None:
            begun = self._engines.begin(self, self._planned_data(), batches)
        stats, spans = begun.stats, begun.spans
        self._stats = stats
        try:
            length: int | None = len(batches)
        except TypeError:
            length = None
        end = accelerate.registered(self, length)

        def handed(fed: Fed | None) -> None:
            if fed is None:
                if self._pass is batches:
                    self._handed_out = False
                end.step(True)
                self._told(stats, spans, batches.epoch)
                return
            batches.consumed()
            self._pass, self._handed_out = batches, True
            if fed.indices is not None and len(fed.indices) and _are_numbers(fed.indices):
                self.last_samples = np.asarray(fed.indices, np.int64)
            elif fed.indices is not None:
                self.last_samples = np.empty(0, np.int64)
            end.step(False)
            if (
                self.persistent_workers
                and begun.engine == "planned"
                and stats.batches + 3 == length
            ):
                following = self._pass_of(batches.next_state())
                self._engines.begin_ahead(self, self._planned_data(), following)

        iterator = LoaderIterator(begun.feed, stats, length, handed)
        self._current = weakref.ref(iterator)
        return iterator

    def _pass_of(self, state: dict[str, Any]) -> PlannedPass:
        """The planned pass of a state."""
        assert self.batch_size is not None
        layout = None
        if self.source_order != "sample":
            if self._planned_data() is None:
                raise UsageError(
                    f"source_order={self.source_order!r} is for data sets that dlio reads itself, "
                    f"not for {type(self.dataset).__name__}"
                )
            layout = self.data.reader.layout
        rank, ranks = place(self.group, self.mesh)
        shares = None
        if self.shares is not None:
            check_shares(self.mode, True)
            shares = checked_shares(self.shares, self.batch_size, ranks)
        return PlannedPass(
            state,
            bool(self.shuffle),
            self.batch_size,
            self.drop_last,
            rank,
            ranks,
            self.source_order,
            layout,
            shares,
            self._kept,
        )

    def _begin(self, peek: bool = False) -> Pass:
        """The pass that begins: resumed, chosen by set_epoch, or the next epoch."""
        state = self._state
        if state is None and self._pass is not None and not (peek and self._handed_out):
            state = self._pass.next_state()
        if self.follows_formula():
            seed, count = self._order_seed(), self._count()
            if state is None:
                state = Cursor(seed, 0, 0, count).as_dict()
            if self._chosen_epoch is not None:
                state = Cursor(seed, self._chosen_epoch, 0, count).as_dict()
                if not peek:
                    self._chosen_epoch = None
            return self._pass_of(state)
        epoch = int((state or {}).get("epoch", 0))
        if self._chosen_epoch is not None:
            epoch, state = self._chosen_epoch, None
            if not peek:
                self._chosen_epoch = None
        if isinstance(self.dataset, IterableDataset):
            return BatchesPass(epoch, state)
        # A pass that is over left its random numbers where the next begins.
        fresh = self._pass is not None and self._state is None
        return SamplerPass(
            self.sampler,
            self.batch_sampler,
            self.generator,
            epoch,
            None if fresh or peek else state,
            not (self.persistent_workers and self._engines.base_seed_drawn),
        )

    @property
    def _index_sampler(self) -> Any:
        """What torch's own engines take their indices from."""
        if self._pass is None or isinstance(self.dataset, IterableDataset):
            return super()._index_sampler
        return _Indices(self)

    def check_worker_number_rationality(self) -> None:
        """Torch's warning of more workers than cores, where they are processes."""
        if "last_samples" in self.__dict__:
            super().check_worker_number_rationality()

    def _planned_data(self) -> Dataset | None:
        """The data set as dlio reads it; None where torch's way is taken."""
        if self._data is None:
            if isinstance(self.dataset, Dataset):
                self._data = self.dataset
                if self.tiers is not None and self.dataset.tiers != self.tiers:
                    self.dataset.retier(self.tiers)
            elif not isinstance(self.dataset, IterableDataset):
                self._data = adapted(self.dataset, self.tiers)
                if self._data is None and self.tiers is not None:
                    self._data = open_dataset(self.dataset, tiers=self.tiers, image_size=None)
        return self._data

    def follows_formula(self) -> bool:
        """Whether the order is dlio's own, which its ranks share without a word."""
        if self._users_sampler or isinstance(self.dataset, IterableDataset) or not self.batch_size:
            return False
        if self.seed is not None or self._planned_data() is not None:
            return True
        return place(self.group, self.mesh)[1] > 1

    def _count(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def _order_seed(self) -> int:
        if self.seed is not None:
            return int(self.seed)
        if self.generator is not None:
            return int(self.generator.initial_seed()) % (1 << 63)
        found: Any = self.dataset
        return int(found.seed) if isinstance(found, Dataset) else 0

    def _told(self, stats: Stats, spans: Spans | None, epoch: int) -> None:
        """After a pass: the log, the trace, TensorBoard."""
        rank, ranks = place(self.group, self.mesh)
        if _log.isEnabledFor(logging.INFO):
            _log.info("epoch %d: %s", epoch, diagnose(stats.as_dict(), available_cores()))
        if spans is not None and self.trace is not None:
            spans.write(path_of(self.trace, rank, ranks), rank)
        if self.writer is not None:
            found = stats.as_dict()
            seconds = max(found["seconds"], 1e-9)
            scalars = {
                "samples_per_s": found["samples"] / seconds,
                "stall_share": found["stall_s"] / seconds,
                "first_batch_s": found["first_batch_s"] or 0.0,
                **{f"bytes_{name}": count for name, count in found.get("bytes", {}).items()},
                **{f"thread_s_{name}": spent for name, spent in found["thread_s"].items()},
            }
            for name, value in scalars.items():
                self.writer.add_scalar(f"dlio/{name}", value, epoch)


class _Indices:
    """The indices of whichever pass the loader is in. Torch's workers keep it from pass to pass."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        assert self._loader._pass is not None
        return iter(self._loader._pass)

    def __len__(self) -> int:
        return len(self._loader)


def _check(dataset: Any, mode: str, workers: str | None, on_error: str | None, tiers: Any) -> None:
    check_mode(mode)
    if workers not in (None, "thread", "process"):
        raise UsageError(f"workers={workers!r}: choose 'thread' or 'process'")
    if on_error not in (None, "stop", "skip"):
        raise UsageError(f"on_error={on_error!r}: choose stop or skip")
    if isinstance(dataset, str | os.PathLike):
        raise UsageError(f"{str(dataset)!r} is a path: open it with dlio.open first")
    if tiers is not None and isinstance(dataset, IterableDataset):
        raise UsageError("tiers= keeps samples by their index; an iterable data set has none")


def _are_numbers(indices: Any) -> bool:
    return isinstance(indices, np.ndarray) or isinstance(indices[0], int | np.integer)
