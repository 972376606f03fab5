"""Passes that follow a sampler or an iterable data set, and how they are resumed."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from dlio.errors import UsageError, printable
from dlio.loader.contract import Index, IndexBatches, Indices, State, StatefulObject
from dlio.loader.torch_draws import decoded, encoded
from dlio.util.units import counted

SAMPLER_KIND: Final = "sampler"
_FORMAT: Final = 2
_MOST_AHEAD: Final = 8
"""Batches that a framework fetches before it trains on them, at most."""


def sampler_state(epoch: int, batches: int, consumed: int) -> State:
    """Return the part of a state that all passes have which do not follow a formula: batches that
    were handed out, and the samples in them."""
    return {
        "format": _FORMAT,
        "kind": SAMPLER_KIND,
        "epoch": epoch,
        "batches": batches,
        "consumed": consumed,
    }


@dataclass(frozen=True, slots=True)
class SamplerOrder:
    """An order that a sampler of torch or of the user gives."""

    sampler: Indices
    """Yields indices."""
    batch_sampler: IndexBatches | None
    """torch's own over `sampler`, or a user's; None without batching."""
    generator: torch.Generator | None
    """Source of the sampler's random numbers; None for torch's global one."""
    draws_seed: bool
    """True if torch's loader would draw a base seed for workers before the sampler draws."""
    seed: int | None = None
    """Seed of the crops; None if it was given."""


