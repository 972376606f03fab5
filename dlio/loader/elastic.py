"""Loaders whose ranks may be lost, or join, in the middle of an epoch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from dlio.loader.contract import State
from dlio.loader.dataset import Dataset
from dlio.loader.engine_choice import Engines
from dlio.loader.loader_options import LoaderOptions
from dlio.loader.passes import FormulaOrder, LoaderPosition, PlannedPass, SamplerOrder
from dlio.loader.survivors import InterruptedEpoch, Survivors
from dlio.plan.epoch import is_exact
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import SampleMask


class ElasticLoader:
    """The part of a loader that deals an epoch anew to the ranks that are left."""

    mode: str
    shares: Sequence[int] | None
    _place: LoaderPosition
    _engines: Engines
    _dealt: Survivors | None
    """Once ranks have been lost."""
    _torn: InterruptedEpoch | None
    """If the next pass goes on with such an epoch."""

    if TYPE_CHECKING:

        @property
        def data(self) -> Dataset: ...

        def state_dict(self) -> State: ...

        def _end_pass(self) -> None: ...

        def _planned_data(self) -> Dataset | None: ...

        def _options(self) -> LoaderOptions: ...

        def _order(self, options: LoaderOptions) -> FormulaOrder | SamplerOrder | None: ...

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None:
        """End the current pass; each of the ranks that are left gets an even part of later ones.

        Ranks have the numbers that they had when the data set was mounted.
        """
        self._end_pass()
        self._dealt = Survivors(tuple(members), me, RankShares.of(global_batch, len(members)))
        self.shares = None  # They were those of other ranks.
        data = self._planned_data()
        if data is not None and data.mounted is not None:
            data.mounted.regroup(members)

    def redeal(self, position: int, again: Sequence[int], begun: Sequence[int] = ()) -> None:
        """Have the next pass go on with the current epoch, or the chosen one, from a position on.

        `again` are samples that come again at its end; `begun`, numbers of the ranks that began it.
        """
        before = self._place.current
        self._end_pass()
        if not isinstance(before, PlannedPass):  # This rank has joined the others.
            before = PlannedPass(self.state_dict(), self.formula, self._place.mask)
        self._place = self._place.loaded(before.state_at(position, again))
        if self._dealt is not None and not is_exact(self.mode) and position < before.whole:
            self._torn = InterruptedEpoch(before.formula, tuple(begun))

    def prepare(self, generation: int | None = None) -> int:
        """Open the tiers; returns the number of passes so far, or what it is set to. Collective."""
        self._engines.planned.mount(self._options(), self.data)
        if generation is not None:
            self._engines.planned.generation = generation
        return self._engines.planned.generation

    @property
    def formula(self) -> FormulaOrder:
        """The order of the next pass, which is dlio's own."""
        return cast(FormulaOrder, self._order(self._options()))

    @property
    def mask(self) -> tuple[int, SampleMask] | None:
        """An epoch, and the samples that it uses; None for all."""
        return self._place.mask

    @property
    def planned(self) -> PlannedPass:
        """The pass that began last, in an order of dlio's own."""
        return cast(PlannedPass, self._place.current)
