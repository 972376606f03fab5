"""The loader: batches of a data set, shared among the ranks of a job."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from dlio.comm import Communicator, world
from dlio.dataset import Dataset
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.order import Cursor, Order
from dlio.pipeline import (
    Batch,
    BatchMemory,
    Pipeline,
    Work,
    default_timeout_s,
    first_failure,
)
from dlio.schedule import Mode, steps_in_epoch
from dlio.shuffle import EpochPlan, Shuffle
from dlio.storage.hierarchy import Hierarchy

_PEER_TIMEOUT_S = 30.0
_SKIPPED = (SourceError, CorruptBlock)
"""What on_error="skip" leaves out: samples that cannot be read, checked or decoded."""


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Batches of `(images, labels)`, prefetched by threads, shuffled over all ranks.

    It knows its place in the MPI world by itself: each rank gets its share of every global
    batch of `batch_size` x ranks samples, and the last, smaller one is shared out evenly. An
    epoch's samples are the same for any number of ranks, each exactly once.

    Images are a uint8 tensor of shape (n, 3, size, size) in channels-last memory, labels an
    int64 tensor of shape (n,). With the data set's `transform` the first is what torch's
    default_collate makes of its results. Samples that are no labelled images come as
    default_collate makes them of `decode_sample`'s, or of the transform's results.

    All ranks iterate alike: constructing the iterator is collective, a step is not.

    Args:
        dataset: made by `dlio.open`.
        batch_size: per rank.
        shuffle: a fresh order each epoch, keyed by (seed, epoch); otherwise the reader's.
        num_workers: decode threads; 0 is taken as 1.
        drop_last: leave out the last, smaller global batch.
        pin_memory: batches in page-locked memory, for `.to("cuda", non_blocking=True)`.
        prefetch_factor: batches under way per worker.
        mode: `batch` trains a sample where it lives, `global` anywhere.
        seed: of the order; the data set's by default.
        pretend_nodes: behave as if the ranks were spread over that many nodes.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        num_workers: int = 2,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        mode: Mode = "batch",
        seed: int | None = None,
        pretend_nodes: int | None = None,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise UsageError(
                f"dlio.DataLoader reads data sets that dlio.open made, not {type(dataset).__name__}"
            )
        if batch_size < 1 or num_workers < 0 or prefetch_factor < 1:
            raise UsageError(
                f"batch_size={batch_size} and prefetch_factor={prefetch_factor} must be at least "
                f"1, num_workers={num_workers} at least 0"
            )
        if mode not in ("batch", "global"):
            raise UsageError(f"mode={mode!r}: choose batch or global")
        super().__init__(dataset, batch_size, shuffle, drop_last=drop_last)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.shuffle = shuffle
        self.mode: Mode = mode
        self.seed = dataset.seed if seed is None else seed
        self.pretend_nodes = pretend_nodes
        self.last_samples: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Sample indices of the batch that was just yielded."""
        self._cursor = Cursor(self.seed, 0, 0, len(dataset))
        self._resumed = True
        self._generation = 0
        self._comm: Communicator | None = None
        self._stats = _Stats()
        self._memory: BatchMemory | None = None

    @property
    def data(self) -> Dataset:
        return cast(Dataset, self.dataset)

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on all ranks."""
        return steps_in_epoch(len(self.data), 0, self._global_batch(world()), self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next pass's epoch. A resumed position in that epoch is kept."""
        if not (self._resumed and self._cursor.epoch == epoch):
            self._cursor = Cursor(self.seed, epoch, 0, len(self.data))
            self._resumed = True

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: what was yielded is consumed, what is prefetched is not.

        The same on all ranks after the same step, and good for any number of them.
        """
        return self._cursor.as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, on this number of ranks. Raises UsageError when it is of
        another data set or seed."""
        cursor = Cursor.from_dict(state)
        if (cursor.seed, cursor.samples) != (self.seed, len(self.data)):
            raise UsageError(
                f"state of a loader with seed {cursor.seed} over {cursor.samples} samples does "
                f"not fit this one, with seed {self.seed} over {len(self.data)}"
            )
        self._cursor = cursor
        self._resumed = True

    def stats(self) -> dict[str, Any]:
        """This rank's counts of the current or last pass.

        `samples` and `seconds`; `stall_s`, the seconds that `next` waited for a batch;
        `first_batch_s`; `bytes` by place (`source`, `peer`, `ram`, `disk`); `sent` bytes and
        `messages` to peers; `late` samples that a peer did not send in time; `healed` samples
        that failed their checksum in a tier; `skipped` samples, by name; `notes`, in words.
        """
        return self._stats.as_dict()

    @property
    def stall_s(self) -> float:
        """Seconds of the current or last pass that were spent waiting for batches."""
        return self._stats.stall_s

    def close(self) -> None:
        """Close what the loader and its data set hold open."""
        self.data.close()
        if self._comm is not None:
            self._comm.close()
            self._comm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_comm": None, "_stats": _Stats(), "_memory": None}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        cursor = self._start()
        return self._pass(cursor)

    def _start(self) -> Cursor:
        """The cursor of the pass that begins: resumed, chosen by set_epoch, or the next epoch."""
        cursor = self._cursor
        if not self._resumed:
            cursor = Cursor(self.seed, cursor.epoch + 1, 0, len(self.data))
        self._cursor = cursor
        self._resumed = False
        return cursor

    def _pass(self, cursor: Cursor) -> Iterator[Any]:
        data, comm = self.data, world()
        if self._comm is None:
            self._comm = comm.dup()
        mounted = data.mount(comm, self.pretend_nodes)
        order = Order(len(data), self.seed, cursor.epoch, self.shuffle)
        # Before the first block is brought: what fills tiers is counted in this pass.
        self._stats = stats = _Stats(mounted.hierarchy)
        mounted.fill(order)
        global_batch = self._global_batch(comm)
        assert self.batch_size is not None
        plan = EpochPlan(
            order=order,
            position=cursor.position,
            batch_size=self.batch_size,
            steps=steps_in_epoch(len(data), cursor.position, global_batch, self.drop_last),
            mode=self.mode,
            ranks=mounted.ranks,
            rank=comm.rank,
            home=mounted.placement.home,
        )
        threads = max(1, self.num_workers)
        if self._memory is None:
            side = data.image_size if data.crops and data.image_size is not None else 0
            shape = (self.batch_size, side, side, 3)
            self._memory = BatchMemory(shape, self.pin_memory and torch.cuda.is_available())
        work = Work(
            hierarchy=mounted.hierarchy,
            decoder=data.decoder,
            fields=(data.image_field, data.label_field) if data.crops else None,
            memory=self._memory,
            epoch=cursor.epoch,
            transform=data.transform,
            threads=threads,
            ahead=max(2, self.prefetch_factor or 2) * threads,
            timeout_s=default_timeout_s(),
            peer_timeout_s=_PEER_TIMEOUT_S,
        )
        self._generation += 1
        shuffle = Shuffle(self._comm, mounted.hierarchy, plan, self._generation)
        end = len(data) if not self.drop_last else cursor.position + plan.steps * global_batch
        try:
            with Pipeline(shuffle, range(plan.steps), work) as pipeline:
                while True:
                    stats.wait_begins()
                    batch = pipeline.take()
                    if batch is None:
                        break
                    tensors = self._tensors(batch, stats)
                    stats.wait_ends(len(self.last_samples))
                    step_end = min(cursor.position + (batch.step.number + 1) * global_batch, end)
                    self._cursor = Cursor(self.seed, cursor.epoch, step_end, len(data))
                    del batch
                    yield tensors
                    del tensors
        finally:
            stats.end()

    def _tensors(self, batch: Batch, stats: "_Stats") -> Any:
        """What the user gets of a batch; failed samples stop the pass, or are left out."""
        count = len(batch.step.samples)
        self.last_samples = batch.step.samples
        kept: Sequence[int] | None = None
        if batch.failed:
            error = first_failure(batch)
            if self.data.on_error != "skip" or not isinstance(error, _SKIPPED):
                raise error
            stats.skip(self.data, batch)
            kept = [slot for slot in range(count) if slot not in batch.failed]
            for k, slot in enumerate(kept):
                if k != slot:
                    batch.images[k] = batch.images[slot]
            batch.labels = batch.labels[kept]
            self.last_samples = batch.step.samples[kept]
            count = len(kept)
        labels = torch.from_numpy(batch.labels)
        if self.data.transform is None and self.data.crops:
            return torch.from_numpy(batch.images[:count]).permute(0, 3, 1, 2), labels
        made = batch.made if kept is None else [batch.made[slot] for slot in kept]
        collated = default_collate(made) if made else torch.empty(0)
        return (collated, labels) if self.data.crops else collated

    def _global_batch(self, comm: Communicator) -> int:
        assert self.batch_size is not None
        return self.batch_size * comm.size


