"""The parameters of a trial, by Optuna's samplers.

Each choice is made by a new sampler with a seed of its own, in a study that holds only those trials
that the choice may know. So it depends on the seed, the trial's number and their results alone.
"""

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from dlio.errors import UsageError
from dlio.features.search.search_space import grid_of
from dlio.util.extras import how_to_install

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from dlio.features.search.search_space import SearchSpace

Direction = Literal["minimize", "maximize"]

_RANDOM_FIRST: Final = {"tpe": 10, "cmaes": 1}
"""Trials that have to be known before results are used: earlier choices are random."""


def quiet_optuna() -> None:
    """Import Optuna, and have it print warnings alone. Raises UsageError if it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import optuna
    except ImportError as error:
        raise UsageError(
            f"dlio search needs Optuna ({error}); install it: {how_to_install('search')}"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class ParameterSampler:
    """Chooses the parameters of trials by their numbers; trial k knows those up to k - lag.

    `name` is tpe, cmaes, random or grid. Raises UsageError if it cannot search the parameters.
    """

    def __init__(
        self,
        name: str,
        axes: "SearchSpace",
        seed: int,
        lag: int,
        directions: Sequence[Direction],
    ) -> None:
        from optuna.distributions import CategoricalDistribution

        self._name, self._axes, self._seed, self._lag = name, dict(axes), seed, lag
        self._directions = list(directions)
        self._grid = grid_of(axes) if name == "grid" else None
        if name == "cmaes":
            if sum(not isinstance(axis, CategoricalDistribution) for axis in axes.values()) < 2:
                raise UsageError(
                    "--sampler cmaes: give two ranges or more, as in --set lr=1e-4..1e-1:log; "
                    "tpe searches lists, too"
                )
            if len(directions) > 1:
                raise UsageError("--sampler cmaes: give one --objective; tpe takes several")
            try:
                import cmaes  # noqa: F401
            except ImportError as error:
                raise UsageError(
                    f"--sampler cmaes: {error}; install it: {how_to_install('search')}"
                ) from error

    @property
    def most(self) -> int | None:
        """Number of trials after which there is nothing left to try; None for no end."""
        return None if self._grid is None else len(self._grid)

    def known(self, number: int) -> int:
        """Return how many trials, from the first one, have to end before a choice."""
        count = max(0, number - self._lag + 1)
        return count if count >= _RANDOM_FIRST.get(self._name, number + 1) else 0

    def choose(self, number: int, known: "Sequence[FrozenTrial]") -> "FrozenTrial":
        """Return a trial that begins, chosen by the first `known(number)` ones.

        It has notes of the sampler to itself, which a later choice reads.
        """
        import optuna

        if self._grid is not None:
            return optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=self._grid[number],
                distributions=self._axes,
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(directions=self._directions, sampler=self._sampler(number))
            study.add_trials(known)
            study.ask(self._axes)
        return study.trials[-1]

    def _sampler(self, number: int) -> "BaseSampler":
        import optuna

        digest = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        if self._name == "tpe":
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=_RANDOM_FIRST["tpe"], multivariate=True
            )
        if self._name == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        return optuna.samplers.RandomSampler(seed=seed)
