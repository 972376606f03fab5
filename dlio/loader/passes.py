"""Passes over the data as batches of indices, a loader's position in them (its state), and the
counts of a pass.

A pass is planned (positions of an order that is a formula), follows a sampler, or counts the
batches of an iterable data set (`dlio.loader.sampler_pass`). The state counts batches that were
handed out, not those that are prefetched.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from dlio.data.concatenation import MixtureReader
from dlio.errors import UsageError
from dlio.loader.contract import State
from dlio.loader.sampler_pass import (
    SAMPLER_KIND,
    BatchesPass,
    SamplerOrder,
    SamplerPass,
    sampler_state,
)
from dlio.loader.stats import STAGES, PassStats
from dlio.loader.torch_draws import PassDraws, TorchShuffle
from dlio.plan.block_order import BlockOrder, window_of
from dlio.plan.layout import Layout
from dlio.plan.listed_order import PermutedOrder
from dlio.plan.mixture import MixtureEpoch, MixtureRule
from dlio.plan.order import Cursor, Order, again_of
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import MaskedOrder, SampleMask, masked_layout
from dlio.plan.schedule import steps_in_epoch
from dlio.plan.tail_order import TailOrder
from dlio.storage.hierarchy import Hierarchy
from dlio.util.arguments import named
from dlio.util.units import counted


class Pass(Protocol):
    """One pass. Iterating yields the indices of each batch: a list, or one index."""

    epoch: int

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def steps(self) -> int | None:
        """Batches from where the pass began; None if that is unknown."""

    def consumed(self) -> None:
        """Count a batch that has been handed out."""

    def state(self) -> State:
        """Return the state after the batches that have been handed out."""

    def next_state(self) -> State:
        """Return the state at the beginning of the next pass."""


@dataclass(frozen=True, slots=True)
class FormulaOrder:
    """An order that is a formula, and this rank's part of it: a planned pass but for its place."""

    seed: int
    samples: int
    """Number of samples in the data set."""
    shuffled: bool
    shares: RankShares
    """Samples per rank of a step."""
    drop_last: bool
    rank: int
    source_order: str = "sample"
    """`sample`, or `block(k)` with the data set's layout."""
    layout: Layout | None = field(default=None, compare=False)
    exact: bool = True
    """True for a mode whose order is the same on any number of ranks and nodes."""
    left: tuple[int, ...] | None = None
    """The ranks that are left of an epoch of an inexact mode that some have lost; `rank` is -1 for
    one that did not begin it."""
    members: tuple[int, ...] = ()
    """Number of each rank that began it when the data set was mounted, if some are lost."""
    mixing: MixtureRule | None = None
    """Weights of the sources, if the data set is a mixture."""
    draws: PassDraws | None = None
    """Draws of the next pass from torch, if it begins an epoch without a seed
    of its own."""

    @property
    def ranks(self) -> int:
        return len(self.shares.counts)


@dataclass(frozen=True, slots=True)
class Survivors:
    """The ranks that share batches after others were lost."""

    members: tuple[int, ...]
    """Number of each when the data set was mounted."""
    me: int
    """Number of this rank, which is one of them."""
    shares: RankShares
    """Samples of each in a step."""

    @property
    def rank(self) -> int:
        """Place of this rank among them."""
        return self.members.index(self.me)


@dataclass(frozen=True, slots=True)
class InterruptedEpoch:
    """An epoch of an inexact mode in which ranks were lost: it continues as it was planned."""

    order: FormulaOrder
    """Its order as it was before this loss."""
    began: tuple[int, ...]
    """Number of each rank that began it."""

    def shared(self, survivors: Survivors) -> FormulaOrder:
        """Return its order as the survivors share it."""
        numbers = {member: rank for rank, member in enumerate(self.began)}
        return replace(
            self.order,
            rank=numbers.get(survivors.me, -1),
            left=tuple(numbers[each] for each in survivors.members if each in numbers),
            members=self.began,
        )


