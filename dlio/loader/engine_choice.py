"""The engines of one loader."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler

from dlio.errors import UsageError
from dlio.loader.batch_stream import RunningPass
from dlio.loader.contract import BatchData, CollateFn, Sample, UserDataset
from dlio.loader.dataset import Dataset
from dlio.loader.delivery import DeviceDelivery
from dlio.loader.listed_sampler import ListedPass, is_listable, listed_samples, raising_at_end
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.mixture_dataset import Mixture
from dlio.loader.nested_batches import emptied
from dlio.loader.passes import Pass, PassCounters, PlannedPass
from dlio.loader.planned_engine.engine import PlannedEngine, decode_threads
from dlio.loader.sampler_pass import SamplerPass
from dlio.loader.third_party.adapters import holds_own
from dlio.loader.thread_engine import ThreadEngine
from dlio.loader.torch_engine import TorchEngine, torch_feed
from dlio.loader.trace import Spans
from dlio.loader.waiting_threads import LockWatch
from dlio.plan.listed_order import ListedOrder
from dlio.storage.tier_spec import decoded_spec
from dlio.util.printable import log_warning


def choose_engine(options: LoaderOptions, data: Dataset | None) -> tuple[str, str]:
    """Return the engine of a pass (`planned`, `threads` or `torch`), and why it is not `planned`;
    "" if it is.

    `data` is the data set as dlio reads it; None if it is asked for samples.
    """
    if options.iterable:
        return "torch", "an iterable data set has no indices"
    if not (data is not None if options.in_threads is None else options.in_threads):
        state = None if options.workers else options.shared_state
        if state is not None:
            remedy = "" if options.num_workers else ": num_workers= makes worker processes"
            return "torch", f"{state}, which threads would share{remedy}"
        return "torch", "worker processes are chosen (workers=, worker_init_fn= and others)"
    if data is None:
        engine = "threads" if options.num_workers else "torch"
        return engine, f"dlio asks {type(options.dataset).__name__}[i] for each sample"
    if options.follows_sampler and not is_listable(options):
        own = options.batch_sampler is None or type(options.batch_sampler) is BatchSampler
        name = type(options.sampler if own else options.batch_sampler).__name__
        return "threads", (
            f"{name} chooses the order: leave it out for dlio's own, as with shuffle=True"
        )
    if not options.batched:
        return "threads", "batch_size=None asks for single samples"
    return "planned", ""


def described(options: LoaderOptions, data: Dataset | None) -> str:
    """Return a loader's `repr`: its data set, and its engine with the reason."""
    engine, reason = choose_engine(options, data)
    why = f" since {reason}" if reason else ""
    shown = options.dataset if isinstance(options.dataset, Dataset) else type(options.dataset)
    name = shown.__name__ if isinstance(shown, type) else repr(shown)
    return f"dlio.DataLoader({name}, batch_size={options.batch_size}, engine={engine!r}{why})"


