"""A DataLoader that divides the batches of a single-process script among the ranks."""

import contextlib
import inspect
import os
import re
import sys
import threading
from abc import ABCMeta
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import chain, islice
from typing import Any, Final, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate
from typing_extensions import TypeVar

from dlio.comm import Communicator
from dlio.comm.board import computing, end_step
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.exchange.batch_share import tensors_of
from dlio.exchange.loss_terms import batch_dim
from dlio.exchange.tensor_notes import TensorNotes
from dlio.integrations.script.batch_origins import BatchOrigins
from dlio.integrations.script.batch_sizes import size_lines
from dlio.integrations.script.batch_tensors import rows_of, sizes_of
from dlio.integrations.script.collate_draws import CollateDraws
from dlio.integrations.script.fetch_randoms import FetchRandoms, draws_differ, rank_seed
from dlio.integrations.script.guard import ScriptGuard
from dlio.integrations.script.joined_rows import joined_rows
from dlio.integrations.script.loss_plan import LossPlans
from dlio.integrations.script.mixed_inputs import MixedInputs
from dlio.integrations.script.node_claims import NodeClaims
from dlio.integrations.script.own_sampler import (
    DrawnAhead,
    FollowingSampler,
    copied_sampler,
    draws_for_long,
    has_own_sampler,
)
from dlio.integrations.script.pass_use import PassMemory, PassUse
from dlio.integrations.script.passes_under_way import GARBAGE, PassesUnderWay
from dlio.integrations.script.script_assigner import (
    ScriptAssigner,
    ScriptAssignment,
    ScriptBatch,
)
from dlio.integrations.script.script_lines import loops_at, script_frames, script_line
from dlio.integrations.script.worker_draws import WorkerDraws
from dlio.loader.contract import CollateFn, Sample
from dlio.loader.dataloader import DataLoader
from dlio.loader.third_party import accelerate
from dlio.loader.third_party.adapters import adapted, holds_own
from dlio.plan.rank_shares import Cost, RankShares, balanced_shares
from dlio.train.step_clock import StepClock
from dlio.util.units import counted

_LOOPS: Final = 3
"""Most frames of a script, from the innermost one, whose loops are looked at for sizes."""
_RECENT: Final = 4
"""Batches that a script may accumulate with one that is dealt otherwise."""
_TAKEN: Final = 64
"""Most batches that a script takes ahead."""
_T_co = TypeVar("_T_co", covariant=True, default=Sample)


