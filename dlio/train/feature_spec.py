"""Features of a training run that are separate from the trainer: their options and their rules.

A feature is a folder below `dlio/features/`, found by the entry-point group `dlio.features`. Its
entry point names a `FeatureSpec`: what is known of it before a run, without torch. While it is on,
its `FeatureHooks` take part in the run; see `dlio.train.feature_hooks`.

The trainer knows no feature by name. What two features must not do together stands in one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Final, cast

from dlio.errors import UsageError
from dlio.util.options import options_of
from dlio.util.plugins import plugins

GROUP: Final = "dlio.features"


class FeatureSpec:
    """Facts about a feature that are known before a run. Stateless: one object per process."""

    name: ClassVar[str]
    """Name of its entry point, and of its folder."""
    order: ClassVar[int]
    """Place among the features wherever several act at the same point; see `FeatureHooks`."""
    options: ClassVar[type]
    """Record of its options, in the style of `dlio.util.options`; the first one, if it differs from
    its default, turns the feature on."""
    hooks: ClassVar[str] = ""
    """`module:class` of its `FeatureHooks`, which is imported when the feature is on."""
    layout: ClassVar[str] = ""
    """`module:function` that returns the run's `RankLayout` when the feature is on, from its
    options, the `TrainConfig` and all ranks' communicator; empty to leave it to others."""
    evaluates: ClassVar[bool] = False
    """True if its options are those of `dlio eval`, too."""
    prefix: ClassVar[str] = ""
    """First part of the names of its tensors in saved states, and key of its `facts` there; empty
    for its name."""
    epoch_fields: ClassVar[Mapping[str, object]] = {}
    """Its fields in the report of an epoch, with their values while it is off."""

    fixed_options: ClassVar[tuple[str, ...]] = ()
    """Names of its options that cannot change when a run is resumed."""
    fit_model: ClassVar[str] = ""
    """`module:function` that gives a new model the shape of saved weights, which the feature may
    have changed. It is called with the model, which it changes in place, the path of the weights,
    and the `RunState` of their checkpoint; None for a file of --save. It raises DlioError for
    another model than that of the weights."""
    files: ClassVar[Mapping[str, str]] = {}
    """The files that it writes next to saved weights: their contents in a word, by the ending that
    follows the path of the weights."""

    def hooks_of(self, options: Any) -> str:
        """Return `hooks`, if they depend on the options."""
        return self.hooks

    def label(self, options: Any) -> str | None:
        """Return the words that turn the feature on, for messages; None while it is off."""
        switch = options_of(self.options)[0]
        value = getattr(options, switch.name)
        if value == switch.default:
            return None
        return f"{switch.flag} {value}" if isinstance(value, str) else switch.flag

    def check(self, options: Any, config: Any) -> None:
        """Raise UsageError for options that do not fit, or not with the rest of the `TrainConfig`.

        Called whether the feature is on or off.
        """

    def check_ranks(self, options: Any, ranks: int) -> None:
        """Raise UsageError for options that do not fit the number of ranks."""

    def check_saved(self, about: Mapping[str, Any], path: str, is_on: bool) -> None:
        """Raise UsageError if a saved state, by its `RunState`, cannot be continued with the
        feature on or off. The path is for the message."""

    def continues_exchange(self, options: Any, about: Mapping[str, object]) -> bool:
        """True if the exchange's part of a saved state is of tensors that this run's exchange has.

        Called whether the feature is on or off.
        """
        return True

    def begin_process(self, options: Any) -> None:
        """Prepare the process before the model is made, if the feature is on."""

    def was_cut(self, epoch: Any) -> bool:
        """True if the feature removed parts of the model in an epoch."""
        return False

    def sentences(self, epochs: Sequence[Any]) -> list[str]:
        """Summarise the feature's part of a run's `EpochReport`s in words."""
        return []

    def progress(self, epoch: Any) -> str:
        """Return the feature's part of the line of a finished epoch, beginning with a comma."""
        return ""

    def figures(self, epoch: Any) -> Mapping[str, float]:
        """Return figures of an epoch that curves are drawn of, by names such as `epoch/loss`."""
        return {}


@cache
def find_features() -> tuple[FeatureSpec, ...]:
    """Return the features that are installed, in their order.

    A feature whose folder was removed is left out: the rest of the trainer works without it.
    """
    specs: list[FeatureSpec] = []
    for entry in plugins(GROUP):
        try:
            present = find_spec(entry.module) is not None
        except ModuleNotFoundError:
            present = False
        if present:
            specs.append(entry.load()())
    return tuple(sorted(specs, key=lambda feature: (feature.order, feature.name)))


def load_place(place: str) -> Callable[..., Any]:
    """Import the function or class at `module:name`."""
    module, _, name = place.partition(":")
    return cast(Callable[..., Any], getattr(import_module(module), name))


def option_records() -> tuple[type, ...]:
    """Return the records of all features' options, in the features' order."""
    return tuple(feature.options for feature in find_features())


def evaluation_records() -> tuple[type, ...]:
    """Return the records of the options that `dlio eval` has, too, in the features' order."""
    return tuple(feature.options for feature in find_features() if feature.evaluates)


def fixed_options() -> tuple[str, ...]:
    """Return the names of features' options that cannot change when a run is resumed."""
    return tuple(name for feature in find_features() for name in feature.fixed_options)


def refuse(chosen: Mapping[str, bool], message: str) -> None:
    """Raise UsageError with `message` for the first option that is chosen, which `{option}` in it
    stands for."""
    for option, is_chosen in chosen.items():
        if is_chosen:
            raise UsageError(message.replace("{option}", option))