@dataclass(frozen=True, slots=True)
class OrderBinding:
    """Facts that an inexact mode's order follows from: only the same mode, on as many ranks, whose
    tiers hold the same blocks, can continue its epoch in the middle."""

    mode: str | None = None
    ranks: int | None = None
    homes: str | None = None
    """Digest of the home node of each block."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The state of a loader whose order is a formula, which `state_dict` gives users as a dict.

    The saved keys are older than these names, and stay: states are saved in checkpoints.
    """

    cursor: Cursor
    mixture: str | None = None
    """Position of each source of a mixture, as `MixtureEpoch.text` gives it."""
    binding: OrderBinding | None = None
    """In the middle of an epoch of an inexact mode."""
    requeued: tuple[int, ...] = ()
    """Samples that come again at the epoch's end: lost ranks had been assigned them."""
    source_order: str = "sample"
    kept: str | None = None
    """Digest of the samples that the epoch uses; None for all."""
    shuffled: bool | None = None
    """None where it does not matter, at an epoch's start, and in states of before."""
    shuffle: TorchShuffle | None = None
    """The permutation of torch that the epoch follows."""
    rng: str | None = None
    """At the beginning of an epoch: the state of the generator that it will draw from."""

    def to_dict(self) -> State:
        """Return the state as whole numbers and text; without values that are as usual."""
        # States of before these keys existed lack them, and so do new ones of which they say
        # nothing.
        state: State = self.cursor.as_dict()
        if self.mixture is not None:
            state["mixture"] = self.mixture
        if self.binding is not None:
            state |= asdict(self.binding)
        if self.requeued:
            state["again"] = list(self.requeued)
        if self.source_order != "sample":
            state["source_order"] = self.source_order
        if self.kept is not None:
            state["kept"] = self.kept
        if self.shuffled is not None:
            state["shuffled"] = int(self.shuffled)
        if self.shuffle is not None:
            state |= {"shuffle": -1 if self.shuffle.seed is None else self.shuffle.seed}
        rng = self.rng if self.shuffle is None else self.shuffle.rng
        return state if rng is None else {**state, "rng": rng}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "LoaderState":
        """Read the result of `to_dict`.

        Raises UsageError that names a value which is missing or out of range.
        """
        binding = None
        if not state.keys().isdisjoint(("mode", "ranks", "homes")):
            binding = OrderBinding(state.get("mode"), state.get("ranks"), state.get("homes"))
        return cls(
            Cursor.from_dict(state),
            state.get("mixture"),
            binding,
            again_of(state),
            state.get("source_order", "sample"),
            state.get("kept"),
            bool(state["shuffled"]) if "shuffled" in state else None,
            TorchShuffle.of(state) if "shuffle" in state else None,
            state.get("rng"),
        )


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """A loader's position: in a pass, or between two. Immutable; each event gives another one."""

    current: Pass | None = None
    """The pass that began last, or that the last batch is from."""
    ended: bool = False
    """True after the last batch of `current`."""
    resumed: State | None = None
    """State that was loaded and that the next pass continues."""
    epoch: int | None = None
    """Epoch chosen for the next pass."""
    mask: tuple[int, SampleMask] | None = None
    """An epoch, and the samples that it uses."""

    def loaded(self, state: State) -> "LoaderPosition":
        """The position after `load_state_dict`."""
        return replace(self, resumed=state, epoch=None)

    def chosen(self, epoch: int, mask: SampleMask | None) -> "LoaderPosition":
        """The position after `set_epoch`: a loaded state of the same epoch stays."""
        masked = replace(self, mask=None if mask is None else (epoch, mask))
        if self.resumed is not None and self.resumed["epoch"] == epoch:
            return masked
        return replace(masked, resumed=None, epoch=epoch)

    def handed_out(self, batches: Pass) -> "LoaderPosition":
        """The position after a batch of `batches`, which may not be the newest pass."""
        if self.current is batches and not self.ended:
            return self
        return replace(self, current=batches, ended=False)

    def over(self, batches: Pass) -> "LoaderPosition":
        """The position after the last batch of `batches`."""
        return replace(self, ended=True) if self.current is batches else self

    def copied(self) -> "LoaderPosition":
        """The position of a loader's copy, which begins where the original's next pass would."""
        return LoaderPosition(None, False, self.next_state(), self.epoch, self.mask)

    @property
    def next_epoch(self) -> int:
        """The epoch that was chosen for the next pass, or the one after the last pass."""
        if self.epoch is not None:
            return self.epoch
        return 0 if self.current is None else self.current.epoch + 1

    @property
    def has_requeued(self) -> bool:
        """True if the next pass continues an epoch that samples have been requeued in."""
        return self.resumed is not None and "again" in self.resumed

    @property
    def begins_epoch(self) -> bool:
        """True if the next pass begins an epoch whose random numbers are not drawn yet."""
        resumed = None if self.epoch is not None else self.resumed
        return resumed is None or not (resumed.get("position") or "shuffle" in resumed)

    def state(self) -> State | None:
        """Return the state; None before the first pass of a loader without a loaded state."""
        if self.resumed is not None:
            return dict(self.resumed)
        if self.current is None:
            return None
        return self.current.next_state() if self.ended else self.current.state()

    def next_state(self) -> State | None:
        """Return the state that the next pass begins with; None for the first one."""
        if self.resumed is not None or self.current is None:
            return self.resumed
        return self.current.next_state()

    def _mixture(self, epoch: int) -> str | None:
        """Return where a mixture's sources are at the beginning of an epoch, if it is the epoch
        that began last or the next one; None for others."""
        current = self.current
        if not isinstance(current, PlannedPass) or current.mixed is None:
            return None
        if current.epoch == epoch:
            return current.mixed.text(0)
        following = current.following()
        return following.mixture if following.cursor.epoch == epoch else None

    def positions(self, samples: int, order: FormulaOrder) -> int:
        """Return the number of positions of the current epoch, or of the next one, of a data set of
        so many samples."""
        if order.mixing is None:
            return samples if self.mask is None else self.mask[1].count
        current = self.current
        if self.epoch is None and isinstance(current, PlannedPass) and not self.ended:
            return current.whole
        batches = self.open(order)[0]
        assert isinstance(batches, PlannedPass)
        return batches.whole

    def open(
        self, order: FormulaOrder | SamplerOrder | None, skipped: int = 0
    ) -> "tuple[Pass, LoaderPosition]":
        """Make the next pass: resumed, of the epoch that was chosen, or of the next epoch; return
        it with the place at its beginning. `order` is None for an iterable data set. Without a
        resumed position it begins after the batches `skipped`.

        Raises UsageError for a state that does not fit the order.
        """
        state = self.next_state()
        batches: Pass
        if isinstance(order, FormulaOrder):
            if self.epoch is not None or state is None:
                cursor = Cursor(order.seed, self.epoch or 0, 0, order.samples)
                state = LoaderState(cursor, self._mixture(self.epoch or 0)).to_dict()
            begun = LoaderState.from_dict(state)
            if self.resumed is None:  # The data set may have another length than in the last pass.
                cursor = replace(begun.cursor, samples=order.samples)
                begun = replace(begun, cursor=cursor)
            if order.draws is not None:
                cursor = replace(begun.cursor, seed=order.draws.seed)
                begun = replace(begun, cursor=cursor, shuffle=order.draws.shuffle)
            state = begun.to_dict()
            batches = PlannedPass(state, order, self.mask)
        else:
            epoch = int((state or {}).get("epoch", 0)) if self.epoch is None else self.epoch
            if self.epoch is not None:
                state = None
            if order is None:
                batches = BatchesPass(epoch, state)
            else:
                # A pass that is over left its random numbers where the next one begins.
                resumed = self.resumed if self.epoch is None else None
                batches = SamplerPass(order, epoch, resumed)
        if skipped and isinstance(batches, PlannedPass) and not batches.cursor.position:
            assert isinstance(order, FormulaOrder)
            position = min(skipped * batches.global_batch, batches.whole)
            batches = PlannedPass(batches.state_at(position, ()), order, self.mask)
        mask = self.mask if self.mask is not None and self.mask[0] == batches.epoch else None
        return batches, LoaderPosition(batches, mask=mask)


