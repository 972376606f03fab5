"""The options of a loader, as its engines read them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch.utils.data import IterableDataset, default_collate

from dlio.comm.data_ranks import place
from dlio.errors import UsageError
from dlio.image.device_decode.nvimagecodec import REMEDY, is_installed
from dlio.loader.contract import (
    BatchData,
    CollateFn,
    DecodePlace,
    IndexBatches,
    Indices,
    ScalarWriter,
    UserDataset,
)
from dlio.loader.dataset import Dataset
from dlio.loader.mixture_dataset import Mixture
from dlio.loader.passes import FormulaOrder, Survivors
from dlio.loader.recipe import CropRecipe, Recipe
from dlio.loader.torch_private import pin_memory
from dlio.plan.block_order import window_of
from dlio.plan.epoch import check_mode, check_shares, is_exact
from dlio.plan.rank_shares import RankShares, checked_shares
from dlio.storage.tier_spec import Tiers, parse_tiers
from dlio.util.arguments import (
    MOST_SEED,
    PathText,
    check_callable,
    check_counts,
    named,
    number_in,
    one_of,
    path_in,
    whole_number,
)
from dlio.util.cores import available_cores
from dlio.util.printable import warn_user
from dlio.util.shared_state import SharedState, shared_state_of

if TYPE_CHECKING:
    from dlio.comm.data_ranks import AnyMesh, Group


_MOST_WORKERS: Final = 4096
_MANY_THREADS: Final = 64
_THREADS_A_CORE: Final = 16
WorkerKind = Literal["thread", "process"]
OnError = Literal["stop", "skip"]


def check_arguments(
    dataset: UserDataset,
    num_workers: int,
    prefetch_factor: int | None,
    timeout: float,
) -> None:
    """Raise UsageError for arguments of a loader that torch would fail on without naming them."""
    # torch would iterate over the characters of a path.
    if isinstance(dataset, str | os.PathLike):
        raise UsageError(f"{str(dataset)!r} is a path: open it with dlio.open first")
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise UsageError(
            f"{named('dataset', dataset)}: give the result of dlio.open, or a data set of torch"
        )
    # torch's own words, which scripts and its tests look for.
    for name, given in (("num_workers", num_workers), ("timeout", timeout)):
        if isinstance(given, int | float) and given < 0:
            raise UsageError(f"{name} option should be non-negative, not {given}")
    whole_number("num_workers", num_workers, 0, _MOST_WORKERS)
    if prefetch_factor is not None:
        if isinstance(prefetch_factor, int) and prefetch_factor < 0:
            raise UsageError(
                f"prefetch_factor option should be non-negative, not {prefetch_factor}"
            )
        if prefetch_factor == 0 and num_workers:
            raise UsageError("prefetch_factor must be greater than 0 with num_workers, not 0")
        whole_number("prefetch_factor", prefetch_factor, 0, None, "batches")
    number_in("timeout", timeout, 0, "seconds")


def check_device(device: torch.device | str | int | None) -> None:
    """Raise UsageError if a loader's device cannot decode."""
    if device is None:
        raise UsageError(
            "decode='device' decodes on the loader's device: give device='cuda', too, or 'cpu'"
        )
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UsageError(
            f"decode='device' on {torch.device(device)}: nvImageCodec decodes on 'cuda' and 'cpu' "
            "alone: leave decode= out"
        )
    if not is_installed():
        raise UsageError(f"decode='device' needs nvImageCodec: {REMEDY}, or leave decode= out")


