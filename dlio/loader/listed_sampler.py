"""Samplers whose order is known in advance: listed once a pass, and then read as planned.

torch's samplers and users' own, if they have a length, are asked for the whole pass when it begins,
in the order and with the random numbers that torch's loader would take. The samples then come
through the planned engine: blocks are brought in the order of their use, and crops are decoded into
the batch. Samplers without a length, and batch samplers that are neither torch's own nor a list,
may depend on the batches that have been used: they are asked batch by batch.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from dlio.loader.batch_stream import BatchStream
from dlio.loader.contract import Index
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.sampler_pass import SamplerPass

_I64 = npt.NDArray[np.int64]
_MOST_BATCHES: Final = 1 << 26
"""Most batches that are listed; 8 bytes a sample."""


def is_listable(options: LoaderOptions) -> bool:
    """True if a pass that follows the options' sampler can be listed when it begins."""
    # A `worker_init_fn` may change the data set that the sampler draws from, so listing would see
    # another one.
    if not options.batched or options.worker_init_fn is not None:
        return False
    # Both are about batches that come late or early, which the planned engine has no notion of.
    if options.timeout or not options.in_order:
        return False
    batches: Any = options.batch_sampler
    own = type(batches) is BatchSampler
    # A batch sampler of the user's may look at the loss of the last batch before it chooses the
    # next one.
    if batches is not None and not own and not isinstance(batches, list | tuple):
        return False
    sampler: Any = batches.sampler if own else batches
    if sampler is None:
        sampler = options.sampler
    try:
        return len(sampler) <= _MOST_BATCHES
    except (TypeError, NotImplementedError):
        return False


class ListedPass:
    """A pass whose batches were drawn from a sampler in advance. Its place and state are still
    asked of `batches`."""

    def __init__(self, batches: SamplerPass) -> None:
        self._batches = batches
        self.epoch = batches.epoch
        self.consumed, self.state = batches.consumed, batches.state
        self.next_state = batches.next_state
        self.drawn: list[Any] = []
        """The batches."""
        self._rest: Iterator[Index] = iter(())
        self.is_whole = True
        """False if the sampler has yielded more than its length."""
        self.error: Exception | None = None
        """The exception that the sampler has raised after these batches."""
        iterator = iter(batches)
        steps = batches.steps or 0
        try:
            self.drawn.extend(itertools.islice(iterator, steps))
            # Some samplers yield more than `len` says. torch's loader hands all of it out, so one
            # more is asked for.
            more = list(itertools.islice(iterator, 1))
            if more:
                self.drawn += more
                self.is_whole, self._rest = False, iterator
        except Exception as error:
            # Kept for later: torch's loader would raise it after the batches that were drawn before
            # it.
            self.error, self._rest = error, _raising(error)

    def __iter__(self) -> Iterator[Index]:
        return itertools.chain(self.drawn, self._rest)

    @property
    def steps(self) -> int | None:
        return self._batches.steps


def listed_samples(batches: ListedPass, samples: int) -> list[_I64] | None:
    """Return the indices of each batch, 0 to `samples` - 1; None if some are none of these."""
    if not batches.is_whole or not batches.drawn:
        return None
    listed = []
    for batch in batches.drawn:
        numbers = _numbers(batch)
        if numbers is None or not len(numbers):
            return None
        if int(numbers.min()) < -samples or int(numbers.max()) >= samples:
            return None
        # Negative indices count from the end, as those of lists do.
        listed.append(numbers % samples)
    return listed


def raising_at_end(feed: BatchStream, error: Exception) -> BatchStream:
    """Yield the batches of a feed, then raise the error that ended its sampler."""
    with closing(feed):
        yield None
        yield from feed
    raise error


def _numbers(batch: Sequence[Any]) -> _I64 | None:
    # A bool has `__index__`, too, but a data set may mean something else by `data[True]`.
    if not isinstance(batch, list | tuple) or bool in map(type, batch):
        return None
    try:
        return np.fromiter(map(operator.index, batch), np.int64, len(batch))
    except (TypeError, ValueError, OverflowError):
        return None


def _raising(error: Exception) -> Iterator[Index]:
    raise error
    yield
