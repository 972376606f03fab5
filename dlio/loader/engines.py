"""The engines of one loader."""

from typing import Any

from dlio.errors import UsageError
from dlio.loader.dataset import Dataset
from dlio.loader.empty import EmptyAware
from dlio.loader.feed import Begun, Stats
from dlio.loader.options import LoaderOptions
from dlio.loader.passes import Pass, PlannedPass
from dlio.loader.planned.engine import PlannedEngine, decode_threads
from dlio.loader.processes import TorchEngine, torch_feed
from dlio.loader.threads import ThreadEngine
from dlio.loader.trace import Spans

__all__ = ["Engines"]


class Engines:
    """A loader's engines, which keep memory and communicators from pass to pass."""

    def __init__(self) -> None:
        self.planned = PlannedEngine()
        self.threads = ThreadEngine()
        self.torch = TorchEngine()
        self.ahead: Begun | None = None
        """The next pass, if it has begun while the last batches of the current one are used."""
        self.iterator: Any = None
        """torch's own iterator of the last pass, for a pass with the same worker processes."""

    def begin_foreign(
        self,
        options: LoaderOptions,
        in_threads: bool,
        data: Dataset | None,
        batches: Pass,
        spans: Spans | None,
        iterator: Any,
    ) -> Begun:
        """Have threads, or torch's own engines, ask the data set for samples.

        Args:
            data: the data set as dlio reads it; None if it is asked for samples.
            iterator: torch's own, whose worker processes go on.

        Raises UsageError for options that the engine lacks.
        """
        mounted = None if data is None else self.planned.fill(options, data)
        collate = options.collate_fn
        dataset = options.dataset if data is None else data
        if isinstance(batches, PlannedPass):
            collate = EmptyAware(collate, dataset)
        if in_threads and (options.num_workers or mounted is not None):
            threads = options.num_workers
            if not threads and mounted is not None:
                threads = decode_threads(mounted)
            return self.threads.begin(options, dataset, collate, threads, mounted, batches, spans)
        if options.on_error == "skip":
            raise UsageError("on_error='skip' works with threads: set num_workers=1 or more")
        stats = Stats(None if mounted is None else mounted.hierarchy, engine="torch")
        self.iterator = self.torch.iterator(options, collate, batches, iterator)
        return Begun(batches, stats, torch_feed(self.iterator, batches), spans)

    def take_ahead(self, batches: Pass) -> Begun | None:
        """Return the pass that was begun ahead if it is this one; end it otherwise."""
        ahead = self.ahead
        if ahead is None:
            return None
        assert isinstance(ahead.batches, PlannedPass)
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
            ahead.feed.close()
