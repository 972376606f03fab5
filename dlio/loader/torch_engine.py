"""torch's own engines: worker processes, iterable data sets, and loaders without any workers."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch

from dlio.loader.batch_stream import BatchResult, BatchStream
from dlio.loader.contract import CollateFn, Index, UserDataset
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.nested_batches import samples_in
from dlio.loader.passes import Pass
from dlio.loader.sampler_pass import BatchesPass
from dlio.loader.torch_private import BaseDataLoaderIter

_TIMED_OUT: Final = "DataLoader timed out"


class _PlainLoader(torch.utils.data.DataLoader[Any]):
    """torch's loader, made again for each pass of a loader that has warned already."""

    def check_worker_number_rationality(self) -> None:
        """Warn of nothing."""


class TorchEngine:
    """Makes batches by a plain DataLoader of torch, whose sampler it is: it has the indices of the
    current pass. Persistent workers hold it from pass to pass."""

    def __init__(self) -> None:
        self._batches: Pass | None = None

    def __iter__(self) -> Iterator[Index]:
        assert self._batches is not None
        return iter(self._batches)

    def __len__(self) -> int:
        steps = None if self._batches is None else self._batches.steps
        if steps is None:
            raise TypeError("the sampler has no length")
        return steps

    def iterator(
        self,
        options: LoaderOptions,
        collate: CollateFn,
        batches: Pass,
        kept: BaseDataLoaderIter | None,
    ) -> BaseDataLoaderIter:
        """Begin a pass with torch's iterator; `kept` is that of persistent workers, which is used
        again."""
        self._batches = batches
        loader = plain_loader(options, collate, self)
        # torch's iterator compares what it yields with the length that its loader was asked for.
        if options.length_was_read:
            len(loader)  # torch warns when an iterable yields more than it said.
        if kept is None:
            return loader._get_iterator()
        # As torch's `DataLoader.__iter__` does with persistent workers; torch has no public way
        # to it.
        kept._reset(loader)
        return kept


def plain_loader(
    options: LoaderOptions,
    collate: CollateFn,
    indices: Any,
    server: UserDataset = None,
    start: Callable[[int], None] | None = None,
) -> "torch.utils.data.DataLoader[Any]":
    """Return a loader of torch with a loader's options, and `indices` as the sampler of its items.

    Workers serve batches of `server`, if given, in place of the loader's own data set, and begin by
    `start`.
    """
    given: dict[str, Any] = {}
    if server is not None:
        given = {"batch_size": None, "sampler": indices}
    elif options.iterable:
        given = {"batch_size": options.batch_size, "drop_last": options.drop_last}
    elif options.batched:
        given = {"batch_sampler": indices}
    else:
        given = {"batch_size": None, "sampler": indices}
    if options.num_workers > 0:
        given |= {
            "prefetch_factor": options.prefetch_factor,
            "persistent_workers": options.persistent_workers,
            "multiprocessing_context": options.multiprocessing_context,
        }
    return _PlainLoader(
        options.dataset if server is None else server,
        num_workers=options.num_workers,
        collate_fn=collate,
        pin_memory=options.pin_memory,
        timeout=options.timeout,
        worker_init_fn=options.worker_init_fn if server is None else start,
        generator=options.generator,
        pin_memory_device=options.pin_memory_device,
        in_order=options.in_order,
        **given,
    )


def torch_feed(iterator: Iterator[Any], batches: Pass) -> BatchStream:
    """Yield the batches of an iterator of torch; a resumed iterable skips those it has had."""
    for _ in range(batches.skip if isinstance(batches, BatchesPass) else 0):
        with suppress(StopIteration):
            next(iterator)
    yield None
    yield from fed_by(iterator)


def fed_by(iterator: Iterator[Any]) -> Iterator[BatchResult]:
    """Yield an iterator's batches, and its errors in their place, until it ends."""
    while True:
        try:
            data = next(iterator)
        except StopIteration:
            return
        # A worker's exception does not end torch's iterator: the next call returns the next
        # batch.
        except Exception as error:
            # A batch that comes too late comes at the next call.
            is_late = str(error).startswith(_TIMED_OUT)
            yield BatchResult(None, 0, None, error, in_place=not is_late)
            continue
        fed = BatchResult(data, samples_in(data))
        del data
        yield fed
        del fed