class ScriptContext:
    """State of a `dlio run` that its loaders share. One per process."""

    def __init__(
        self, comm: Communicator, batch: str, tiers: str | None, guard: ScriptGuard
    ) -> None:
        self.comm = comm
        self.guard = guard
        guard.say = self.say
        self.batch = batch
        """`global`: ranks divide each batch of the script. `per-rank`: each rank gets a batch."""
        self.tiers = tiers
        self.aside = False
        """True once the script distributes its training itself: its loaders are dlio's own."""
        self.evaluating = False
        """True if the script last called `eval()` on a module, False if `train()`."""
        self.has_optimizer = False
        """True once the script has made an optimizer."""
        self.weight = 1.0
        """Number of this rank's samples in the batch that the script computes on."""
        self.part: float | None = 1.0
        """The part of the whole batch's loss that is this rank's in the present backward; None if
        it is not known."""
        self.divides = True
        """False if every rank computes on whole batches, and rank 0's gradients count."""
        self._sizes: dict[str, bool] = {}
        """Lines that take the size of a divided batch as a number; True once `take_sizes` has
        returned them."""
        self.counts_whole = False
        """True if a pass with such lines began with whole batches."""
        self._samples = 0.0
        """Samples of this rank since `take_samples`."""
        self._latest: ScriptBatch | None = None
        """The batch that the script got last, until it computes on one."""
        self._taken: deque[ScriptBatch] = deque(maxlen=_TAKEN)
        """The batches that the script got since it computed on one, the first of them first."""
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        """Of the latest batches, whether this rank got its part of it, and not all or a
        stand-in."""
        self._of_tensor: TensorNotes[ScriptBatch] = TensorNotes()
        """The batch that a tensor is from."""
        self._used: ScriptBatch | None = None
        """The batch that the script computed on last."""
        self._computed: ScriptBatch | None = None
        """The same, also after the optimizer's step and a pass of whole batches."""
        self._again: ScriptBatch | None = None
        """A batch of a pass that is over, as `itertools.cycle` keeps it, on which the script
        computes next to the latest one of another pass."""
        self._was_again: ScriptBatch | None = None
        """The same of the step before."""
        self._under_way = PassesUnderWay()
        self.passes = PassMemory()
        self.mixed_losses: TensorNotes[bool] = TensorNotes()
        """Losses of several terms whose value for the whole batch is not known."""
        self.whole_losses: TensorNotes[bool] = TensorNotes()
        """Losses that hold the value of the whole batch, and norms of whole gradients."""
        self.undivided = False
        """True if a note says why a loader's batches are not divided."""
        self.divides_now = False
        """True while the script has numbers of divided batches, in their pass and after it."""
        self.is_outside = False
        """True within `outside`."""
        self.numbers_read: set[float] = set()
        """Numbers that the script has read from tensors since it got the latest batch."""
        self.last_divided: ScriptBatch | None = None
        """The batch of which this rank got a part last."""
        self.between_passes: Callable[[], None] = lambda: None
        """Called as a pass begins. Collective."""
        self.before_backward: Callable[[], None] = lambda: None
        """Called before each backward. Collective."""
        self.balance = False
        """True if faster ranks get larger shares."""
        self.waited: Callable[[], float] = lambda: 0.0
        """Seconds that this rank has waited for others so far."""
        self.assigner = ScriptAssigner(comm)
        self.collate_draws, self.worker_draws = CollateDraws(), WorkerDraws()
        self.mixed_inputs = MixedInputs(self.say, self.collate_draws)
        self.origins = BatchOrigins(self._of_tensor.get)
        self.batches = 0
        """Batches that the script has got."""
        self._steps: Counter[tuple[str, int]] = Counter()
        """Divided batches by the place of the loop that has taken them."""
        self.last_shares: RankShares | None = None
        """Shares of the latest balanced pass."""
        self.shared = 0
        self.notes: list[str] = []
        self._said: set[str] = set()
        self.claims = NodeClaims(comm)

    @property
    def _current(self) -> dict[PassUse, ScriptBatch]:
        """The batch that the script got last of each pass under way."""
        return self._under_way.batches

    @property
    def training(self) -> bool:
        """True if the script seems to train, by gradients and its last call of `train` or `eval`,
        or as its batches are divided."""
        return torch.is_grad_enabled() and (
            not self.evaluating or any(batch.divided for batch in self._current.values())
        )

    @property
    def counts_now(self) -> bool:
        """True if this rank's values of the present batch count: of one that all ranks have whole,
        rank 0's."""
        used = self._used
        return bool(used.weight) if used is not None and used.divided else self.comm.rank == 0

    @property
    def is_in_pass(self) -> bool:
        """True while the script has a batch of a pass under way."""
        return bool(self._current)

    def places(self) -> Iterator[tuple[range, int]]:
        """Yield the place of this rank's samples in each batch that it computes on a part of, and
        the size of that batch."""
        if self.divides_now:
            # That of the latest batch first: another one may have a part of that size, too.
            for batch in reversed(self._current.values()):
                if batch.divided:
                    yield batch.place, len(batch.samples)

    @property
    def lead(self) -> ScriptBatch | None:
        """The divided batch that a loss is from, or one of them; None if there is none."""
        used = self._used
        is_divided = used is not None and used.divided
        if used is not None and is_divided and used.weight:
            return used  # Nearly always.
        latest = [batch for batch in self._current.values() if batch.divided]
        if used is not None and is_divided:
            latest.insert(0, used)
        return next((batch for batch in latest if batch.weight), latest[0] if latest else None)

    def batches_of_rows(self, rows: object) -> list[ScriptBatch]:
        """The training batch that rows are of, if they are known; or else those that they may be
        of: the one that the script computed on last, and the first that it has taken since. The
        likeliest comes first. The loader may be one ahead, or its pass over."""
        known = self._batch_of(rows) if isinstance(rows, torch.Tensor) else None
        if known is not None:
            return [known]
        likely = [self._computed, *islice(self._taken, 1)]
        if self._latest is not None:
            likely.reverse()  # It has not computed on it yet.
        return [each for each in likely if each is not None]

    @property
    def is_alone(self) -> bool:
        """True if a single pass is under way, and the script computes on none that is over."""
        return len(self._current) <= 1 and self._again is self._was_again is None

    @property
    def has_others(self) -> bool:
        """True if one of several latest batches is not this rank's part of it: a stand-in where it
        has no sample, or a whole one."""
        batches = list(self._under_way.batches.values())
        if self._was_again is not None:  # From then on `origins` look at it.
            batches.append(self._was_again)
        return len(batches) > 1 and any(not each.weight or not each.divided for each in batches)

    @property
    def has_unlike(self) -> bool:
        """True if of the latest batches this rank has got parts of some, and whole ones or
        stand-ins for none of it of others."""
        return any(self._recent) and not all(self._recent)

    def took(self, batch: ScriptBatch, data: Any, use: PassUse) -> None:
        """Note that the script gets a batch of a pass, as the loader yields its data."""
        self._latest = batch
        self._again, self._was_again = None, self._again
        self._taken.append(batch)
        self._recent.append(bool(batch.divided and batch.weight))
        self._under_way.took(use, batch)
        use.takes()
        use.was_whole |= not batch.divided
        self.batches += 1
        self.divides_now = batch.divided
        self.numbers_read.clear()
        self._samples += batch.weight
        tensors = list(tensors_of(data))
        counts = batch.divided and batch.weight
        self.guard.sizes = sizes_of(data, tensors, len(batch.place)) if counts else 0
        batch.rows = rows_of(data)
        self._of_tensor.set(tensors, batch)
        self.origins.close()
        if self.has_others:
            self.origins.start()
        if batch.divided:
            if batch.weight < len(batch.samples):
                self.last_divided = batch
            use.plans.has_pairs |= len(batch.samples) > self.comm.size
            if len(batch.samples) > 1 and not use.plans.has_pairs:
                self.say(
                    "a batch leaves one sample to each rank: whether the script compares or mixes "
                    "samples, adds them up in a loop, or divides by a constant, cannot be seen in "
                    "that; --batch per-rank, or larger batches, or fewer ranks"
                )
            shape = tensors[0].shape if tensors else ()
            dim = batch_dim(shape, len(batch.place), use.plans.dim)
            if list(shape[:2]).count(len(batch.place)) == 1:
                use.plans.dim = dim
            # The loop that asks for a batch: the pass may have begun on another line.
            place = self.guard.place
            self._steps[place] += 1
            places = [place]
            if self._steps[place].bit_count() == 1:
                # A generator of the script's may pass it on to a loop of another function.
                frames = script_frames(_LOOPS)[1:]
                places += [(each.f_code.co_filename, each.f_lineno) for each in frames]
            for line in chain.from_iterable(size_lines(*each, dim) for each in places):
                self._sizes.setdefault(line, False)
                self.counts_whole |= use.was_whole
            # In a `for` loop, whose body opens and closes modes of its own.
            if use.plans.awaits_look(place) and loops_at(*place):
                use.plans.looked[place] = self.mixed_inputs.start(
                    tensors, len(batch.place), use.plans.dim, batch.rows, use.computes
                )

    def sizes_in(self, error: Exception) -> str:
        """Return a remark on an error that names the size of a batch, or of the rank's part of
        it; empty for others."""
        batch = self.last_divided
        if batch is None or not self.divides_now or self.batch == "per-rank":
            return ""
        part, whole = len(batch.place), len(batch.samples)
        if not {part, whole} & {int(each) for each in re.findall(r"\d+", str(error))}:
            return ""
        return (
            f" (this rank has {part} of the batch's {counted(whole, 'sample')}; other parts may "
            "have other sizes: take sizes from the batch, such as len(x), or use --batch per-rank)"
        )

    def got_as_drawn(self, follows: FollowingSampler) -> bool:
        """True if the latest batch is the one that the script's own sampler has drawn."""
        is_same = self._latest is None or follows.gets(self._latest.samples)
        return is_same or recovery_of(self.comm) is not None  # Lost ranks' samples come, too.

    def take_samples(self) -> float:
        """Return the number of samples that this rank has got since this was called last; 1 for
        none."""
        samples, self._samples = self._samples or 1.0, 0.0
        return samples

    def take_sizes(self) -> list[str]:
        """Return the lines that take the size of a divided batch as a number, each once."""
        new = [line for line, was_told in self._sizes.items() if not was_told]
        self._sizes.update(dict.fromkeys(new, True))
        return new

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Have the `with` block read and draw numbers that are not of a divided batch."""
        before, self.divides_now = self.divides_now, False
        self.is_outside = True
        try:
            yield
        finally:
            self.divides_now, self.is_outside = before, False

    def fetched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches; numbers that their data set reads meanwhile are of single samples."""
        several = iter(batches)
        while True:
            with self.outside():
                try:
                    data = next(several)
                except StopIteration:
                    return
            yield data

    def collating(self, collate: CollateFn) -> CollateFn:
        """Wrap a function of the samples of a part, within `fetched`."""

        @wraps(collate)
        def run(samples: list[Any]) -> Any:
            before, self.is_outside = self.is_outside, False
            try:
                return collate(samples)
            finally:
                self.is_outside = before

        return run

    def took_whole(self) -> None:
        """Note that the script gets batches that all ranks compute on."""
        self._latest, self.divides_now = None, False
        if torch.is_grad_enabled():
            self.weight, self._used = self._whole_weight(), None

    def _whole_weight(self) -> float:
        # A mean of equal gradients is not equal to these: a third of a triple is rounded.
        return 1.0 if self.divides or self.comm.rank == 0 else 0.0

    def divide_no_more(self) -> None:
        """Have every rank compute on whole batches from the next pass on."""
        self.divides, self.undivided = False, True
        if self._used is None:
            self.weight = self._whole_weight()

    def ended(self, use: PassUse) -> None:
        """Note that a pass has ended."""
        self.divides_now = use.trains
        use.is_under_way = False
        self._under_way.ended(use)
        self.origins.close()

    def begin(self, dataset: Any) -> PassUse:
        """Return the use of a pass over a data set that begins."""
        self._taken.clear()
        use, said = self.passes.begin(dataset, len(dataset), self.evaluating, self.has_optimizer)
        if said is not None:
            self.say(said)
        self._under_way.begins(use)
        return use

    def end_passes(self) -> None:
        """Note that no batch of any pass is used from now on."""
        for said in self.passes.end():
            self.say(said)

    def use(self, inputs: tuple[Any, ...]) -> None:
        """Note that a module computes on some inputs with gradients.

        A script may get the next batches before it computes on this one: its tensors tell which
        one it is, or else it is the latest.
        """
        # Called for each module: no generators.
        batch, self._latest = self._latest, None
        for each in inputs:
            if isinstance(each, torch.Tensor) and (known := self._batch_of(each)) is not None:
                batch = known
                break
        if batch is not None:
            self.weight, self._used = batch.weight, batch
            self._computed = batch
            while self._taken and batch in self._taken:
                self._taken.popleft()
            self.assigner.use(batch)
            use = batch.of.use
            use.computes()
            self._under_way.used(use)
            if use.is_over and self._current:
                self._again = batch
        elif self._used and not self._used.divided and self._used.of.use not in self._current:
            # It computes on no loader's batch: the pass before, such as a validation, is over
            # and does not train.
            self.weight, self._used = self._whole_weight(), None

    def _batch_of(self, tensor: torch.Tensor) -> ScriptBatch | None:
        batch = self._of_tensor.get(tensor)
        if batch is None and (base := tensor._base) is not None:
            batch = self._of_tensor.get(base)  # Such as `images.view(-1, 784)`.
        return batch

    def backward(self) -> None:
        """Note that a backward runs, also where no module has computed."""
        if self._latest is not None and torch.is_grad_enabled():
            self.use(())
        for use in self._current:
            use.backward()
        if self._used is not None:
            self._used.of.use.backward()

    def stepped(self) -> None:
        """Note that an optimizer steps, or that a scaler skips it."""
        for use in self._current:
            use.steps()
        if self._used is not None:
            self._used.of.use.steps()
            if not self._current:
                self._used = None

    def note(self, text: str) -> None:
        """Add a note for the user; each is printed once, at the end."""
        if text not in self.notes:
            self.notes.append(text)

    def say(self, text: str, any_rank: bool = False) -> None:
        """Tell the user something at once, by rank 0, or `any_rank`: the first one of each node;
        each text once."""
        if text not in self._said:
            self._said.add(text)
            if self.claims.is_first(text) if any_rank else self.comm.rank == 0:
                sys.stderr.write(f"dlio run: {text}\n")