def check_recipe(recipe: Recipe) -> CropRecipe:
    """Return the recipe of a device's crops. Raises UsageError for samples that it cannot make."""
    path, instead = recipe.reader.path, "or leave decode='device' out"
    if not isinstance(recipe, CropRecipe):
        raise UsageError(
            f"decode='device': samples of {path} are not crops of images: give image_size= or a "
            f"transform that begins with RandomResizedCrop, {instead}"
        )
    if recipe.transforms:
        raise UsageError(
            f"decode='device': the transform= of {path} has steps for each sample, which the CPU "
            f"does: leave only crops, flips, Normalize, RandomErasing, MixUp and CutMix, {instead}"
        )
    if recipe.decoder.kept:
        raise UsageError(
            f"decode='device': a tier of decoded images keeps what the CPU decodes: leave "
            f"':decoded' out of tiers= of {path}, {instead}"
        )
    return recipe


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoaderOptions:
    """The options of one pass. Engines take this record and know nothing else of the loader.

    Made again when a pass begins, since torch lets some attributes of a loader be assigned between
    passes: `num_workers`, `collate_fn`, `worker_init_fn` and `timeout`. The meaning of each option
    is in the documentation of `DataLoader`.

    Raises UsageError, in one line, for options that cannot work together.
    """

    dataset: UserDataset
    batch_size: int | None
    batched: bool
    """True if an index of the sampler is a list, to be collated."""
    shuffle: bool | None
    drop_last: bool
    sampler: Indices | None
    batch_sampler: IndexBatches | None
    follows_sampler: bool
    """True if the order is that of a sampler which the user, or a framework, has given."""
    num_workers: int
    collate_fn: CollateFn
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    """Seconds for one batch; 0 waits without end."""
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    length_was_read: bool
    """True if the user has asked for `len` of an iterable data set; torch warns if it was wrong."""
    tiers: Tiers | None
    mode: str
    source_order: str
    seed: int | None
    workers: WorkerKind | None
    on_error: OnError | None
    device: torch.device | str | int | None
    decode: DecodePlace
    mesh: "AnyMesh | None"
    group: "Group | None"
    shares: Sequence[int] | None
    trace: PathText | None
    writer: ScalarWriter | None
    pretend_nodes: int | None
    snapshot_every_n_steps: int | None

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_shares(self.mode, self.shares is not None)
        self._check_values()
        if self.tiers is not None and self.iterable:
            raise UsageError("tiers= keeps samples by their index; an iterable data set has none")
        # A sampler has already given each rank its part.
        if self.shares is not None and self.follows_sampler:
            raise UsageError("shares= deals the loader's own order: leave the sampler out")
        # Blocks in windows are an order of the whole job; modes that are not exact have an order
        # for each node.
        if window_of(self.source_order) is not None and not is_exact(self.mode):
            raise UsageError(
                f"source_order={self.source_order!r} is for mode batch or global, and this "
                f"loader's mode is {self.mode}: choose one of them, or source_order='sample'"
            )

    def _check_values(self) -> None:
        """Raise UsageError for values that are wrong whatever the other options are."""
        if self.workers is not None:
            one_of("workers", self.workers, ("thread", "process"))
        if self.on_error is not None:
            one_of("on_error", self.on_error, ("stop", "skip"))
        one_of("decode", self.decode, ("cpu", "device"))
        whole_number("num_workers", self.num_workers, 0, _MOST_WORKERS)
        for name, given in (("sampler", self.sampler), ("batch_sampler", self.batch_sampler)):
            if given is not None and not hasattr(given, "__iter__"):
                raise UsageError(f"{named(name, given)}: give a sampler, or a list of indices")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise UsageError(f"{named('generator', self.generator)}: give a torch.Generator")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise UsageError(
                    f"{named('device', self.device)}: give a device of torch, such as 'cpu' or "
                    "'cuda:0'"
                ) from error
        if self.decode == "device":
            check_device(self.device)
            if isinstance(self.dataset, Dataset):
                check_recipe(self.dataset.recipe)
        if self.seed is not None:
            whole_number("seed", self.seed, 0, MOST_SEED)
        if self.pretend_nodes is not None:
            whole_number("pretend_nodes", self.pretend_nodes, 1, None, "nodes")
        check_callable("worker_init_fn", self.worker_init_fn)
        check_callable("collate_fn", self.collate_fn)
        if self.snapshot_every_n_steps is not None:
            whole_number("snapshot_every_n_steps", self.snapshot_every_n_steps, 0, None, "batches")
        if self.shares is not None:
            check_counts("shares", self.shares)
        if self.trace is not None:
            path_in("trace", self.trace, "trace.json")
        if self.writer is not None and not hasattr(self.writer, "add_scalar"):
            raise UsageError(f"{named('writer', self.writer)}: give TensorBoard's SummaryWriter")
        if self.tiers is not None:
            parse_tiers(self.tiers)

    @property
    def iterable(self) -> bool:
        """True for an IterableDataset, which has no indices."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def collates_by_default(self) -> bool:
        """True if `collate_fn` is torch's default_collate."""
        return self.collate_fn is default_collate

    @property
    def in_threads(self) -> bool | None:
        """True if threads of this process make batches, False for torch's own engines; None for
        threads if dlio itself reads the data set, and torch's worker processes otherwise."""
        if self.iterable:
            return False
        if self.workers is not None:
            return self.workers == "thread"
        if self.shared_state:
            return False
        # Who gives one of these expects processes: functions that seed global generators would
        # disturb the training from a thread.
        for_processes = self.worker_init_fn is not None or self.multiprocessing_context is not None
        return None if for_processes else True

    @property
    def shared_state(self) -> SharedState | None:
        """Use of state of the process by code that makes samples or batches; None if nothing
        is found."""
        return None if self.iterable else shared_state_of((self.dataset, self.collate_fn))

    @property
    def has_too_many_workers(self) -> bool:
        """True for more processes than cores, or more threads than waiting for storage explains."""
        cores = available_cores()
        # Threads that wait for storage need no core: sixteen for each are not too many.
        if self.in_threads:
            return self.num_workers > max(_MANY_THREADS, _THREADS_A_CORE * cores)
        return self.num_workers > cores

    def formula(
        self, seed: int, samples: int, data: Dataset | None, survivors: Survivors | None
    ) -> FormulaOrder:
        """Return the order of a pass that is dlio's own over so many samples, and this rank's part
        of it.

        `data` is the data set as dlio reads it; None if it is asked for samples. Raises UsageError
        if chosen shares do not fit the ranks.
        """
        assert self.batch_size is not None
        if survivors is None:
            rank, ranks = place(self.group, self.mesh)
            shares = RankShares.even(self.batch_size, ranks)
        else:
            rank, shares = survivors.rank, survivors.shares
        if self.shares is not None:
            shares = checked_shares(self.shares, shares.global_batch, len(shares.counts))
        return FormulaOrder(
            seed=seed,
            samples=samples,
            shuffled=bool(self.shuffle),
            shares=shares,
            drop_last=self.drop_last,
            rank=rank,
            source_order=self.source_order,
            layout=None if data is None or self.source_order == "sample" else data.reader.layout,
            exact=is_exact(self.mode),
            mixing=data.mixing if isinstance(data, Mixture) else None,
        )


SAME_NAMES: Final = tuple(
    each.name for each in fields(LoaderOptions) if each.name not in ("batched", "length_was_read")
)
"""Options that are public attributes of a loader, under the same names."""


def pinning(options: LoaderOptions) -> Callable[[BatchData], BatchData] | None:
    """Return a function that copies a batch of any structure into page-locked memory; None if
    batches are not pinned. Warns, as torch's loader does, if they cannot be."""
    # Warnings word for word as torch's: scripts filter them by their text.
    if options.pin_memory and options.pin_memory_device:
        warn_user(
            "pin_memory_device is deprecated, the current accelerator will be used as the "
            f"device,ignore pin_memory_device='{options.pin_memory_device}'.",
            stacklevel=2,
        )
    has_accelerator = torch.accelerator.is_available()
    if options.pin_memory and not has_accelerator:
        warn_user(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=2,
        )
    if not (options.pin_memory and has_accelerator):
        return None
    accelerator = torch.accelerator.current_accelerator()
    device = None if accelerator is None else accelerator.type
    return lambda data: pin_memory(data, device)