class _Stats:
    """Counts of one pass: the hierarchy's counters since it began, and the waiting."""

    def __init__(self, hierarchy: Hierarchy | None = None) -> None:
        self._hierarchy = hierarchy
        self._before: dict[str, Any] = hierarchy.counters.snapshot() if hierarchy else {}
        self._after: dict[str, Any] | None = None
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._waiting_since = self._started
        self._samples = 0
        self.stall_s = 0.0
        self._first_batch_s: float | None = None
        self._skipped: list[str] = []

    def wait_begins(self) -> None:
        self._waiting_since = time.perf_counter()

    def wait_ends(self, samples: int) -> None:
        now = time.perf_counter()
        self.stall_s += now - self._waiting_since
        self._samples += samples
        if self._first_batch_s is None:
            self._first_batch_s = now - self._started

    def skip(self, data: Dataset, batch: Batch) -> None:
        for slot in sorted(batch.failed):
            self._skipped.append(data.reader.name(int(batch.step.samples[slot])))

    def end(self) -> None:
        self._ended = time.perf_counter()
        if self._hierarchy is not None:
            self._after = self._hierarchy.counters.snapshot()

    def as_dict(self) -> dict[str, Any]:
        counted: dict[str, Any] = {}
        if self._hierarchy is not None:
            now = self._after or self._hierarchy.counters.snapshot()
            for key, value in now.items():
                before = self._before[key]
                if isinstance(value, dict):
                    counted[key] = {place: value[place] - before[place] for place in value}
                else:
                    counted[key] = value - before
        return {
            "samples": self._samples,
            "seconds": (self._ended or time.perf_counter()) - self._started,
            "stall_s": self.stall_s,
            "first_batch_s": self._first_batch_s,
            "skipped": list(self._skipped),
            "notes": self._hierarchy.notes() if self._hierarchy is not None else [],
            **counted,
        }
