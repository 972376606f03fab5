"""A pass over the data as batches of indices, and where it is: what a loader's state is made of.

A pass is either planned, positions of an order that is a formula, or follows a sampler of torch's
or the user's. Its state counts what was handed out, not what is prefetched.
"""

import base64
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from dlio.errors import UsageError
from dlio.plan.block_order import BlockOrder, window_of
from dlio.plan.layout import Layout
from dlio.plan.order import Cursor, Order
from dlio.plan.sample_mask import MaskedOrder, SampleMask, masked_layout
from dlio.plan.schedule import steps_in_epoch
from dlio.plan.shares import Shares

_KIND: Final = "sampler"
_FORMAT: Final = 2
_BINDING: Final = ("mode", "ranks", "homes")
"""Of a state in the middle of an epoch that only the same ranks and tiers can go on with."""


class Pass(Protocol):
    """One pass. Iterating gives what is passed to the data set: lists of indices, or indices."""

    epoch: int

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int:
        """Batches that are left, from where it began. Raises TypeError when that is not known."""

    def consumed(self) -> None:
        """The next batch has been handed out."""

    def state(self) -> dict[str, Any]: ...

    def next_state(self) -> dict[str, Any]:
        """Of the pass after this one."""


class PlannedPass:
    """A rank's share of each global batch of an order that is a formula.

    Args:
        begun: where it begins, as `state` tells it.
        rank, ranks: of those that share the data.
        source_order: `sample`, or `block(k)` with the data set's layout.
        shares: of the global batch; even for None.
        keep: an epoch, and its samples; all are of any other one, and for None.

    Raises UsageError when the state is none, or one in the middle of an epoch whose mode binds it
    to another number of ranks, or of other samples.
    """

    def __init__(
        self,
        begun: Mapping[str, Any],
        shuffled: bool,
        batch_size: int,
        drop_last: bool,
        rank: int,
        ranks: int,
        source_order: str = "sample",
        layout: Layout | None = None,
        shares: Shares | None = None,
        keep: tuple[int, SampleMask] | None = None,
    ) -> None:
        cursor = Cursor.from_dict(begun)
        self.cursor = cursor
        self._bound: dict[str, Any] = {}
        self._begun = {key: begun[key] for key in _BINDING if key in begun}
        if cursor.position and self._begun.get("ranks", ranks) != ranks:
            raise UsageError(
                f"loader state in the middle of an epoch of mode {self._begun.get('mode')} on "
                f"{self._begun['ranks']} ranks: go on with as many, or at the start of an epoch"
            )
        self.epoch = cursor.epoch
        self.source_order = source_order
        window = window_of(source_order)
        kept = keep[1] if keep is not None and keep[0] == cursor.epoch else None
        self.kept = kept
        self.samples = cursor.samples if kept is None else kept.count
        """Of the whole epoch."""
        self._digest = None if kept is None else kept.digest
        if cursor.position and begun.get("kept") != self._digest:
            raise UsageError(
                f"loader state in the middle of an epoch of {begun.get('kept') or 'all'} samples, "
                f"this loader's are {self._digest or 'all'}: give set_epoch the keep= that it was "
                "saved with, or go on at the start of an epoch"
            )
        about = (self.samples, cursor.seed, cursor.epoch, shuffled)
        if window is not None:
            if kept is not None and layout is not None:
                if not shuffled:
                    raise UsageError(f"keep= with source_order={source_order!r} wants shuffle=True")
                layout = masked_layout(layout, kept)
            self.order: Order = BlockOrder(*about, layout, window)
        else:
            self.order = Order(*about) if kept is None else MaskedOrder(*about, kept)
        then = begun.get("source_order", "sample")
        if cursor.position and then != source_order:
            raise UsageError(
                f"loader state in the middle of an epoch of source order {then}, this loader is of "
                f"{source_order}: go on as it was saved, or at the start of an epoch"
            )
        self.batch_size = batch_size
        self.rank, self.ranks = rank, ranks
        self.shares = shares
        self.global_batch = batch_size * ranks
        self.steps = steps_in_epoch(self.samples, cursor.position, self.global_batch, drop_last)
        self._end = self.samples
        if drop_last:
            self._end = cursor.position + self.steps * self.global_batch
        self._step = 0

    def __len__(self) -> int:
        return self.steps

    @property
    def own_batch(self) -> int:
        """Samples that this rank gets of a step, at most."""
        return self.batch_size if self.shares is None else self.shares.counts[self.rank]

    def __iter__(self) -> Iterator[list[int]]:
        shares = self.shares or Shares.even(self.batch_size, self.ranks)
        for step in range(self.steps):
            first = self.cursor.position + step * self.global_batch
            last = min(first + self.global_batch, self._end)
            part = shares.part(last - first, self.rank)
            positions = np.arange(first + part.start, first + part.stop, dtype=np.int64)
            yield self.order.samples(positions).tolist()

    def bind(self, mode: str, homes: str) -> None:
        """Tell that the order of this pass is that of a mode, and of blocks' homes.

        Raises UsageError when it goes on in the middle of an epoch of another.
        """
        self._bound = {"mode": mode, "ranks": self.ranks, "homes": homes}
        if self.cursor.position and self._begun != self._bound:
            then, now = self._begun.get("mode", "batch or global"), mode
            reason = "the nodes' tiers hold other blocks than then"
            if then != now:
                reason = f"it is of mode {then}, this loader of {now}"
            raise UsageError(
                f"loader state in the middle of an epoch: {reason}; go on as it was saved, or at "
                "the start of an epoch"
            )

    def unbound(self, mode: str) -> None:
        """Tell that the order of this pass is `mode`'s on any number of ranks. Raises as `bind`."""
        if self.cursor.position and self._begun:
            raise UsageError(
                f"loader state in the middle of an epoch of mode {self._begun.get('mode')}, this "
                f"loader is of {mode}: go on as it was saved, or at the start of an epoch"
            )

    def consumed(self) -> None:
        self._step += 1

    def state(self) -> dict[str, Any]:
        here, cursor = self.cursor.position + self._step * self.global_batch, self.cursor
        position = min(here, self._end) if self._step else cursor.position
        made = Cursor(cursor.seed, cursor.epoch, position, cursor.samples).as_dict()
        if not position:
            return {**made}
        kind = {} if self.source_order == "sample" else {"source_order": self.source_order}
        if self._digest is not None:
            kind["kept"] = self._digest
        return {**made, **self._bound, **kind}

    def next_state(self) -> dict[str, Any]:
        return Cursor(self.cursor.seed, self.epoch + 1, 0, self.cursor.samples).as_dict()