class Engines:
    """A loader's engines, which keep memory and communicators from pass to pass."""

    def __init__(self) -> None:
        self.planned = PlannedEngine()
        self.threads = ThreadEngine()
        self.torch = TorchEngine()
        self.delivered = DeviceDelivery()
        self.watch = LockWatch()
        self.ahead: RunningPass | None = None
        """The next pass, if it has begun while the last batches of the current one are used."""
        self._has_warned = False

    def begin_foreign(
        self,
        options: LoaderOptions,
        in_threads: bool,
        data: Dataset | None,
        batches: Pass,
        spans: Spans | None,
        iterator: Any,
    ) -> RunningPass:
        """Have threads, or torch's own engines, ask the data set for samples; the worker processes
        of `iterator` are used again.

        Raises UsageError for options that the engine lacks.
        """
        if isinstance(data, Mixture) and not isinstance(batches, PlannedPass):
            raise UsageError(
                "a mixture's weights choose the order: leave out sampler=, batch_sampler= and "
                "batch_size=None"
            )
        engine, reason = choose_engine(options, data)
        if reason and not self._has_warned and holds_own(options.dataset):
            self._has_warned = True  # Said once for samples of `dlio.open`.
            shown = type(options.dataset).__name__
            log_warning("%s: read by the engine '%s', since %s", shown, engine, reason)
        if options.decode == "device" and engine != "planned":
            raise UsageError(
                f"decode='device' is for batches that dlio makes itself, and {reason}: leave "
                "decode= out"
            )
        # Crops are drawn by epoch: without this each pass over a sampler would have those of epoch
        # 0.
        if data is not None and not isinstance(batches, PlannedPass):
            data.follow_epoch(batches.epoch)
        # A sampler whose order is known in advance is read as a planned pass: blocks come in the
        # order of their use, and crops are decoded into the batch, which asking sample by sample
        # cannot do.
        drawn = None
        may_list = in_threads and is_listable(options)
        if may_list and data is not None and isinstance(batches, SamplerPass):
            self.threads.base_seed_of(options)
            drawn = ListedPass(batches)
            listed = listed_samples(drawn, len(data))
            if listed is not None:
                order = ListedOrder.of(listed)
                begun = self.planned.begin_listed(options, data, batches, order, spans)
                if drawn.error is not None:
                    begun.feed = raising_at_end(begun.feed, drawn.error)
                    # Generators run up to their first `yield None` when they are made, so that work
                    # begins now and not with the first batch.
                    next(begun.feed)
                return begun
        spec = None if data is None else decoded_spec(data.tiers, "gpu")
        if spec is not None:
            raise UsageError(
                f"tier {spec} is for batches that dlio makes in its own threads and order: leave "
                "out the sampler, worker processes and batch_size=None, or the tier"
            )
        if data is not None and data.recipe.mixes:
            raise UsageError(
                "MixUp and CutMix in transform= mix the batches that dlio makes itself: leave out "
                "the sampler and worker processes, or call them with each batch in the loop"
            )
        mounted = None if data is None else self.planned.fill(options, data)
        collate = options.collate_fn
        dataset = options.dataset if data is None else data
        # An epoch's last batch may be smaller than the number of ranks; those without a sample
        # still have to take part in the step.
        if isinstance(batches, PlannedPass):
            collate = EmptyBatchCollate(collate, dataset)
        if in_threads and (options.num_workers or mounted is not None):
            threads = options.num_workers
            if not threads and mounted is not None:
                threads = decode_threads(mounted)
            return self.threads.begin(
                options, dataset, collate, threads, mounted, drawn or batches, spans, drawn is None
            )
        if options.on_error == "skip":
            raise UsageError("on_error='skip' works with threads: set num_workers=1 or more")
        stats = PassCounters(None if mounted is None else mounted.hierarchy, engine="torch")
        if isinstance(batches, PlannedPass) and self.threads.was_drawn:
            # The pass has drawn the base seed, and torch's iterator draws one as well.
            workers_seed = torch.Generator().manual_seed(self.threads.base_seed_of(options))
            options = replace(options, generator=workers_seed)
        theirs = self.torch.iterator(options, collate, batches, iterator)
        feed = torch_feed(theirs, batches)
        next(feed)
        workers = getattr(theirs, "_workers", ())
        return RunningPass(batches, stats, feed, spans, workers=workers, iterator=theirs)

    def take_ahead(self, batches: Pass) -> RunningPass | None:
        """Return the pass that was begun ahead if it is this one; end it otherwise."""
        ahead = self.ahead
        if ahead is None:
            return None
        assert isinstance(ahead.batches, PlannedPass)
        # set_epoch, load_state_dict or another option may have changed the next pass.
        if not ahead.batches.begins_like(batches):
            self.drop_ahead()
            return None
        self.ahead = None
        ahead.stats.restart()
        return ahead

    def drop_ahead(self) -> None:
        """End the pass that was begun ahead."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            # Before others read: it holds threads, and messages of the shuffle that would be taken
            # for the next pass's.
            ahead.feed.close()


@dataclass(frozen=True, slots=True)
class EmptyBatchCollate:
    """A collate_fn that also collates an empty list: it collates sample 0 and drops it again.

    For ranks that an epoch's last, small global batch does not reach.
    """

    collate: CollateFn
    dataset: UserDataset

    def __call__(self, samples: list[Sample]) -> BatchData:
        if len(samples):
            return self.collate(samples)
        return emptied(self.collate([self.dataset[0]]))
