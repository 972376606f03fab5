"""The loader: torch's DataLoader, fed from the hierarchy, shared among the ranks of a job."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import TypeVar

from dlio.comm.data_ranks import place
from dlio.comm.survival.recovery import recovery_of
from dlio.comm.world import membership, world
from dlio.errors import UsageError
from dlio.exchange.batch_share import BatchShare, announce, is_heard, wants_repeats
from dlio.exchange.lone_steps import watch_steps
from dlio.loader.assignment.assigner import BatchAssigner, ElasticIterator
from dlio.loader.assignment.history import AssignmentSpan, SpanRecord
from dlio.loader.batch_stream import BatchResult, LoaderIterator, RunningPass
from dlio.loader.contract import (
    BatchData,
    CollateFn,
    DecodePlace,
    IndexBatches,
    Indices,
    Sample,
    ScalarWriter,
    State,
    StatefulObject,
    UserDataset,
)
from dlio.loader.dataset import Dataset
from dlio.loader.delivery import target_of
from dlio.loader.diagnosis import diagnose, report
from dlio.loader.engine_choice import Engines, described
from dlio.loader.loader_options import (
    SAME_NAMES,
    LoaderOptions,
    OnError,
    WorkerKind,
    check_arguments,
)
from dlio.loader.mixture_dataset import restore_weights
from dlio.loader.nested_batches import emptied, may_hold
from dlio.loader.passes import (
    FormulaOrder,
    InterruptedEpoch,
    LoaderPosition,
    Pass,
    PassCounters,
    PlannedPass,
    Survivors,
    check_state,
)
from dlio.loader.planned_engine.engine import epoch_plan
from dlio.loader.repeated_samples import repeated_batch, with_repeats
from dlio.loader.sampler_pass import BatchesPass, SamplerOrder, SamplerPass
from dlio.loader.stats import PassStats
from dlio.loader.third_party import accelerate, fit_loop
from dlio.loader.third_party.adapters import contents_of, holds_own, read_by_dlio
from dlio.loader.torch_draws import MOST_PERMUTED, PassDraws, TorchSource
from dlio.loader.torchdata_state.iteration_state import IterationState
from dlio.loader.trace import Spans, path_of
from dlio.plan.block_order import window_of
from dlio.plan.epoch import EpochPlan, is_exact
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import SampleMask
from dlio.plan.schedule import RankNodes, steps_in_epoch
from dlio.storage.tier_spec import Tiers
from dlio.util.arguments import MOST_SEED, PathText, whole_number
from dlio.util.closable import Closable
from dlio.util.cores import available_cores
from dlio.util.printable import log_warning, tell_once
from dlio.util.units import counted

if TYPE_CHECKING:
    from dlio.comm.data_ranks import AnyMesh, Group


_T_co = TypeVar("_T_co", covariant=True, default=Sample)
_AHEAD_BATCHES = 3
"""Batches before the end of a pass at which persistent workers begin the next pass."""


class DataLoader(torch.utils.data.DataLoader[_T_co], Closable):
    """torch's DataLoader with tiers, exact shuffling across ranks and resumable state.

    It takes torch's arguments and behaves as torch's loader does. In addition:

    - Data sets of `dlio.open` are read through their tiers. Their order is a formula of (seed,
      epoch), and threads decode samples straight into the batch's memory. The same holds for data
      sets that dlio understands: torchvision's ImageFolder and DatasetFolder, Hugging Face
      `datasets` of images, and torch's Subset and ConcatDataset of them.
    - Any other map-style data set is asked by threads, in the order that torch would use.
    - In a distributed run (MPI or torch.distributed) without a sampler the ranks share the data.
      Each rank gets its part of every global batch of `batch_size` x ranks samples; the last,
      smaller one is shared out evenly. An epoch has the same samples on any number of ranks. Where
      gradients are weighed by the loader's batches (`dlio.distribute`, Lightning, Accelerate,
      Trainer), a rank gets two samples of the last one at least, or samples of others that count
      nothing; otherwise its batch may be empty.
    - `state_dict` works at any step, `load_state_dict` on any number of ranks and workers.

    A batch of labelled images from `dlio.open` is a uint8 tensor of shape (n, 3, size, size) in
    channels-last memory and an int64 tensor of shape (n,). With the data set's `transform` the
    first item is default_collate's result for the transformed crops. Other samples are collated by
    `collate_fn`, as `dlio.loader.sample.decode_sample` or the transform returns them.

    All ranks iterate over a data set of dlio alike: making the iterator is collective, a step is
    not.

    Args:
        dataset, batch_size, ..., in_order: as for torch. `num_workers` are threads or processes;
            for data sets of dlio 0 means one thread per core.
        tiers: keep the samples of any data set in tiers, as `dlio.open` does; without pickle.
        mode: `batch` trains a sample on the node that holds it, `global` anywhere; `local` gives
            each rank the samples of its node, `partial(q)` exchanges a fraction q of them an epoch,
            `ring` hands them on from rank to rank each epoch.
        source_order: order in which the source is read where no tier holds the data. `sample`
            reads samples in the order of the epoch. `block(k)` reads whole blocks, once an epoch,
            and shuffles within k blocks at a time; for small samples. `block` is `block(16)`.
        seed: of the order, which is then a formula of (seed, epoch) for any map-style data set; by
            default the data set's. Without any the order is that of torch's loader after the same
            `torch.manual_seed` or with the same `generator`, on any number of ranks.
        workers: `thread`, or `process` for torch's own workers, which suit Python code that holds
            the GIL. By default processes if `worker_init_fn` or `multiprocessing_context` is
            given, threads otherwise.
        on_error: `stop` at a sample that cannot be read, or `skip` and count it; by default the
            data set's own choice, or `stop`.
        device: hand out batches on this device, copied ahead of their use.
        decode: `device` decodes JPEGs on `device` ("cuda" or "cpu") by nvImageCodec, within a bound
            of the CPU's pixels (docs/guides/gpu.md); for samples that are crops of images.
        mesh, group: the ranks that share the data, as a `dlio.Mesh`, a DeviceMesh with a
            data-parallel dimension or a process group; ranks of one model-parallel group, and those
            that share samples, get the same samples.
        shares: samples per step for each rank, for ranks of different speed; the same list on all
            ranks, with the sum `batch_size` x ranks. The last, smaller step is shared in
            proportion. The attribute can be assigned between passes. Even for None.
        trace: file for a trace of each pass, for chrome://tracing or Perfetto.
        writer: TensorBoard's SummaryWriter, for scalars after each pass.
        pretend_nodes: behave as if the ranks were spread over that many nodes.
        snapshot_every_n_steps: save and restore the states of the data set and the sampler, as
            torchdata's StatefulDataLoader does, and collect those of workers every so many
            batches. Chosen with 1 for data sets with `state_dict` that dlio does not read itself.
    """

    _snapshot_every: int | None = None
    """The default of `snapshot_every_n_steps`."""

    def __init__(
        self,
        dataset: UserDataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Indices | None = None,
        batch_sampler: IndexBatches | None = None,
        num_workers: int = 0,
        collate_fn: CollateFn | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        tiers: Tiers | None = None,
        mode: str = "batch",
        source_order: str = "sample",
        seed: int | None = None,
        workers: WorkerKind | None = None,
        on_error: OnError | None = None,
        device: torch.device | str | int | None = None,
        decode: DecodePlace = "cpu",
        mesh: "AnyMesh | None" = None,
        group: "Group | None" = None,
        shares: Sequence[int] | None = None,
        trace: PathText | None = None,
        writer: ScalarWriter | None = None,
        pretend_nodes: int | None = None,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        check_arguments(dataset, num_workers, prefetch_factor, timeout)
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
        # Public, under their own names: frameworks that copy this loader read them.
        self.shuffle, self.device, self.decode = shuffle, device, decode
        self.tiers, self.mode, self.source_order = tiers, mode, source_order
        self.seed, self.workers, self.on_error = seed, workers, on_error
        self.mesh, self.group, self.shares = mesh, group, shares
        self.trace, self.writer, self.pretend_nodes = trace, writer, pretend_nodes
        every = self._snapshot_every if snapshot_every_n_steps is None else snapshot_every_n_steps
        self.snapshot_every_n_steps = every
        self.last_samples: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Indices of the samples of the batch that was handed out last."""
        self.follows_sampler = sampler is not None or batch_sampler is not None
        """True if the order is the user's sampler's, which the ranks do not share."""
        self.batch_share: BatchShare | None = None
        """Samples of each rank in the batch that was handed out last; None if ranks do not share
        it."""
        self._source, self._has_warned = TorchSource(), False
        self._is_dealt = not isinstance(self.dataset, torch.utils.data.IterableDataset)
        """False for data that each rank reads whole, until that is said."""
        self._skipped = 0
        """Batches that the next pass leaves out."""
        self.end_of_dataloader, self.remainder = False, -1
        self._is_accelerate_prepared = not self.follows_sampler
        self._place = LoaderPosition()
        self._data: Dataset | None = None
        self._contents: tuple[object, ...] | None = None
        """State of the data set when dlio first read it, if it is of another library."""
        self._engines = Engines()
        self._stats = PassCounters()
        self.plan: EpochPlan | None = None
        """Plan of the current pass; None where dlio does not make it."""
        self.assigns_batches = True
        """False if someone else assigns batches to the survivors when ranks are lost."""
        self._assigner: BatchAssigner | None = None
        self._survivors: Survivors | None = None
        """Once ranks have been lost."""
        self._interrupted: InterruptedEpoch | None = None
        """If the next pass continues such an epoch."""
        self._current: weakref.ref[LoaderIterator] | None = None
        self._kept: IterationState | None = None
        self._lightnings: State | None = None
        """The state that Lightning resumes from, until it trains."""
        options = self._options()  # Raises now for options that cannot work.
        if options.has_too_many_workers:
            super().check_worker_number_rationality()
        if not self.follows_sampler and self.sampler is not None:
            EpochLink.put_on(self.sampler, self)
        accelerate.prepare()

    @property
    def data(self) -> Dataset:
        """The data set as dlio reads it. Raises UsageError if dlio cannot read it itself."""
        data = self._planned_data()
        if data is None:
            raise UsageError(f"{type(self.dataset).__name__} is not read by dlio itself")
        return data

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on all ranks; with `keep`, in the chosen epoch."""
        if self.follows_formula():
            count = self._place.positions(self._count(), self.formula)
            return steps_in_epoch(count, 0, self._global_batch(), self.drop_last)
        return super().__len__()

    def set_epoch(self, epoch: int, keep: SampleMask | npt.ArrayLike | None = None) -> None:
        """Choose the next pass's epoch. A resumed position in that epoch stays.

        Args:
            keep: samples of that pass, the same on all ranks, as `SampleMask.of` takes them; all
                samples for None. The other samples do not occur in the pass.

        Raises UsageError for `keep` where the order is not dlio's own.
        """
        epoch, mask = whole_number("epoch", epoch), None
        if keep is not None:
            if not self.follows_formula():
                raise UsageError("keep= is for orders of dlio's own: give seed=, and no sampler")
            mask = SampleMask.of(keep, self._count())
        # As Lightning does: a sampler of the user's learns of the epoch, too.
        for sampler in (self.sampler, getattr(self.batch_sampler, "sampler", None)):
            choose = getattr(sampler, "set_epoch", None)
            if choose is not None and not isinstance(choose, EpochLink):
                choose(epoch)
        self._place = self._place.chosen(epoch, mask)

    def skip_first_batches(self, count: int) -> None:
        """Have the next pass leave out its first `count` batches, as a resumed run does.

        A position in the middle of an epoch that `load_state_dict` has set goes before. Raises
        UsageError where the order is not dlio's own.
        """
        count = whole_number("count", count, 0)
        if not self.follows_formula():
            raise UsageError("skip_first_batches is for orders of dlio's own: give seed=")
        self._skipped = count

    def state_dict(self) -> State:
        """Return the loader's place: batches handed out are consumed, prefetched ones are not.

        The same on all ranks after the same step, and valid for any number of them; whole numbers
        and text, for torch.distributed.checkpoint as for JSON.
        """
        keeper = self._keeper()
        ahead = fit_loop.fetched_ahead()
        if keeper is not None:
            return keeper.state_dict(self._options(), self._IterableDataset_len_called, ahead)
        state = self._place.state()
        if state is None:
            batches, _ = self._place.open(self._order(self._options()))
            state = batches.state()
        current = self._place.current
        if ahead and isinstance(current, BatchesPass):
            state["batches"] -= ahead
        elif ahead and isinstance(current, SamplerPass):
            return current.state(ahead)
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from `state_dict`, on this number of ranks and workers.

        Raises UsageError for the state of another data set, seed or kind of order.
        """
        keeper = self._keeper()
        if keeper is not None:
            keeper.load_state_dict(state_dict)
            return
        formula = (self._given_seed(), self._count()) if self.follows_formula() else None
        self._place = self._place.loaded(check_state(state_dict, formula))
        restore_weights(self._planned_data(), self._place.resumed or {})

    def stats(self) -> PassStats:
        """Return this rank's counts of the current or last pass; see `PassStats`."""
        return self._stats.as_dict()

    def diagnosis(self) -> str:
        """Return one line on the current or last pass: its rate, its bottleneck and the remedy.

        Logged after each pass by the logger `dlio`, at level INFO.
        """
        if not self._stats.batches and not self._stats.has_ended:
            has_begun = self._current is not None
            return "the pass has had no batch yet" if has_begun else "no pass has begun yet"
        return diagnose(self.stats(), available_cores())

    @property
    def stall_s(self) -> float:
        """Seconds of the current or last pass that were spent waiting for batches."""
        return self._stats.stall_s

    def follows_formula(self) -> bool:
        """True if the order is dlio's own, which ranks share without communication."""
        if self.follows_sampler or not self.batch_size:
            return False
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            return False
        if self.seed is not None or self._planned_data() is not None:
            return True
        return place(self.group, self.mesh)[1] > 1

    def close(self) -> None:
        """Close everything that the loader and its data set hold open."""
        self._end_pass()
        if self._data is not None:
            self._data.close()
            if self._data is not self.dataset:
                self._data = self._contents = None
        elif isinstance(self.dataset, Dataset):
            self.dataset.close()
        self._engines.planned.close()
        self._iterator = None
        if self._kept is not None:
            self._kept.close()
        if self._assigner is not None:
            self._assigner.close()
            self._assigner = None

    def _end_pass(self) -> None:
        current = self._current() if self._current is not None else None
        if current is not None:
            current.close()
        self._engines.drop_ahead()  # It reads from the data set.

    def __repr__(self) -> str:
        return described(self._options(), self._planned_data())

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins where the next pass of the original would.
        copy = self.__dict__.copy()
        nothing = ("_data", "_contents", "_current", "_iterator", "_assigner", "plan", "writer")
        for name in (*nothing, "batch_share"):
            copy[name] = None
        for name in ("_engines", "_stats", "_source"):
            del copy[name]
        kept = None if self._kept is None else self._kept.copied()
        return {**copy, "_place": self._place.copied(), "_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stats = PassCounters()
        self._engines = Engines()
        self._source = TorchSource()
        if not self.follows_sampler and self.sampler is not None:
            EpochLink.put_on(self.sampler, self)

    def check_worker_number_rationality(self) -> None:
        """Leave torch's warning to the end of `__init__`: threads may be more than cores."""

    def __iter__(self) -> Iterator[BatchData]:  # type: ignore[override]
        self._follow_changes()
        watch_steps(*place(self.group, self.mesh))
        self._tell_of_copies()
        passes_end = self._resumes_in_lightning()
        keeper = self._keeper()
        if keeper is not None:
            options, length = self._options(), self._IterableDataset_len_called
            begun = keeper.begun(options, length, self._place.next_epoch, passes_end)
            self._place = LoaderPosition(begun.batches)
            return self._iterator_of(options, begun)
        assigner = self._own_assigner()
        if passes_end:
            self._pass_end()
        return self.begin() if assigner is None else ElasticIterator(assigner, len(self))

    def _tell_of_copies(self) -> None:
        """Say once that ranks do not share the samples of an iterable data set."""
        if self._is_dealt:
            return
        self._is_dealt, (rank, ranks) = True, place(self.group, self.mesh)
        if ranks > 1 and not rank:
            log_warning(
                f"each of {counted(ranks, 'rank')} reads all that {type(self.dataset).__name__} "
                "yields there: samples are used once only if its __iter__ yields each rank a part"
            )

    def _resumes_in_lightning(self) -> bool:
        """True if Lightning begins the first pass of a resumed training, whose state is loaded, or
        begins it again before it trains, as it does after a validation."""
        if self.follows_formula():
            return False
        if fit_loop.resumes(self):
            self._lightnings = self._place.resumed if self._kept is None else self._kept.loaded
            return True
        state, self._lightnings = self._lightnings, None
        current = self._place.current
        if state is None or current is None or not fit_loop.fits():
            return False
        if self._place.ended or self._stats.batches > (current.steps is None):
            return False
        self.load_state_dict(state)
        return True

    def _pass_end(self) -> None:
        """Have the next pass be the following one if a state was loaded of the end of one."""
        batches, position = self._place.open(self._order(self._options()))
        if isinstance(batches, SamplerPass) and self._place.resumed and batches.steps == 0:
            batches.end()
            self._place = position.over(batches)

    def _keeper(self) -> IterationState | None:
        """Return what keeps the states of the data set and the sampler; None if nothing needs it,
        because dlio's own order is followed or nothing has a state."""
        every = self.snapshot_every_n_steps
        if self._kept is not None or (
            every is None and not isinstance(self.dataset, StatefulObject)
        ):
            return self._kept
        if self.seed is not None or self._planned_data() is not None:
            return None
        if every is None and self.follows_formula():
            return None
        self._kept = IterationState(self._options(), 1 if every is None else every)
        return self._kept

    def _own_assigner(self) -> BatchAssigner | None:
        """Return the assigner of a loop whose ranks may be lost; None if they end together."""
        wanted = membership() is not None or self._place.has_requeued
        if not (wanted and self.assigns_batches and self.follows_formula()):
            return None
        if self._assigner is None:
            recovery = recovery_of(world())
            self._assigner = BatchAssigner(
                (self,), recovery, self._global_batch(), keeps_steps=True
            )
        return self._assigner

    def begin(self, draws: PassDraws | None = None) -> LoaderIterator:
        """Begin a pass that is assigned to the same ranks until its end; `draws` are those of a
        pass that it replaces."""
        options = self._options()
        order = self._order(options)
        if isinstance(order, FormulaOrder) and self._given_seed() is None:
            order = replace(order, draws=self._drawn(options, order, draws))
        batches, self._place = self._place.open(order, self._skipped)
        self._interrupted, self._skipped = None, 0
        ahead = self._engines.take_ahead(batches) if self._engines.ahead else None
        if ahead is not None:
            self._place = self._place.handed_out(ahead.batches)
        return self._iterator_of(options, ahead or self._begin(options, batches))

    def _iterator_of(self, options: LoaderOptions, begun: RunningPass) -> LoaderIterator:
        self._stats, self.plan = begun.stats, begun.plan
        registration = None
        if "accelerate.state" in sys.modules:
            registration = accelerate.Registration(self, begun.batches.steps)
        handed = partial(self._handed, options, begun, registration)
        watch = self._engines.watch
        watch.dataset = type(self.dataset).__name__
        iterator = LoaderIterator(begun, handed, watch)
        if isinstance(begun.batches, PlannedPass):
            iterator.before_first = partial(self._follow_choice, begun.batches, registration)
        self._current = weakref.ref(iterator)
        return iterator

    def _follow_choice(
        self,
        batches: PlannedPass,
        registration: accelerate.Registration | None,
        iterator: LoaderIterator,
    ) -> None:
        """Begin another pass, if its epoch was chosen after this one began and before its first
        batch: torch's samplers draw as late as that, and Lightning relies on it."""
        place = self._place
        if place.current is not batches or place.epoch is None or place.epoch == batches.epoch:
            return
        if registration is not None:
            registration.step(ended=True)
        iterator.close()
        iterator.continue_as(self.begin(PassDraws(batches.cursor.seed, batches.shuffle)))
        self._current = weakref.ref(iterator)

    def _handed(
        self,
        options: LoaderOptions,
        begun: RunningPass,
        registration: accelerate.Registration | None,
        fed: BatchResult | None,
    ) -> None:
        """Note that a batch is handed out; None at the end of the pass."""
        batches, stats = begun.batches, begun.stats
        foreign = options.collates_by_default and self._data is not self.dataset
        if fed is not None and foreign and type(fed.data) is tuple:
            fed.data = list(fed.data)  # As torch's default_collate does.
        if registration is not None:
            registration.step(fed is None)
        if fed is None:
            before, self._place = self._place, self._place.over(batches)
            # Once: whoever asks again at the end is told of the end again.
            shuffle = batches.shuffle if isinstance(batches, PlannedPass) else None
            if shuffle is not None and self._place is not before and not before.ended:
                shuffle.end(self.generator, cast(PlannedPass, batches).cursor.samples)
            report(stats.as_dict(), batches.epoch, self.writer)
            if begun.spans is not None and options.trace is not None:
                rank, ranks = place(options.group, options.mesh)
                begun.spans.write(path_of(options.trace, rank, ranks), rank)
            return
        self._hand_share(batches, registration is not None and registration.is_active, fed)
        # Before the batch is in the user's hands: a state that is saved in the loop's body counts
        # it.
        batches.consumed()
        # torch's own `__setattr__` looks at each name first.
        own = vars(self)
        own["_place"] = self._place.handed_out(batches)
        if fed.indices is not None:
            own["last_samples"] = fed.numbers()
        if (
            self.persistent_workers
            and begun.plan is not None
            and stats.batches + _AHEAD_BATCHES == batches.steps
        ):
            self._begin_ahead(options, batches)

    def _begin_ahead(self, options: LoaderOptions, batches: Pass) -> None:
        order = self._order(options)
        assert isinstance(order, FormulaOrder)
        if self._given_seed() is None:
            if order.ranks > 1:
                return  # Ranks agree on random numbers once a pass, as it begins.
            draws_base = self._engines.threads.draws(options)
            permuted = order.samples if self._is_permuted(order, batches.epoch + 1) else None
            order = replace(order, draws=self._source.peeked(self.generator, permuted, draws_base))
        place = LoaderPosition(None, False, batches.next_state(), None, self._place.mask)
        following = place.open(order)[0]
        self._engines.ahead = self._engines.ahead or self._begin(options, following)

    def _drawn(
        self, options: LoaderOptions, order: FormulaOrder, drawn: PassDraws | None
    ) -> PassDraws | None:
        """Draw torch's random numbers for the next pass, as torch's loader would; None if it has
        drawn them before a state was saved. Collective if several ranks share crops or a shuffled
        order."""
        place, source, threads = self._place, self._source, self._engines.threads
        if place.resumed is not None and place.epoch is None:
            source.resume(place.resumed, self.generator)
        data, comm = self._planned_data(), None
        if data is None and not order.shuffled:
            return None
        if order.ranks > 1 and drawn is None:
            opened = cast(PlannedPass, place.open(order, self._skipped)[0])
            comm = self._engines.planned.meet(options, data, opened)
        if not place.begins_epoch:
            return None
        if drawn is None:
            threads.draw_base_seed(options, source.generator(self.generator))
            shuffle = None
            if self._is_permuted(order, place.next_epoch):
                shuffle = source.shuffle(self.generator, order.samples)
            drawn = PassDraws(source.seed(self.generator), shuffle)
            if comm is not None:
                drawn = PassDraws.from_json(comm.tell(drawn.to_json()))
        threads.was_drawn = True
        return drawn

    def _is_permuted(self, order: FormulaOrder, epoch: int) -> bool:
        """True if an epoch without a seed follows torch's permutation; other orders are dlio's
        own."""
        mask = self._place.mask
        return (
            order.shuffled
            and order.exact
            and order.mixing is None
            and window_of(order.source_order) is None
            and order.samples <= MOST_PERMUTED
            and (mask is None or mask[0] != epoch)
        )

    def _hand_share(self, batches: Pass, is_registered: bool, fed: BatchResult) -> None:
        """Tell those who weigh gradients of a batch that is handed out."""
        share = None
        if isinstance(batches, PlannedPass) and batches.formula.left is None:
            if batches.repeats and not fed.samples and not (is_registered or wants_repeats()):
                fed.data = emptied(fed.data)
            counts, rank = batches.counts(batches.step), batches.formula.rank
            samples = fed.samples
            planned = counts[rank]
            if fed.indices is None and (samples > planned or may_hold(fed.data, planned)):
                samples = planned  # Its first dimension may be another one, such as time or boxes.
            share = BatchShare(counts, rank, samples, batches.step + 1)
        vars(self)["batch_share"] = share
        announce(share, fed.data)

    def _begin(self, options: LoaderOptions, batches: Pass) -> RunningPass:
        engines, data = self._engines, self._planned_data()
        seed = batches.cursor.seed if isinstance(batches, PlannedPass) else self.seed
        if isinstance(batches, SamplerPass) and batches.seed is not None:
            seed = batches.seed
        if data is not None and data.given_seed is None and seed is not None:
            data.follow_seed(seed)
        spans = Spans() if options.trace is not None else None
        in_threads = data is not None if options.in_threads is None else options.in_threads
        _tell_of_shared_state(options, in_threads)
        if in_threads and data is not None and isinstance(batches, PlannedPass):
            begun = engines.planned.begin(options, data, batches, spans)
        else:
            begun = engines.begin_foreign(options, in_threads, data, batches, spans, self._iterator)
            keeps = options.persistent_workers and options.num_workers
            if keeps and begun.iterator is not None:
                self._iterator = begun.iterator  # A pass with the same processes uses it again.
        engines.threads.was_drawn = False
        device = options.device
        if device is None and "accelerate.state" in sys.modules:
            device = accelerate.device(self)
        transform = None
        if begun.stats.engine == "planned" and data is not None and options.collates_by_default:
            transform = data.recipe.batch_transform
        if device is not None or transform is not None:
            begun.feed = engines.delivered(begun.feed, device, transform)
        if isinstance(batches, PlannedPass) and batches.repeats and batches.formula.rank >= 0:
            made = None
            if begun.stats.engine == "planned" and data is not None:
                made = repeated_batch(options, data, None if device is None else target_of(device))
            begun.feed = with_repeats(begun.feed, batches, batches.formula.rank, made)
            next(begun.feed)
        return begun

    def _options(self) -> LoaderOptions:
        """The options as they are now. Raises UsageError when they cannot work."""
        same: dict[str, Any] = {name: getattr(self, name) for name in SAME_NAMES}
        read = self._IterableDataset_len_called is not None
        return LoaderOptions(batched=self.batch_sampler is not None, length_was_read=read, **same)

    def _order(self, options: LoaderOptions) -> FormulaOrder | SamplerOrder | None:
        """The order of the next pass; None for an iterable data set."""
        if options.iterable:
            return None
        if not self.follows_formula():
            kept = self._engines.threads.base_seed is not None
            fresh = not (options.persistent_workers and kept)
            data, seed = self._planned_data(), None
            if data is not None and self._given_seed() is None:
                seed = self._source.seed(options.generator)
            return SamplerOrder(self.sampler, self.batch_sampler, options.generator, fresh, seed)
        data = self._planned_data()
        if self._interrupted is not None and self._survivors is not None:
            return self._interrupted.shared(self._survivors)
        order = options.formula(self._order_seed(), self._count(), data, self._survivors)
        if order.ranks > 1 and (is_heard() or accelerate.is_used(self)):
            # Two, for batch normalisation, where batches are not smaller.
            shares = replace(order.shares, fewest=min(2, min(order.shares.counts)))
            order = replace(order, shares=shares)
        return order

    def _planned_data(self) -> Dataset | None:
        """The data set as dlio reads it; None if torch's way is taken."""
        if self._data is None:
            if isinstance(self.dataset, Dataset):
                self._data = self.dataset
                if self.tiers is not None and self.dataset.tiers != self.tiers:
                    self.dataset.retier(self.tiers)
            elif self._contents is None and not isinstance(
                self.dataset, torch.utils.data.IterableDataset
            ):
                self._data = read_by_dlio(self.dataset, self.tiers, self.seed)
                self._contents = contents_of(self.dataset)
        return self._data

    def _follow_changes(self) -> None:
        """Read another library's data set anew if its samples or its transform were changed since
        the last pass: torch's workers are made for each pass, unless they are persistent."""
        if self._contents is None or self.persistent_workers:
            return
        if contents_of(self.dataset) != self._contents:
            self._end_pass()
            if self._data is not None:
                self._data.close()
            self._data = self._contents = None

    def _count(self) -> int:
        return len(cast(Any, self.dataset))  # A map-style data set's type need not be Sized.

    def _global_batch(self) -> int:
        """Samples of a step over all ranks."""
        if self._assigner is not None:
            return self._assigner.usual_batch
        if self._survivors is not None:
            return self._survivors.shares.global_batch
        assert self.batch_size is not None
        return self.batch_size * place(self.group, self.mesh)[1]

    def _order_seed(self) -> int:
        given = self._given_seed()
        return self._source.seed(self.generator) if given is None else given

    def _given_seed(self) -> int | None:
        """The seed that was given to the loader or its data set; None to follow torch's."""
        if self.seed is not None:
            return int(self.seed)
        data = self._planned_data()
        # A user who passes a generator expects it to decide the order.
        if self.generator is None and data is not None and data.given_seed is not None:
            return data.given_seed
        if membership() is None:
            return None
        # Ranks may be lost or join here, so that none can be asked for its seed.
        if self.generator is not None:
            return int(self.generator.initial_seed()) & MOST_SEED
        if not self._has_warned:
            self._has_warned = True
            log_warning(
                "where ranks may be lost or join, the order and the crops do not follow torch's "
                "seed: give seed= to dlio.DataLoader; it is 0 now"
            )
        return 0

    # Assignment to the survivors when ranks are lost, or join, in the middle of an epoch. Called by
    # `BatchAssigner`, which decides; the loader ends passes and begins others.

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None:
        """End the current pass; each of the survivors gets an even part of later ones.

        Ranks have the numbers that they had when the data set was mounted.
        """
        self._end_pass()
        self._survivors = Survivors(tuple(members), me, RankShares.of(global_batch, len(members)))
        self.shares = None  # They were those of other ranks.
        data = self._planned_data()
        if data is not None and data.mounted is not None:
            data.mounted.regroup(members)

    def resume_at(self, position: int, again: Sequence[int], began: Sequence[int] = ()) -> None:
        """Have the next pass continue the current epoch, or the chosen one, from a position on. The
        samples `again` are requeued to its end; `began` are the numbers of the ranks that began it.
        """
        before = self._place.current
        self._end_pass()
        if not isinstance(before, PlannedPass):  # This rank has joined the others.
            before = PlannedPass(self.state_dict(), self.formula, self._place.mask)
        self._place = self._place.loaded(before.state_at(position, again))
        if self._survivors is not None and not is_exact(self.mode) and position < before.whole:
            # Which samples a rank gets depends on the ranks that began the epoch: the survivors
            # keep their parts, and the lost ones' are requeued.
            self._interrupted = InterruptedEpoch(before.formula, tuple(began))

    def prepare(self, generation: int | None = None) -> int:
        """Open the tiers; returns the number of passes so far, or what it is set to. Collective."""
        planned = self._engines.planned
        planned.mount(self._options(), self.data)
        if generation is not None:
            planned.generation = generation
        return planned.generation

    @property
    def formula(self) -> FormulaOrder:
        """The order of the next pass, which is dlio's own."""
        return cast(FormulaOrder, self._order(self._options()))

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks; of a loader with batches."""
        return self._global_batch()

    @property
    def planned(self) -> PlannedPass:
        """The pass that began last, in an order of dlio's own."""
        return cast(PlannedPass, self._place.current)

    def recall_span(self, record: SpanRecord) -> AssignmentSpan:
        """Return batches that were assigned to other ranks before this one joined them."""
        batches, plan = record.planned(self.formula, self._place.mask), None
        if record.node_of is not None:
            mounted = self.data.mounted
            assert mounted is not None
            ranks = RankNodes(np.array(record.node_of, np.int32))
            plan = epoch_plan(batches, mounted, self.mode, ranks)
        return AssignmentSpan(batches, plan, tuple(record.members))


class EpochLink:
    """The `set_epoch` of a loader's own sampler, by which Lightning chooses epochs."""

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[DataLoader] = weakref.WeakSet()

    def __call__(self, epoch: int) -> None:
        for loader in tuple(self._loaders):
            if loader.follows_formula():
                loader.set_epoch(epoch)

    def __reduce__(self) -> tuple[type["EpochLink"], tuple[()]]:
        return EpochLink, ()  # A loader's copy puts itself on.

    @classmethod
    def put_on(cls, sampler: Any, loader: DataLoader) -> None:
        """Have a sampler's `set_epoch` choose a loader's epoch, unless it has one of its own."""
        link = getattr(sampler, "set_epoch", None)
        if link is None:
            sampler.set_epoch = link = cls()
        if isinstance(link, cls):
            link._loaders.add(loader)


def _tell_of_shared_state(options: LoaderOptions, in_threads: bool) -> None:
    """Say once that worker processes make the samples, or that threads share state."""
    state = options.shared_state if options.num_workers else None
    if state is None or (not in_threads and holds_own(options.dataset)):
        return  # Of samples of `dlio.open` the engine's reason tells.
    name = type(options.dataset).__name__
    if not in_threads:
        if options.workers is None:
            tell_once(
                f"{name}: worker processes make its samples, since {state}, which threads would "
                "share"
            )
        return
    harm = "; so a mask may be changed otherwise than its picture" if state.seeds else ""
    tell_once(f"{name}: {state}, which threads share{harm}: leave out workers='thread'")