class PlannedPass:
    """This rank's part of each global batch of an order that is a formula, which the state `begun`
    fits.

    `mask` is an epoch, and the samples that it uses; other epochs use all samples.

    Raises UsageError for an invalid state, or for a state in the middle of an epoch of another
    source order, of other samples, or of a mode that binds it to another number of ranks.
    """

    def __init__(
        self,
        begun: Mapping[str, Any],
        order: FormulaOrder,
        mask: tuple[int, SampleMask] | None = None,
    ) -> None:
        self.begun = LoaderState.from_dict(begun)
        """The state that the pass begins with."""
        cursor = self.cursor = self.begun.cursor
        self.formula = order
        self.epoch = cursor.epoch
        self.mask = mask[1] if mask is not None and mask[0] == cursor.epoch else None
        self.requeued = self.begun.requeued
        self.shuffle = self.begun.shuffle
        """The permutation of torch that the pass follows; None for an order of dlio's own."""
        self.mixed = None if order.mixing is None else self._mixed_epoch(order.mixing)
        """The epoch of a mixture."""
        self.whole = cursor.samples if self.mask is None else self.mask.count
        """Number of positions in the whole epoch, without requeued samples."""
        if self.mixed is not None:
            self.whole = self.mixed.n
        self.is_tail = bool(self.requeued) and cursor.position >= self.whole
        """True if only requeued samples are left."""
        self.samples = self.whole
        """Number of positions up to the end of the pass."""
        self._binding: OrderBinding | None = None
        self.digest = None if self.mask is None else self.mask.digest
        self._check_middle()
        self.order = self._make_order()
        # In an inexact mode these get a pass of their own: the steps of the others are fixed.
        if self.requeued and (order.exact or self.is_tail):
            self.order = TailOrder.of(self.order, self.requeued)
            self.samples += len(self.requeued)
        self.shares = order.shares
        self.global_batch = order.shares.global_batch
        self.steps = steps_in_epoch(
            self.samples, cursor.position, self.global_batch, order.drop_last
        )
        self._end = self.samples
        if order.drop_last:
            self._end = cursor.position + self.steps * self.global_batch
        self._step = 0
        self.repeats = order.shares.fewest > 0
        """True to yield samples of other ranks where this rank has none, see `repeated`."""

    @property
    def own_batch(self) -> int:
        """Largest number of samples that this rank gets in a step."""
        formula = self.formula
        if formula.exact:
            return self.shares.counts[formula.rank]
        # Survivors of an inexact epoch get the parts of the lost ranks on top of their own.
        lost = 0 if formula.left is None else formula.ranks - len(formula.left)
        return min(self.global_batch, max(self.shares.counts) * (1 + lost))

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            part = self.part(step, self.formula.rank)
            yield part if part or not self.repeats else self.repeated(step)

    def counts(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each rank in one of the pass's steps."""
        first = self.cursor.position + step * self.global_batch
        count = min(self.global_batch, self._end - first)
        if count == self.global_batch:
            return self.shares.counts
        return tuple(self.shares.quotas(np.array([count]))[0].tolist())

    def repeated(self, step: int) -> list[int]:
        """Return samples of a step, for ranks without one that have to compute on some; as many as
        a rank has at least."""
        first = self.cursor.position + step * self.global_batch
        return self._at(first, min(first + max(1, self.shares.fewest), self._end))

    def part(self, step: int, rank: int) -> list[int]:
        """Return the samples of a rank in one of the pass's steps, dealt by position alone."""
        first = self.cursor.position + step * self.global_batch
        last = min(first + self.global_batch, self._end)
        part = self.shares.part(last - first, rank)
        return self._at(first + part.start, first + part.stop)

    def _at(self, first: int, last: int) -> list[int]:
        positions = np.arange(first, last, dtype=np.int64)
        samples: list[int] = self.order.samples(positions).tolist()
        return samples

    def begins_like(self, other: Pass) -> bool:
        """True if `other` is the same pass from the same position on."""
        return (
            isinstance(other, PlannedPass)
            and (self.cursor, self.formula) == (other.cursor, other.formula)
            and self.shuffle == other.shuffle
            and self.mask is other.mask
        )

    def bind(self, mode: str, homes: str | None) -> None:
        """Record that the order of this pass follows from a mode and from the digest of the blocks'
        homes, which is None for a mode whose order is the same on any number of ranks and nodes.

        Raises UsageError when the pass continues one of another mode, or with other homes.
        """
        before = self.begun.binding
        then = "batch or global" if before is None else before.mode
        if homes is None:
            if self.cursor.position and before is not None:
                raise UsageError(
                    f"loader state in the middle of an epoch of mode {then}, this loader's mode is "
                    f"{mode}: continue with the mode that was saved, or at the start of an epoch"
                )
            return
        if self.is_tail:
            return
        self._binding = OrderBinding(mode, self.formula.ranks, homes)
        if self.cursor.position and before != self._binding:
            reason = "the nodes' tiers hold other blocks than they did then"
            if then != mode:
                reason = f"it is of mode {then}, this loader's mode is {mode}"
            raise UsageError(
                f"loader state in the middle of an epoch: {reason}; continue with the mode and "
                "tiers that were saved, or at the start of an epoch"
            )

    def consumed(self) -> None:
        self._step += 1

    @property
    def step(self) -> int:
        """Number of batches that were handed out."""
        return self._step

    def state(self) -> State:
        # Batches that were handed out count, not those that are made ahead: a resumed run sees
        # them.
        here, cursor = self.cursor.position + self._step * self.global_batch, self.cursor
        position = min(here, self._end) if self._step else cursor.position
        return self.state_at(position, self.requeued)

    def state_at(self, position: int, requeued: Sequence[int]) -> State:
        """Return the state at another position, with samples that come again at the end."""
        cursor = replace(self.cursor, position=position)
        mixture = None if self.mixed is None else self.mixed.text(position)
        # Nothing binds the beginning of an epoch: it continues on other ranks, tiers and modes.
        if not position:
            return LoaderState(cursor, mixture, shuffle=self.shuffle).to_dict()
        return LoaderState(
            cursor,
            mixture,
            self._binding if position < self.whole else None,
            tuple(requeued),
            self.formula.source_order,
            self.digest,
            self.formula.shuffled,
            self.shuffle,
        ).to_dict()

    def next_state(self) -> State:
        return self.following().to_dict()

    def following(self) -> LoaderState:
        """Return the state at the beginning of the next epoch."""
        cursor = Cursor(self.cursor.seed, self.epoch + 1, 0, self.cursor.samples)
        mixed = self.mixed
        mixture = None if mixed is None else mixed.following(self.formula.drop_last)
        shuffle = self.shuffle
        rng = None if shuffle is None else shuffle.following(self.cursor.samples)
        return LoaderState(cursor, mixture, rng=rng)

    def _mixed_epoch(self, mixing: MixtureRule) -> MixtureEpoch:
        """Return the epoch of a mixture that a state begins, or continues."""
        order = self.formula
        if self.mask is not None:
            raise UsageError("keep= with a mixture, whose weights choose the samples: leave it out")
        if not order.exact or order.source_order != "sample":
            raise UsageError(
                "a mixture has global batches of its own: choose mode batch or global, and "
                "source_order='sample'"
            )
        return mixing.epoch(
            self.epoch,
            self.cursor.position,
            order.shares.global_batch,
            order.drop_last,
            self.begun.mixture,
            len(self.begun.requeued),
        )

    def _check_middle(self) -> None:
        if not self.cursor.position:
            return
        where = "loader state in the middle of an epoch"
        ranks, source_order = self.formula.ranks, self.formula.source_order
        before = self.begun.binding or OrderBinding()
        if before.ranks is not None and before.ranks != ranks:
            raise UsageError(
                f"{where} of mode {before.mode} on {counted(before.ranks, 'rank')}: "
                "continue on as many, or at the start of an epoch"
            )
        if self.begun.kept != self.digest:
            raise UsageError(
                f"{where} with keep={self.begun.kept}, this loader has "
                f"keep={self.digest}: give set_epoch the keep= that it was saved with, or "
                "continue at the start of an epoch"
            )
        if self.begun.shuffled not in (None, self.formula.shuffled):
            raise UsageError(
                f"{where} with shuffle={self.begun.shuffled}, and this loader has "
                f"shuffle={self.formula.shuffled}: continue with the one that was saved, or at the "
                "start of an epoch"
            )
        then = self.begun.source_order
        if then != source_order:
            raise UsageError(
                f"{where} of source order {then}, this loader's is {source_order}: continue with "
                "the one that was saved, or at the start of an epoch"
            )

    def _make_order(self) -> Order:
        formula, mask = self.formula, self.mask
        about = (self.samples, self.cursor.seed, self.cursor.epoch, formula.shuffled)
        if self.mixed is not None:
            return self.mixed.order(*about[1:])
        window = window_of(formula.source_order)
        if self.shuffle is not None:
            listed = self.shuffle.permutation(self.cursor.samples)
            return PermutedOrder(*about, listed)
        if window is None:
            return Order(*about) if mask is None else MaskedOrder(*about, mask)
        layout = formula.layout
        if layout is None:
            raise UsageError(
                f"source_order={formula.source_order!r} is for data sets that dlio reads itself: "
                "leave it out, or give tiers="
            )
        if mask is not None:
            if not formula.shuffled:
                raise UsageError(
                    f"keep= with source_order={formula.source_order!r} wants shuffle=True"
                )
            layout = masked_layout(layout, mask)
        return BlockOrder(*about, layout, window)


def check_state(given: object, formula: tuple[int | None, int] | None) -> State:
    """Return a copy of a state that fits a loader with the order of (seed, samples), whose seed is
    None if it follows torch's; None if it follows a sampler.

    Raises UsageError for the state of another kind of order, and of another data set or seed.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f"{named('state_dict', given)}: give what state_dict() returned")
    state = dict(given)
    if formula is not None:
        if state.get("kind") == SAMPLER_KIND:
            raise UsageError(
                "state of a loader that follows a sampler or torch's order does not fit this one, "
                "which has dlio's own: make it as the one that was saved"
            )
        cursor = LoaderState.from_dict(state).cursor
        seed, samples = formula
        if cursor.samples != samples or seed not in (None, cursor.seed):
            own = "torch's seed" if seed is None else f"seed {seed}"
            raise UsageError(
                f"state of a loader with seed {cursor.seed} over "
                f"{counted(cursor.samples, 'sample')} does not fit this one, with {own} over "
                f"{samples}"
            )
        return state
    wanted = sampler_state(0, 0, 0)
    if "kind" not in state and "position" in state:
        raise UsageError(
            "state of a loader with dlio's own order does not fit this one, which follows a "
            "sampler or torch's order: make it as the one that was saved"
        )
    if state.get("kind") != SAMPLER_KIND or state.get("format") != wanted["format"]:
        raise UsageError(
            f"loader state of kind {state.get('kind')!r} and format {state.get('format')!r} does "
            "not fit this loader, which follows a sampler: make it as the one that was saved"
        )
    for name in ("epoch", "batches", "consumed"):
        value = state.get(name)
        if type(value) is not int or value < 0:
            raise UsageError(f"loader state with {name} {value!r}: was it written by state_dict()?")
    return state


# The counts of a pass: the work of its threads, and how long the consumer waited for them


class StageTimes:
    """Seconds that threads spent, by stage. Thread-safe.

    `source`, `disk`, `ram` and `peer` are reads from that place; `fetch` is a user's data set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def add(self, stage: str, seconds: float) -> None:
        self.add_all({stage: seconds})

    def add_all(self, seconds: dict[str, float]) -> None:
        with self._lock:
            for stage, spent in seconds.items():
                self._seconds[stage] += spent

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)


