"""Weighted mixtures of data sets: `dlio.mix`."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.data.concatenation import MixtureReader
from dlio.data.reader import Reader, open_reader
from dlio.errors import UsageError, redact
from dlio.loader.contract import State, Transform
from dlio.loader.dataset import Dataset, check_options
from dlio.plan.mixture import MixtureRule, Weights
from dlio.plan.mixture_end import EXHAUSTION
from dlio.storage.tier_spec import Tiers
from dlio.util.arguments import (
    PathText,
    check_flag,
    named,
    one_of,
    path_in,
    whole_number,
)
from dlio.util.kept_memory import counted_together
from dlio.util.units import counted

Source: TypeAlias = PathText | Dataset
"""A source of a mixture: a path of a data set, or a data set of `dlio.open`."""
_Weighted: TypeAlias = (
    Mapping[str, float]
    | Mapping[os.PathLike[str], float]
    | Mapping[Dataset, float]
    | Mapping[str, tuple[Source, float]]
    | Sequence[tuple[Source, float]]
)
_MOST_SOURCES: Final = 4096
_MOST_SAMPLES: Final = 2**40


class Mixture(Dataset):
    """The samples of several sources, one after another, and the weights of a loader's draws.

    Made by `dlio.mix`. `data[i]` and `len(data)` are those of all sources side by side; a
    `DataLoader` draws from the sources by weight instead, see `dlio.mix`.
    """

    reader: MixtureReader
    mixing: MixtureRule
    """The formula's facts; replaced by `set_weights`."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, in the order of their samples."""
        return self.mixing.names

    @property
    def weights(self) -> dict[str, float]:
        """Weights at the beginning of the run, by source; sum 1."""
        return self._named(self.mixing.schedule[0][1])

    @property
    def schedule(self) -> dict[int, dict[str, float]]:
        """Weights by the step of the run from which on they hold."""
        return {step: self._named(weights) for step, weights in self.mixing.schedule}

    def set_weights(self, weights: Mapping[str, float], step: int = 0) -> None:
        """Change the weights, for passes that begin later.

        Args:
            weights: by name of source; a source that is left out gets 0.
            step: of the run, counted over all epochs, from which on they hold; later changes are
                dropped. 0: they hold from the next pass on, instead of all others.

        The same on all ranks. A pass that is under way is planned already and stays as it is.

        Raises UsageError for unknown sources and invalid weights.
        """
        step = whole_number("step", step, 0)
        kept = [each for each in self.mixing.schedule if each[0] < step]
        changed = (*kept, (step, _exact(weights, self.sources)))
        self.mixing = replace(self.mixing, schedule=changed)

    def where(self, field: str, wanted: object) -> Dataset:
        raise UsageError("choose samples of the sources, then mix these: views have no weights")

    def split(
        self, by: str | Callable[[str], Any] | None = None, seed: int = 0, **parts: float
    ) -> dict[str, Dataset]:
        raise UsageError("split the sources, then mix their parts: views have no weights")

    def source_of(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the number of the source of each sample, such as of `loader.last_samples`."""
        return self.reader.sources_of(samples)

    def __repr__(self) -> str:
        shares = ", ".join(f"{name}: {weight:.3g}" for name, weight in self.weights.items())
        samples = counted(len(self), "sample")
        return f"dlio.Mixture({{{shares}}}, {samples}, {self.mixing.exhaustion!r})"

    def _named(self, weights: Weights) -> dict[str, float]:
        return {name: float(each) for name, each in zip(self.sources, weights, strict=True)}


def mix(
    sources: _Weighted,
    *,
    exhaustion: str = "stop",
    samples_per_epoch: int | None = None,
    schedule: Mapping[int, Mapping[str, float]] | None = None,
    labels: str = "merge",
    tiers: Tiers | None = None,
    image_size: int | Sequence[int] | Literal["auto"] | None = "auto",
    train: bool = True,
    crops: int = 1,
    transform: Transform | None = None,
    seed: int | None = None,
    on_error: str = "stop",
    follow_links: bool | None = None,
    trust: bool | None = None,
    **options: object,
) -> Mixture:
    """Mix data sets by weight; exported as `dlio.mix`.

    A `DataLoader` over the mixture gives every global batch of B samples each source's share of
    B, rounded down or up, such that the totals of a source never differ from its weight x samples
    consumed by 1 or more; samples are shuffled within the batch. Each source goes round in epochs
    of its own, with `shuffle=True` in an order of its own: all its samples come before one comes
    again, also across epochs of the mixture. All of it is a formula that each rank evaluates
    alone; a state continues at any step, on any number of ranks, with weights that have changed.

    Args:
        sources: `{path: weight}`, `{data set: weight}`, `{name: (path or data set, weight)}`, or
            a list of pairs (path or data set, weight). Weights are in proportion to each other.
            Data sets are opened ones of `dlio.open`; their readers are used, and their other
            options are given anew here. Samples of all sources need the same fields.
        exhaustion: end of an epoch. `stop`: before the first source repeats a sample; `until_all`:
            when each source with a weight was gone through, while others repeat; `repeat`: after
            `samples_per_epoch` samples, sources repeat as needed.
        samples_per_epoch: for `repeat`, which it implies.
        schedule: weights by name for later steps, `{10_000: {"a": 0.5, "b": 0.5}}`, where steps
            count over all epochs.
        labels: `merge` numbers classes anew by name if the sources' classes differ; `keep` leaves
            numbers as they are. `Mixture.source_of(loader.last_samples)` tells the sources.
        tiers: as for `dlio.open`, shared by all sources: the one whose bytes are used most often
            gets the fastest tier.
        image_size, train, crops, transform, seed, on_error, follow_links, trust: as for
            `dlio.open`.
        options: of the readers of paths, as for `dlio.open`.

    Raises UsageError for options that cannot work and samples that differ in their fields,
    SourceError when a path is not a data set.
    """
    given = _named_sources(sources)
    names = tuple(name for name, _, _ in given)
    exhaustion, samples = _policy(exhaustion, samples_per_epoch)
    weights = _exact({name: weight for name, _, weight in given}, names)
    changes = [(0, weights)]
    if schedule is not None and not isinstance(schedule, Mapping):
        raise UsageError(f"{named('schedule', schedule)}: give weights by step, {{1000: {{...}}}}")
    for step, later in sorted((schedule or {}).items()):
        changes.append((whole_number("step", step, 1), _exact(later, names)))
    one_of("labels", labels, ("merge", "keep"))
    check_flag("follow_links", follow_links, optional=True)
    check_flag("trust", trust, optional=True)
    size, crops, seed = check_options(tiers, image_size, train, crops, transform, seed, on_error)
    if not {"patch", "window"}.isdisjoint(options):
        raise UsageError("patches and windows are not mixed: dlio.open([a, b], patch=...) cuts all")
    # Readers that were opened here are closed if a later source fails; given data sets are not.
    with counted_together(), ExitStack() as undo:
        readers: list[Reader] = []
        for _, each, _ in given:
            if isinstance(each, Dataset):
                readers.append(each.reader)
            else:
                readers.append(open_reader(each, follow_links=follow_links, trust=trust, **options))
                undo.enter_context(closing(readers[-1]))
        sizes = tuple(map(len, readers))
        uses = [float(w) / size for w, size in zip(weights, sizes, strict=True)]
        joined = MixtureReader(readers, names, uses, labels)
        undo.pop_all()  # From here on, the data set closes them.
    mixture = Mixture(
        joined,
        tiers=tiers,
        image_size=size,
        train=train,
        crops=crops,
        transform=transform,
        seed=seed,
        on_error=on_error,
    )
    mixture.mixing = MixtureRule(names, sizes, exhaustion, samples, tuple(changes))
    return mixture


def restore_weights(data: Dataset | None, state: State) -> None:
    """Give a mixture the weights and the schedule of a loader's state. Raises UsageError."""
    if isinstance(data, Mixture) and "mixture" in state:
        data.mixing = data.mixing.scheduled(state["mixture"])


def _named_sources(sources: object) -> list[tuple[str, Source, float | Fraction]]:
    """Return (name, path or data set, weight) of each source. Raises UsageError."""
    pairs: list[tuple[object, object]]
    if isinstance(sources, Mapping):
        pairs = list(sources.items())
    elif isinstance(sources, list | tuple) and all(
        isinstance(each, list | tuple) and len(each) == 2 for each in sources
    ):
        pairs = [(each[0], each[1]) for each in sources]
    else:
        raise UsageError(
            f"{named('sources', sources)}: give paths or data sets with their weights, such as "
            "{'a': 0.7, 'b': 0.3}"
        )
    if not 1 <= len(pairs) <= _MOST_SOURCES:
        raise UsageError(f"a mixture of {len(pairs)} sources: give 1 to {_MOST_SOURCES}")
    result = [_source(key, value) for key, value in pairs]
    names = [name for name, _, _ in result]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"mixture: two sources are called {name!r}: name them, as in "
                "{'first': (data, 0.7), 'second': (other, 0.3)}"
            )
    return result


