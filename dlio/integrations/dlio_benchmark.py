"""A data loader for Argonne's DLIO benchmark, the engine of MLPerf Storage.

    dlio_benchmark workload=unet3d_h100 ++workload.reader.data_loader=pytorch \\
        ++workload.reader.data_loader_classname=dlio.integrations.dlio_benchmark.DlioLoader \\
        ++workload.reader.data_loader_sampler=index

DLIO measures, dlio reads: the files that DLIO generated come through tiers and dlio's loader, not
through DLIO's readers. docs/guides/dlio-benchmark.md has the settings.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import torch

from dlio.comm.world import world
from dlio.errors import UsageError
from dlio.integrations.dlio_files import DlioFiles, PayloadFitter
from dlio.loader.dataloader import DataLoader
from dlio.loader.dataset import Dataset
from dlio.util.arguments import nearest
from dlio.util.units import counted

_LEAST_STEPS: Final = 10
"""Steps after the first of which there is an AU; of fewer, one late step is more than 10 points."""
_PREFIX: Final = "dlio_"
_OPTIONS: Final = ("dlio_tiers", "dlio_mode", "dlio_source_order")
"""Keys of DLIO's `storage.storage_options` that are dlio's."""
_FILES_OF: Final = {"mmap_indexed_binary": "indexed_binary"}


class DlioLoader:
    """DLIO's loader of its training or its evaluation data.

    Each sample is handed out once an epoch, on one rank, and all ranks make as many steps. The
    order of an epoch is dlio's of DLIO's `train.seed`, where DLIO shuffles. A batch is a tensor of
    shape (batch_size, *shape of DLIO's samples) with the bytes of the samples themselves.

    DLIO makes the loader, calls `read` once and then `next` and `finalize` once a pass; the last
    `finalize` closes everything. All ranks call all of them alike.

    Args:
        format_type, dataset_type, epoch_number: as DLIO gives them.

    Raises UsageError for formats and settings that dlio does not read.
    """

    def __init__(self, format_type: object, dataset_type: object, epoch_number: int) -> None:
        config = _part("utils.config").ConfigArguments
        self._arguments: Any = config.get_instance()
        self._train = str(dataset_type) == "train"
        self._epoch = epoch_number
        self._steps: int | None = None
        """Steps of a pass, the same on all ranks; None before `read`."""
        self._data: Dataset | None = None
        self._loader: DataLoader | None = None
        self._made = 0
        """Passes that have been finalized."""
        self.au: list[float] = []
        """Percentage of each pass's time, without its first step, in which the training did not
        wait for data. It counts the barrier between steps as work, which DLIO's own AU does not."""
        self.last_samples: Any = None
        """Numbers of the samples of the batch that was handed out last; shape (batch_size,)."""

    def read(self) -> None:
        """Open the data. Collective. Raises SourceError for missing and for damaged files."""
        given, train = self._arguments, self._train
        _check_storage(given)
        options = _options(given.storage_options or {})
        files = given.file_list_train if train else given.file_list_eval
        batch_size = given.batch_size if train else given.batch_size_eval
        samples = len(files) * given.num_samples_per_file
        self._steps = samples // (batch_size * given.comm_size)
        if train and given.total_training_steps > 0:
            self._steps = min(self._steps, given.total_training_steps)
        if not self._steps:
            return
        form = _FILES_OF.get(str(given.format), str(given.format))
        reader = DlioFiles(files, form, given.num_samples_per_file, world())
        example = given.resized_image
        self._data = Dataset(
            reader,
            tiers=options.get("tiers"),
            seed=given.seed,
            finish=PayloadFitter(
                form,
                reader.whole,
                reader.name,
                tuple(example.shape),
                example.dtype.name,
                self._preparing(),
            ),
        )
        shuffles = (str(given.file_shuffle), str(given.sample_shuffle))
        threads = given.read_threads  # 0 for one per core.
        ahead = math.ceil(given.prefetch_size / threads) if threads else 0
        self._loader = DataLoader(
            self._data,
            batch_size,
            train and any(each != "off" for each in shuffles),
            num_workers=threads,
            drop_last=True,
            pin_memory=given.pin_memory and torch.cuda.is_available(),
            persistent_workers=threads > 0,
            mode=options.get("mode", "batch"),
            source_order=options.get("source_order", "sample"),
            prefetch_factor=ahead or None,
        )

    def next(self) -> Iterator[Any]:
        """Yield the batches of a pass. Collective."""
        if self._steps is None:
            raise UsageError("DlioLoader.next() before read(): DLIO calls read() first")
        if self._loader is None:
            return
        loader = self._loader
        loader.set_epoch(self._epoch if self._arguments.seed_change_epoch else 0)
        clock = _PassClock()
        # A whole pass is followed to its end, where the loader begins the next one.
        most = None if self._steps == len(loader) else self._steps
        batches = itertools.islice(iter(loader), most)
        while True:
            with clock:
                batch = next(batches, None)
            if batch is None:
                break
            self.last_samples = loader.last_samples
            yield batch
        self.au.append(clock.au())
        self._say(clock)
        self._epoch += 1

    def finalize(self) -> None:
        """End a pass; after DLIO's last one, close the data set, its tiers and its threads."""
        self._made += 1
        passes = self._arguments.epochs if self._train else _evaluations(self._arguments)
        if self._made >= passes:
            self.close()

    def close(self) -> None:
        """Close the data set, its tiers and its threads."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        if self._data is not None:
            self._data.close()
            self._data = None

    def _preparing(self) -> Callable[[], None] | None:
        """Return a function that takes DLIO's `preprocess_time`; None if there is none."""
        lasting = self._arguments.preprocess_time
        if not lasting:
            return None
        sleep = _part("utils.utility").sleep
        return lambda: sleep(lasting)

    def _say(self, clock: "_PassClock") -> None:
        if self._arguments.my_rank or self._loader is None:
            return
        kind = "training" if self._train else "evaluation"
        au = f"AU {clock.au():.1f} % on rank 0, barriers counted as work"
        if clock.steps <= _LEAST_STEPS:
            au = f"{counted(clock.steps, 'step')}, too few for an AU"
        self._arguments.logger.output(
            f"dlio: epoch {self._epoch}, {kind}: {au}; {self._loader.diagnosis()}"
        )


class _PassClock:
    """Time of a pass, divided into that of waiting for batches, in its `with`, and the rest."""

    def __init__(self) -> None:
        self._waited: list[float] = []
        self._since = 0.0
        self._first_end = self._end = 0.0

    @property
    def steps(self) -> int:
        """Batches so far; the last wait is for the pass's end."""
        return max(0, len(self._waited) - 1)

    def __enter__(self) -> None:
        self._since = time.perf_counter()
        if len(self._waited) == 1:
            self._first_end = self._since
        self._end = self._since

    def __exit__(self, *_: object) -> None:
        self._waited.append(time.perf_counter() - self._since)

    def au(self) -> float:
        """Percentage of the time from the second step on that was not spent waiting."""
        total = self._end - self._first_end
        waited = sum(self._waited[1:-1])
        return 100.0 * (1 - waited / total) if total > 0 else 0.0


def _check_storage(arguments: Any) -> None:
    """Raise UsageError for storage that dlio does not read."""
    storage = str(arguments.storage_type)
    if storage not in ("local_fs", "parallel_fs"):
        raise UsageError(
            f"storage_type={storage}: DlioLoader reads files, of local_fs and parallel_fs: use "
            "DLIO's own loader"
        )
    if arguments.odirect:
        raise UsageError("reader.odirect: DlioLoader does not bypass the page cache: leave out")


def _evaluations(arguments: Any) -> int:
    """Return how often DLIO evaluates."""
    if not arguments.do_eval:
        return 0
    count, due = 0, arguments.eval_after_epoch
    for epoch in range(1, arguments.epochs + 1):
        if epoch >= due:
            count, due = count + 1, due + arguments.epochs_between_evals
    return count


def _options(given: Mapping[str, object]) -> dict[str, str]:
    """Return dlio's own among DLIO's `storage_options`. Raises UsageError for an unknown one."""
    ours = {str(key): str(value) for key, value in given.items() if str(key).startswith(_PREFIX)}
    for key in ours:
        if key not in _OPTIONS:
            raise UsageError(
                f"storage.storage_options.{key}: dlio has {', '.join(_OPTIONS)}"
                f"{nearest(key, _OPTIONS)}"
            )
    return {key.removeprefix(_PREFIX): value for key, value in ours.items()}


def _part(name: str) -> ModuleType:
    """Import a module of DLIO's. Raises UsageError where DLIO is not installed."""
    from importlib import import_module

    try:
        return import_module(f"dlio_benchmark.{name}")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed here: run this loader in the environment of "
            "dlio_benchmark, and install dlio there"
        ) from error


def _register() -> None:
    """Have DLIO accept the loader: it looks for subclasses of its own."""
    try:
        from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
    except ModuleNotFoundError:
        return  # DlioLoader says so when it is made.
    BaseDataLoader.register(DlioLoader)


_register()