_SAME: Final = ("engine", "samples", "batches", "seconds", "stall_s", "first_batch_s", "threads")
"""Counts of `PassStats` that `PassCounters` has as they are."""


@dataclass(slots=True)
class PassCounters:
    """Counts of one pass: the hierarchy's counters since it began, the threads' time, the
    consumer's waiting. The fields' names are those of `PassStats`."""

    hierarchy: Hierarchy | None = None
    threads: int = 0
    engine: str = ""
    images: bool | None = None
    clock: StageTimes = field(default_factory=StageTimes)
    stall_s: float = 0.0
    samples: int = 0
    batches: int = 0
    first_batch_s: float | None = None
    skipped: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    """Samples of each source of a mixture."""
    python_threads: list[threading.Thread] = field(default_factory=list)
    """The pass's threads that call a user's code."""
    _before: dict[str, Any] = field(default_factory=dict)
    _after: dict[str, Any] | None = None
    _started: float = 0.0
    _ended: float | None = None
    _waiting_since: float = 0.0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin now: work that was done ahead counts as the pass before."""
        self._started = self._waiting_since = time.perf_counter()
        if self.hierarchy is not None:
            self._before = self.hierarchy.counters.snapshot()

    def wait_begins(self) -> None:
        self._waiting_since = time.perf_counter()

    def wait_ends(self, samples: int) -> None:
        # From one `next` to the batch: the trainer's own time between two of them does not count.
        now = time.perf_counter()
        waited_s = now - self._waiting_since
        self.stall_s += waited_s
        self.samples += samples
        if self.hierarchy is not None:
            self.hierarchy.counters.hand_over(samples, waited_s)
        self.batches += 1
        if self.first_batch_s is None:
            self.first_batch_s = now - self._started

    def count_sources(self, numbers: Callable[[], npt.NDArray[np.int64]]) -> None:
        """Count a batch's samples, whose indices `numbers` returns, by the sources of a mixture."""
        reader = None if self.hierarchy is None else self.hierarchy.reader
        if isinstance(reader, MixtureReader):
            counts = np.bincount(reader.sources_of(numbers()), minlength=len(reader.names))
            for name, count in zip(reader.names, counts.tolist(), strict=True):
                self.sources[name] = self.sources.get(name, 0) + count

    def end(self) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()
            if self.hierarchy is not None:
                self._after = self.hierarchy.counters.snapshot()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._started

    def as_dict(self) -> PassStats:
        """Return the counts so far."""
        counted: dict[str, Any] = {}
        if self.hierarchy is not None:
            now = self._after or self.hierarchy.counters.snapshot()
            for key, value in now.items():
                before = self._before[key]
                if isinstance(value, dict):
                    counted[key] = {place: value[place] - before[place] for place in value}
                else:
                    counted[key] = value - before
        counts: dict[str, Any] = {
            **{name: getattr(self, name) for name in _SAME},
            "thread_s": self.clock.snapshot(),
            "skipped": list(self.skipped),
            "warned": list(self.warned),
            "notes": self.hierarchy.notes() if self.hierarchy is not None else [],
            **counted,
        }
        if self.sources:
            counts["source_samples"] = dict(self.sources)
        if self.images is not None:
            counts["images"] = self.images
        return cast(PassStats, counts)