class SamplerPass:
    """The batches that a sampler yields, from the place on that `state` has.

    How a pass is resumed in the middle depends on the sampler: one with `state_dict` restores its
    own state; torch's DistributedSampler is recomputed, for any number of ranks; with any other
    sampler the random numbers that it drew are drawn again and the batches handed out are skipped.
    """

    def __init__(self, order: SamplerOrder, epoch: int, state: State | None) -> None:
        self.epoch = epoch
        sampler, batch_sampler = order.sampler, order.batch_sampler
        # torch's own batches over the sampler can begin at any index; a user's cannot.
        self._own = batch_sampler if type(batch_sampler) is BatchSampler else None
        self._sampler: Indices = sampler if self._own is None else self._own.sampler
        self._whole: Iterable[Any] = self._sampler if batch_sampler is None else batch_sampler
        self._stateful = self._sampler if isinstance(self._sampler, StatefulObject) else None
        self._distributed: DistributedSampler[Any] | None = None
        if self._own is not None and type(self._sampler) is DistributedSampler:
            self._distributed = self._sampler
        self._generator = order.generator or getattr(self._sampler, "generator", None)
        self._state = state or {}
        self.seed: int | None = self._state.get("seed", order.seed)
        self._batches = int(self._state.get("batches", 0))
        self._samples = int(self._state.get("consumed", 0))
        self._drawn: deque[tuple[int, Any]] = deque()
        self._last: deque[tuple[int, Any]] = deque(maxlen=_MOST_AHEAD)
        """Samples of the batches handed out last, and the sampler's state before each."""
        if self._batches and self._state.get("order", self._order) != self._order:
            raise UsageError(
                f"loader state in the middle of an epoch in the order of {self._state['order']} "
                f"does not fit this loader, in that of {self._order}: make it as the one that was "
                "saved, or continue at the start of an epoch"
            )
        self._sampler_state = self._state.get("sampler")
        self._rng = self._state.get("rng")
        # Where the first pass has drawn a base seed, its resumption draws one as well, whatever the
        # number of workers is by now: the samples that follow in the generator are the same only
        # then.
        self._draws_seed = bool(self._state.get("seeded", order.draws_seed))
        if self._rng is not None:
            if self._generator is not None:
                self._generator.set_state(decoded(self._rng))
        elif self._distributed is None and self._stateful is None:
            generator = self._generator
            state_now = torch.get_rng_state() if generator is None else generator.get_state()
            self._rng = encoded(state_now)
        if isinstance(self._sampler, DistributedSampler) and "sampler_epoch" in self._state:
            self._sampler.set_epoch(int(self._state["sampler_epoch"]))

    @property
    def steps(self) -> int | None:
        try:
            return self._count()
        except TypeError:  # A sampler without a length.
            return None

    def __iter__(self) -> Iterator[Index]:
        for batch in self._indices():
            count = len(batch) if isinstance(batch, Sequence) else 1
            # Taken when a batch is drawn and used when it is handed out: prefetched batches are not
            # consumed.
            state = None if self._stateful is None else self._stateful.state_dict()
            self._drawn.append((count, state))
            yield batch

    def consumed(self) -> None:
        self._batches += 1
        if self._drawn:
            count, state = self._drawn.popleft()
            self._samples += count
            self._last.append((count, self._sampler_state))
            if state is not None:
                self._sampler_state = state

    def state(self, ahead: int = 0) -> State:
        """Return the state, or that of so many batches before, which nobody has used yet."""
        unused = list(self._last)[len(self._last) - ahead :] if ahead else []
        samples = self._samples - sum(count for count, _ in unused)
        sampler = unused[0][1] if unused else self._sampler_state
        state = sampler_state(self.epoch, self._batches - len(unused), samples)
        state["seeded"] = self._draws_seed
        if self.seed is not None:
            state["seed"] = self.seed
        state["order"] = self._order
        if self._stateful is not None and sampler is not None:
            state["sampler"] = sampler
        elif self._distributed is not None:
            before = int(self._state.get("ranks_consumed", 0))
            now = samples - int(self._state.get("consumed", 0))
            # Counted over all ranks, so that a run can be resumed on another number of them.
            state["ranks_consumed"] = before + now * self._distributed.num_replicas
            state["sampler_epoch"] = self._distributed.epoch
        elif self._rng is not None:
            state["rng"] = self._rng
            if self._generator is not None and self.steps == 0:
                state["after"] = encoded(self._generator.get_state())
        return state

    def next_state(self) -> State:
        state = sampler_state(self.epoch + 1, 0, 0)
        if self._generator is not None:
            state["rng"] = encoded(self._generator.get_state())
        return state

    def end(self) -> None:
        """Put the generator where the pass has left it, of which all batches were handed out."""
        if self._generator is not None and "after" in self._state:
            self._generator.set_state(decoded(self._state["after"]))

    @property
    def _order(self) -> str:
        """Text of what decides which samples are left in the middle of an epoch: the class of the
        sampler, and the number of its indices or batches."""
        whole = self._whole if self._own is None else self._sampler
        chosen = whole if self._distributed is None else self._distributed.dataset
        name = printable(type(whole).__name__)
        try:
            return f"{name} over {counted(_length(chosen), 'index')}"
        except TypeError:  # A sampler without a length.
            return name

    def _count(self) -> int:
        if self._batches and self._own is not None:
            if self._distributed is not None:
                left = len(self._remaining(self._distributed))
            else:
                left = _length(self._sampler) - self._samples
            size = self._own.batch_size
            return left // size if self._own.drop_last else -(-left // size)
        return _length(self._whole) - self._batches

    def _indices(self) -> Iterator[Index]:
        if self._stateful is not None and self._state.get("sampler") is not None:
            self._stateful.load_state_dict(self._state["sampler"])
            return iter(self._whole)
        if not self._state.get("batches") and not self._state.get("ranks_consumed"):
            if self._state.get("rng") is None or self._generator is not None:
                return iter(self._whole)
            return self._replayed(self._whole, 0)
        if self._own is None:
            return self._replayed(self._whole, self._batches)
        if self._distributed is not None:
            rest: Iterable[int] = self._remaining(self._distributed)
        else:
            rest = self._replayed(self._sampler, self._samples)
        return iter(BatchSampler(rest, self._own.batch_size, self._own.drop_last))

    def _replayed(self, whole: Iterable[Any], skipped: int) -> Iterator[Index]:
        """Yield the indices behind the first `skipped` ones; what is drawn at the first of all
        comes from the random numbers of the state."""
        if self._generator is not None or self._rng is None:
            yield from itertools.islice(whole, skipped, None)
            return
        # The global generator belongs to the training: it is put back before the first batch is
        # used. Only the first draw needs it, since torch's samplers draw a seed or a permutation at
        # once.
        now = torch.get_rng_state()
        torch.set_rng_state(decoded(self._rng))
        try:
            if self._draws_seed:
                torch.empty((), dtype=torch.int64).random_()
            # A sampler may draw when it is asked for an iterator, or for the first index.
            indices = itertools.islice(whole, skipped, None)
            first = list(itertools.islice(indices, 1))
        finally:
            torch.set_rng_state(now)
        yield from first
        yield from indices

    def _remaining(self, sampler: "DistributedSampler[Any]") -> list[int]:
        """This rank's part of the samples that no rank of a DistributedSampler has consumed."""
        count = _length(sampler.dataset)
        if sampler.shuffle:
            generator = torch.Generator()
            generator.manual_seed(sampler.seed + sampler.epoch)
            whole = torch.randperm(count, generator=generator).tolist()
        else:
            whole = list(range(count))
        rest = whole[int(self._state.get("ranks_consumed", 0)) :]
        ranks = sampler.num_replicas
        if sampler.drop_last:
            rest = rest[: len(rest) - len(rest) % ranks]
        elif rest and len(rest) % ranks:
            missing = ranks - len(rest) % ranks
            # As DistributedSampler fills up the last step: from the beginning of the order, several
            # times if the data set has fewer samples than ranks.
            rest += (whole * -(-missing // count))[:missing]
        return rest[sampler.rank :: ranks]


class BatchesPass:
    """A pass over an iterable data set: batches are counted, and skipped to continue an earlier
    pass. `steps` is None if their number is unknown."""

    def __init__(self, epoch: int, state: State | None, steps: int | None = None) -> None:
        self.steps = steps
        self.epoch = epoch
        self.skip = int((state or {}).get("batches", 0))
        self._batches = self.skip

    def __iter__(self) -> Iterator[None]:
        # An iterable data set is asked for its next item, not for an index.
        return itertools.repeat(None)

    def consumed(self) -> None:
        self._batches += 1

    def state(self) -> State:
        return sampler_state(self.epoch, self._batches, 0)

    def next_state(self) -> State:
        return sampler_state(self.epoch + 1, 0, 0)


def _length(whole: object) -> int:
    """`len`, which torch promises of samplers and data sets without saying so in their types."""
    if isinstance(whole, Sized):
        return len(whole)
    raise TypeError(f"{type(whole).__name__} has no length")
