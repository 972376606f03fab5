"""The engines of one loader."""

from dlio.loader.feed import Begun
from dlio.loader.passes import Pass, PlannedPass
from dlio.loader.planned.engine import PlannedEngine
from dlio.loader.processes import TorchEngine
from dlio.loader.threads import ThreadEngine

__all__ = ["Engines"]


class Engines:
    """A loader's engines, which keep memory and communicators from pass to pass."""

    def __init__(self) -> None:
        self.planned = PlannedEngine()
        self.threads = ThreadEngine()
        self.torch = TorchEngine()
        self.ahead: Begun | None = None
        """The next pass, if it has begun while the last batches of the current one are used."""

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