_context: ScriptContext | None = None


def use(context: ScriptContext | None) -> None:
    """Set the context that loaders created from now on use; None for none."""
    global _context
    _context = context
    GARBAGE.close()
    if context is not None:
        GARBAGE.start()


@dataclass(frozen=True, slots=True)
class _PassBatches:
    """The batches of a pass."""

    first: list[list[int]]
    """All of them, or the first ones if they are drawn `ahead`."""
    ahead: DrawnAhead | None
    follows: FollowingSampler | None
    """The sampler itself, if a copy of it is drawn from."""


class _ShareBalance:
    """Shares of one loader's batches by measured speed.

    The measure is the time that the script spent on its batches of the previous pass: from taking a
    batch to asking for the next, without waiting for other ranks.
    """

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._clock = StepClock(lambda: context.waited())
        self._cost: Cost | None = None
        self._shares: RankShares | None = None

    def step(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """Measure the time that the script spends on a batch inside the `with` block."""
        return self._clock.step(samples) if self._context.balance else contextlib.nullcontext()

    def shares(self, most: int) -> RankShares:
        """Return the shares of a new pass, with batches of at most `most` samples. Collective."""
        comm, steps = self._context.comm, self._clock.steps
        most = max(most, comm.size)
        counts = () if self._shares is None else self._shares.counts
        if self._shares is None or (len(counts), sum(counts)) != (comm.size, most):
            self._shares = RankShares.of(most, comm.size)
        if self._cost is not None:
            self._cost = self._cost.corrected(steps)
        elif (rate := self._clock.rate()) is not None:
            self._cost = Cost(0.0, 1 / rate)
        self._clock.steps = []
        cost = 0.0 if self._cost is None else self._cost.per_sample_s
        costs: list[float] = uniform(comm, lambda: comm.allgather(cost))
        if all(costs):
            # Fixed costs per step are left out: they do not matter once all ranks finish together,
            # and the shares converge to that.
            self._shares = balanced_shares(self._shares, [Cost(0.0, each) for each in costs])
        self._context.last_shares = self._shares
        return self._shares


class _InTorchsPlace(ABCMeta):
    """Has every loader of dlio's be an instance of the class in the place of torch's: frameworks
    that are imported meanwhile ask whether a loader that a script has from dlio is one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is SharingLoader:
            return DataLoader in subclass.__mro__
        return super().__subclasscheck__(subclass)


class SharingLoader(DataLoader[_T_co], metaclass=_InTorchsPlace):
    """The DataLoader that a script gets in place of torch's.

    A training pass yields this rank's share of each batch. Another pass yields whole batches, so
    that the script's metrics are correct on every rank; so does one of which it is not known yet
    (see `pass_use`).
    """

    def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
        assert _context is not None
        self._context = _context
        self._balance = _ShareBalance(_context)
        self._plans = LossPlans()
        self._passes, self._draws_seed = 0, True
        self._is_shared = True
        """False if the pass that began last is not divided among the ranks."""
        if _context.tiers is not None and adapted(dataset, _context.tiers) is not None:
            options.setdefault("tiers", _context.tiers)
        super().__init__(dataset, *args, **options)
        self._is_dealt = True  # Or whole on all ranks, which then compute the same.
        self._collates = (
            self.collate_fn
            if self.collate_fn is default_collate
            else _context.collating(_context.mixed_inputs.around_collate(self.collate_fn))
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        context = self._context
        if context.aside:
            return DataLoader.__iter__(self)
        # A loader of Accelerate's draws all that its pass does with the first batch, which matters
        # where several are begun together, zip(a, b).
        return self._later() if accelerate.is_used(self) else self._pass()

    def _later(self) -> Iterator[Any]:
        yield from self._pass()

    def _pass(self) -> Iterator[Any]:
        context = self._context
        self._is_shared = False
        if self._is_taken_by_thread():
            return _alone(self)
        if context.comm.size == 1 or not torch.is_grad_enabled() or not context.divides:
            return self._whole()
        per_rank = context.batch == "per-rank"
        if per_rank and context.evaluating:
            return self._whole()
        if isinstance(self.dataset, IterableDataset):
            if not context.evaluating:
                context.undivided = True
                context.note(
                    "an iterable data set gives every rank all samples: shard it in its __iter__ "
                    "by dlio.comm.world().rank to gain from more ranks"
                )
            return self._whole()
        if self.batch_size is None and self.batch_sampler is None:
            if not context.evaluating:
                context.undivided = True
                context.note("a loader without batches gives every rank all samples")
            return self._whole()
        dataset: Any = self.dataset
        use = context.begin(dataset)
        use.plans = self._plans
        # Each rank's part is a batch then; ranks that average weights weigh no losses.
        self._plans.begun |= per_rank or not context.guard.active
        # Batches per rank are other batches: a pass cannot begin with one that fits both.
        use.trains |= per_rank and context.has_optimizer
        self._is_shared = True
        before = None if self.generator is None else self.generator.get_state()
        # Torch's loader draws a seed for workers as a pass begins. The sampler draws then, too, if
        # there are workers, and else with the first batch: after another loader's seed.
        drawn = self._drawn_seed()
        return self._shares(use, before, drawn, self._begun() if self.num_workers else None)

    def _is_taken_by_thread(self) -> bool:
        """True if a thread of the script takes batches of a pass: they come at other moments of the
        training on each rank."""
        if self._context.comm.size == 1 or threading.current_thread() is threading.main_thread():
            return False
        self._context.undivided = True
        self._context.note(
            "a thread of the script takes batches of a loader: every rank computed all of "
            "them; the result is correct, but no faster than one process"
        )
        return True

    def follows_formula(self) -> bool:
        """False, as the script's sampler makes the order, until a framework distributes."""
        return self._context.aside and super().follows_formula()

    @property
    def joined_rows(self) -> Callable[[Any], Any] | None:
        """Returns all rows of a training batch for this rank's, if the ranks divide it."""
        context = self._context
        if context.aside or not self._is_shared:
            return None
        return lambda mine: joined_rows(
            mine, context.batches_of_rows(mine), context.comm, context.guard
        )

    def _drawn_seed(self) -> int:
        """Draw a seed for workers, as torch's loader does before the sampler draws."""
        threads, options = self._engines.threads, self._options()
        self._draws_seed = threads.base_seed is None or not options.persistent_workers
        return threads.draw_base_seed(options)

    def __len__(self) -> int:
        """Number of batches that a pass yields: as in one process, or that divided by the number of
        ranks (rounded up) if each rank gets batches of its own (`per-rank`).

        It is that of the pass that began last, and at first of a training pass, whether or not the
        model trains now.
        """
        if self._context.aside:
            return super().__len__()
        self.follows_sampler = True  # As `_alone` sets it: the length must agree with a pass.
        count = super().__len__()
        shared = not isinstance(self.dataset, IterableDataset) and self._is_shared
        if self._context.batch == "per-rank" and shared:
            return -(-count // self._context.comm.size)
        return count

    def _whole(self) -> Iterator[Any]:
        self._context.took_whole()
        end_step()  # An evaluation in the midst of a pass may take any time.
        return _alone(self)

    def _shares(
        self, use: PassUse, before: torch.Tensor | None, drawn: int, batches: "_PassBatches | None"
    ) -> Iterator[Any]:
        """Yield this rank's shares of the batches that rank 0's sampler draws, or whole batches
        until it is known that the pass trains.

        `before` is the generator's state as the pass began, `drawn` the workers' seed, and
        `batches` those of the pass if they were drawn then.
        """
        if self._is_taken_by_thread():  # Of a pass that the script's own thread has begun.
            yield from self._whole_of_thread(use, batches)
            return
        generator = self.generator
        taken, is_over = 0, False
        batches = self._begun() if batches is None else batches
        follows = batches.follows
        try:
            dealt = self._dealt(use, drawn, batches)
            while True:
                if follows is not None:
                    with self._context.outside():
                        follows.step()
                try:
                    data = next(dealt)
                except StopIteration:
                    break
                taken += 1
                if follows is not None and not self._context.got_as_drawn(follows):
                    self._context.say(
                        f"{type(self.batch_sampler).__name__} draws from random numbers from which "
                        "the script has drawn, too, since the batches were drawn ahead: they come "
                        "in another order than in one process, each sample as often; with a "
                        "generator of its own the order is that of one process"
                    )
                yield data
            is_over = True
        finally:
            is_ended = is_over or not GARBAGE.frees
            if is_ended:
                self._context.ended(use)
            ends_early = is_ended and not is_over and follows is None
            if ends_early and generator is not None and before is not None:
                generator.set_state(before)
                self._draw_some(taken)

    def _whole_of_thread(self, use: PassUse, batches: "_PassBatches | None") -> Iterator[Any]:
        """Yield whole batches, for which the seed of the pass has been drawn, to a thread."""
        self._context.ended(use)
        self._context.took_whole()
        drawn = self.batch_sampler or () if batches is None else batches.first
        inner = _with_batches(self, [list(each) for each in drawn], self.collate_fn)
        before = _random_states(self.generator)
        parts = _alone(inner)
        _set_random_states(self.generator, before)
        yield from parts

    def _draw_some(self, batches: int) -> None:
        """Leave the loader's generator as a pass does in one process that the script ends early:
        the sampler has drawn no more than the batches taken, and those that workers prepare."""
        if self._draws_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        states = torch.get_rng_state()
        ahead = self.num_workers * (self.prefetch_factor or 0)
        for _ in islice(self.batch_sampler or (), batches + ahead):
            pass
        torch.set_rng_state(states)

    def _begun(self) -> "_PassBatches":
        """Begin a pass; returns its batches. Collective."""
        context = self._context
        context.guard.meet("the start of a pass over a loader")
        context.between_passes()
        ahead = None
        is_own = has_own_sampler(self)
        # A generator's state is read, too, and by the next pass: torch's sampler draws at its end.
        if is_own or self.generator is not None or draws_for_long(self):
            copied = copied_sampler(self)
            if copied is not None:
                ahead = DrawnAhead(copied)
            elif is_own:
                context.say(
                    f"{type(self.batch_sampler).__name__} cannot be copied: its state while the "
                    "script is in a pass is that of the pass's end, and is not to be saved"
                )
        if ahead is None:
            return _PassBatches(self._batches_of_root(None), None, None)
        first = self._batches_of_root(ahead)
        each = context.comm.size if context.batch == "per-rank" else 1
        with context.outside():
            return _PassBatches(first, ahead, FollowingSampler(self, each))

    def _dealt(self, use: PassUse, drawn: int, batches: "_PassBatches") -> Iterator[Any]:
        context = self._context
        comm = context.comm
        self._passes += 1
        seed = rank_seed(comm.rank, drawn, self._passes)
        randoms = FetchRandoms(seed)
        shares, nothing = RankShares.even(1, comm.size), contextlib.nullcontext()
        if context.balance:
            shares = self._balance.shares(max(map(len, batches.first), default=0))
        if not use.trains:
            end_step()  # An evaluation in the midst of a pass may take any time.
        registration = None
        if "accelerate.state" in sys.modules:  # Of this loader: that of a deal is not prepared.
            registration = accelerate.Registration(self, len(batches.first))
        for deal in self._deals(batches, shares, use):
            context.shared += deal.divided
            collate = self._collates if deal.divided else self.collate_fn
            inner = _with_batches(self, deal.mine, collate)
            before = _random_states(self.generator)
            if deal.divided:
                # Workers draw for samples of this rank's, too.
                (self.generator or torch.default_generator).manual_seed(seed)
            parts = _alone(inner)
            _set_random_states(self.generator, before)
            if deal.divided:
                parts = context.fetched(randoms.around(parts))
            for weight, data in zip(deal.weights, parts, strict=True):
                context.guard.took_batch(use)
                self._tell_draws(randoms.drawn_from, deal.divided)
                context.took(deal.take(weight), data, use)
                measured = self._balance.step(int(weight)) if deal.divided else nothing
                if registration is not None:
                    registration.step(ended=False)
                try:
                    with computing() if deal.divided else nothing, measured:
                        yield data
                finally:
                    # Unless Python's collector ends the pass: the script may look at another batch.
                    if not GARBAGE.frees:
                        context.mixed_inputs.close()
                context.divides_now = False  # A data set may read tensors, too.
                if deal.is_over():
                    inner._end_pass()
                    break
        if registration is not None:
            registration.step(ended=True)
        context.guard.note("the end of a pass over a loader")

    def _tell_draws(self, modules: list[str], divided: bool) -> None:
        """Tell of samples that draw other random numbers than in one process."""
        context, data = self._context, self._planned_data()
        in_workers = context.worker_draws.take() and divided
        by_dlio = data is not None and data.recipe.is_random and not holds_own(self.dataset)
        if modules or in_workers or by_dlio:
            file, line = context.guard.place
            kind, has_own = type(self.dataset).__name__, self.generator is not None
            said = draws_differ(kind, modules, by_dlio, self.num_workers, has_own)
            context.say(f"{os.path.basename(file)}:{line}: {said}")

    def _deals(
        self, batches: "_PassBatches", shares: RankShares, use: PassUse
    ) -> Iterator[ScriptAssignment]:
        run = batches.first
        while run:
            yield from self._context.assigner.deals(run, shares, use)
            run = [] if batches.ahead is None else self._batches_of_root(batches.ahead)

    def _batches_of_root(self, ahead: DrawnAhead | None) -> list[list[int]]:
        """Return the batches of a pass that rank 0's sampler draws, or the next of them that are
        drawn ahead. Collective.

        With `--batch per-rank`, each entry joins as many batches as there are ranks.
        """
        comm, sampler, dataset = self._context.comm, self.batch_sampler, cast(Any, self.dataset)
        assert sampler is not None
        before = _random_states(self.generator)

        def tell() -> list[list[int]]:
            _set_random_states(self.generator, before)  # Another rank may be rank 0 by now.
            if ahead is not None:
                # Two passes' samples at once: with no end in sight there is one more run.
                with self._context.outside():
                    drawn = ahead.run(2 * len(dataset)) if comm.rank == 0 else []
            else:
                # By every rank: a sampler may keep a state of its own, or draw from the script's.
                drawn = [list(each) for each in sampler]
            lengths = comm.tell([len(each) for each in drawn])
            # An array, not JSON: an epoch has millions of indices.
            own = np.asarray([index for each in drawn for index in each], np.int64)
            flat = own if comm.rank == 0 else np.zeros(sum(lengths), np.int64)
            comm.bcast(flat)
            if ahead is None and not np.array_equal(own, flat):
                self._context.say(
                    f"{script_line()}: a sampler draws another order there on each rank, as where "
                    "its weights or indices are made of losses of the rank's own samples: rank "
                    "0's order counts, and it is not that of one process",
                    any_rank=True,
                )
            if not lengths:
                return []
            return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]

        batches = uniform(comm, tell)
        if self._context.batch == "per-rank":
            groups = [batches[k : k + comm.size] for k in range(0, len(batches), comm.size)]
            return [[index for each in group for index in each] for group in groups]
        return batches


# Lightning makes a loader anew by the parameters that it sees: without it, of batches of 1.
vars(SharingLoader.__init__)["__signature__"] = inspect.signature(DataLoader.__init__)


def _alone(loader: DataLoader) -> Iterator[Any]:
    """Start a pass over whole batches in the sampler's order, as in a single process."""
    loader.follows_sampler = True
    return DataLoader.__iter__(loader)


def _random_states(generator: torch.Generator | None) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]


def _set_random_states(generator: torch.Generator | None, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if generator is not None:
        generator.set_state(states[1])


def _with_batches(loader: DataLoader, batches: list[list[int]], collate: CollateFn) -> DataLoader:
    """Return a loader with the options of another one that yields the given batches of indices."""
    # Crops follow torch's seed as it is in one process, and not the one that this rank draws with.
    seed = loader.seed if loader._planned_data() is None else loader._order_seed()
    made = DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        tiers=loader.tiers,
        seed=seed,
        workers=loader.workers,
    )
    made._data = loader._data  # Share its open tiers.
    return made