def _source(key: object, value: object) -> tuple[str, Source, float | Fraction]:
    source: object = key
    if isinstance(value, list | tuple) and len(value) == 2:
        source, value = value
    elif isinstance(key, Dataset):
        key = key.path
    if isinstance(source, Mixture):
        raise UsageError(f"{key}: a mixture cannot be a source of another: name its sources here")
    if not isinstance(source, Dataset):
        source = path_in("sources", source)
    if isinstance(source, Dataset) and source.has_patches:
        raise UsageError(
            f"{key}: patches and windows are not mixed: open all volumes as one data set, as in "
            "dlio.open([a, b], patch=...)"
        )
    if isinstance(source, Dataset) and not source.is_plain:
        raise UsageError(f"{key}: give transform= to mix, and map the mixture, not its sources")
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise UsageError(f"{named(f'weight of {key}', value)}: give a number, such as 0.7")
    return redact(str(key)), source, value


def _policy(exhaustion: str, samples: int | None) -> tuple[str, int | None]:
    one_of("exhaustion", exhaustion, EXHAUSTION)
    if samples is not None:
        if exhaustion == "until_all":
            raise UsageError("samples_per_epoch= is for exhaustion='repeat': leave one of them out")
        return "repeat", whole_number("samples_per_epoch", samples, 1, _MOST_SAMPLES)
    if exhaustion == "repeat":
        raise UsageError("exhaustion='repeat' has no end of its own: give samples_per_epoch=")
    return exhaustion, None


def _exact(weights: object, names: Sequence[str]) -> Weights:
    """Return weights as fractions of 1, in the order of the sources. Raises UsageError."""
    if not isinstance(weights, Mapping):
        raise UsageError(f"{named('weights', weights)}: give them by name, {{'a': 0.7, 'b': 0.3}}")
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise UsageError(
            f"weights: {unknown[0]!r} is not a source of this mixture: name {', '.join(names)}"
        )
    fractions = []
    for name in names:
        weight = weights.get(name, 0)
        number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise UsageError(f"{named(f'weight of {name}', weight)}: give a number of 0 or more")
        # 0.7 is meant as seven tenths, not as the nearest binary fraction.
        fractions.append(Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight))
    total = sum(fractions)
    if not total:
        raise UsageError("weights: all are 0: give at least one source a weight")
    return tuple(each / total for each in fractions)