class SamplerPass:
    """The batches that a sampler gives.

    To go on in the middle, a sampler with `state_dict` is asked to; torch's DistributedSampler is
    followed by formula, on any number of ranks; of any other the batches handed out are skipped,
    with the random numbers that it drew then.

    Args:
        sampler: of indices; `batch_sampler` is torch's own over it, a user's, or None without
            batching.
        generator: that the sampler draws from; None for torch's global one.
        state: of an earlier pass to go on with.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_sampler: Iterable[Any] | None,
        generator: torch.Generator | None,
        epoch: int,
        state: dict[str, Any] | None,
        draws_seed: bool,
    ) -> None:
        self.epoch = epoch
        if type(batch_sampler) is BatchSampler:
            sampler = batch_sampler.sampler
        self._sampler, self._batch_sampler = sampler, batch_sampler
        self._generator = generator or getattr(sampler, "generator", None)
        self._state = state or {}
        self._batches = int(self._state.get("batches", 0))
        self._samples = int(self._state.get("consumed", 0))
        self._drawn: deque[tuple[int, Any]] = deque()
        self._sampler_state = self._state.get("sampler")
        self._rng = self._state.get("rng")
        self._draws_seed = bool(self._state.get("seeded", draws_seed))
        if self._rng is not None:
            if self._generator is not None:
                self._generator.set_state(_decoded(self._rng))
        elif self._distributed is None and not self._stateful:
            self._rng = _encoded(self._random_state())
        if isinstance(sampler, DistributedSampler) and "sampler_epoch" in self._state:
            sampler.set_epoch(int(self._state["sampler_epoch"]))

    @property
    def _stateful(self) -> bool:
        return hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict")

    @property
    def _own_batches(self) -> bool:
        """Whether the batches are torch's own over the sampler, which may begin anywhere."""
        return type(self._batch_sampler) is BatchSampler

    @property
    def _distributed(self) -> Any:
        exact = type(self._sampler) is DistributedSampler
        return self._sampler if exact and self._own_batches else None

    def __len__(self) -> int:
        whole = self._sampler if self._batch_sampler is None else self._batch_sampler
        if not self._batches:
            return len(whole)  # type: ignore[arg-type]
        if self._own_batches:
            left = len(self._remaining()) if self._distributed else None
            if left is None:
                left = len(self._sampler) - self._samples  # type: ignore[arg-type]
            size, drop = self._batch_sampler.batch_size, self._batch_sampler.drop_last  # type: ignore[union-attr]
            return int(left // size if drop else -(-left // size))
        return len(whole) - self._batches  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self._indices():
            count = len(batch) if isinstance(batch, Sequence) else 1
            state = self._sampler.state_dict() if self._stateful else None  # type: ignore[attr-defined]
            self._drawn.append((count, state))
            yield batch

    def consumed(self) -> None:
        self._batches += 1
        if self._drawn:
            count, state = self._drawn.popleft()
            self._samples += count
            if state is not None:
                self._sampler_state = state

    def state(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "format": _FORMAT,
            "kind": _KIND,
            "epoch": self.epoch,
            "batches": self._batches,
            "consumed": self._samples,
            "seeded": self._draws_seed,
        }
        if self._stateful and self._sampler_state is not None:
            made["sampler"] = self._sampler_state
        elif (distributed := self._distributed) is not None:
            before = int(self._state.get("ranks_consumed", 0))
            now = self._samples - int(self._state.get("consumed", 0))
            made["ranks_consumed"] = before + now * distributed.num_replicas
            made["sampler_epoch"] = distributed.epoch
        elif self._rng is not None:
            made["rng"] = self._rng
        return made

    def next_state(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "format": _FORMAT,
            "kind": _KIND,
            "epoch": self.epoch + 1,
            "batches": 0,
            "consumed": 0,
        }
        if self._generator is not None:
            made["rng"] = _encoded(self._generator.get_state())
        return made

    def _indices(self) -> Iterator[Any]:
        whole = self._sampler if self._batch_sampler is None else self._batch_sampler
        if self._stateful and self._state.get("sampler") is not None:
            self._sampler.load_state_dict(self._state["sampler"])  # type: ignore[attr-defined]
            return iter(whole)
        if not self._state.get("batches") and not self._state.get("ranks_consumed"):
            if self._state.get("rng") is None or self._generator is not None:
                return iter(whole)
            return self._replayed(iter(whole))
        if self._distributed is not None:
            return iter(self._rebatched(self._remaining()))
        if self._own_batches:
            return self._rebatched(
                self._replayed(itertools.islice(self._sampler, self._samples, None))
            )
        return self._replayed(itertools.islice(iter(whole), self._batches, None))

    def _rebatched(self, indices: Iterable[int]) -> Iterator[list[int]]:
        own = self._batch_sampler
        assert isinstance(own, BatchSampler)
        return iter(BatchSampler(indices, own.batch_size, own.drop_last))

    def _replayed(self, indices: Iterator[Any]) -> Iterator[Any]:
        """`indices`, whose first draw is from the random numbers of the state."""
        if self._generator is not None or self._rng is None:
            yield from indices
            return
        now = torch.get_rng_state()
        torch.set_rng_state(_decoded(self._rng))
        try:
            if self._draws_seed:
                torch.empty((), dtype=torch.int64).random_()
            first = list(itertools.islice(indices, 1))
        finally:
            torch.set_rng_state(now)
        yield from first
        yield from indices

    def _remaining(self) -> list[int]:
        """This rank's part of what a DistributedSampler's ranks have not consumed."""
        sampler = self._sampler
        assert isinstance(sampler, DistributedSampler)
        count = len(sampler.dataset)  # type: ignore[arg-type]
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
            rest += (whole * -(-missing // count))[:missing]
        return rest[sampler.rank :: ranks]

    def _random_state(self) -> torch.Tensor:
        if self._generator is not None:
            return self._generator.get_state()
        return torch.get_rng_state()


class BatchesPass:
    """Of an iterable data set: its batches are counted, and skipped to go on."""

    def __init__(self, epoch: int, state: dict[str, Any] | None) -> None:
        self.epoch = epoch
        self.skip = int((state or {}).get("batches", 0))
        self._batches = self.skip

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def __len__(self) -> int:
        raise TypeError("an iterable data set does not tell how much is left")

    def consumed(self) -> None:
        self._batches += 1

    def state(self) -> dict[str, Any]:
        counts = {"epoch": self.epoch, "batches": self._batches}
        return {"format": _FORMAT, "kind": _KIND, **counts, "consumed": 0}

    def next_state(self) -> dict[str, Any]:
        counts = {"epoch": self.epoch + 1, "batches": 0}
        return {"format": _FORMAT, "kind": _KIND, **counts, "consumed": 0}


def check_state(state: dict[str, Any]) -> None:
    """Of a pass that follows a sampler. Raises UsageError for what `state` did not write."""
    if state.get("kind") != _KIND or state.get("format") != _FORMAT:
        raise UsageError(
            f"loader state of kind {state.get('kind')!r} and format {state.get('format')!r} does "
            "not fit this loader, which follows a sampler: make it as the one that was saved"
        )
    for name in ("epoch", "batches", "consumed"):
        value = state.get(name)
        if type(value) is not int or value < 0:
            raise UsageError(f"loader state with {name} {value!r}: was it written by state_dict()?")


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: Any) -> torch.Tensor:
    try:
        raw = base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise UsageError("loader state with damaged random numbers") from error
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
