"""The parameters that are searched, and the configuration of a trial."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from dlio.errors import UsageError
from dlio.train.config import TrainConfig
from dlio.train.factory import split_options
from dlio.train.train_options import TrainOptions
from dlio.util.arguments import nearest
from dlio.util.options import OptionField, Scalar, Value, as_mapping, from_mapping, options_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    SearchSpace = Mapping[str, BaseDistribution]
    """Lists of values and ranges of numbers, by the names that users write, such as
    `model.depth`."""

Point = Mapping[str, Scalar]
"""Values of the parameters by name, such as {"lr": 0.01, "model.depth": 3}."""
_RANGE: Final = re.compile(r"([^.].*?|\.\d.*?)\.\.(.+?)(:log)?")
_COMMA: Final = re.compile(r",(?![^(]*\))")
"""A comma outside parentheses."""
_PLACE: Final = re.compile(r"\{([\w.-]+)\}")
_OF_MODEL: Final = "model."
REFUSED: Final = {
    "checkpoint": "trials write checkpoints into --study",
    "resume": "the same command goes on with --study",
    "save": "the weights of the best trial are kept in --study",
    "report": "--json prints the results",
    "trace": "trials would write to one file",
    "trace_out": "trials would write to one file",
    "replay": "trials differ",
    "tensorboard": "trials would write to one folder; --html plots their courses",
    "dump_matrices": "trials would write to one folder",
    "nodes": "trials run on this machine",
    "spares": "trials that lose a rank go on from their checkpoints",
    "leave_at": "send the search SIGUSR1 at that time",
}
"""Options of `dlio train` that a search refuses, with the reason."""
_SAME: Final = (
    *(
        "source",
        "val",
        "split",
        "val_split",
        "replica",
        "tiers",
        "keep",
        "fault_tolerance",
        "device",
        "callback",
    ),
    *REFUSED,
)
"""Options that a search cannot vary."""


def parse_space(texts: Sequence[str], run: TrainOptions) -> "SearchSpace":
    """Parse the texts of --set for `dlio train`.

    Raises UsageError for an unknown option or a value that it, or the model, does not take.
    """
    from dlio.train.model import check_model

    fields = {each.flag[2:]: each for each in options_of(TrainOptions) if each.name not in _SAME}
    axes = _parsed_space(texts, fields)
    for name, axis in axes.items():
        for value in _ends(axis):
            try:
                config = with_point(run, {name: value})
                if name.startswith("model"):
                    check_model(config.model.model, config.model.image_size)
            except UsageError as error:
                raise UsageError(f"--set {name}={value}: {error}") from error
    return axes


def parse_words(texts: Sequence[str], words: Sequence[str]) -> "SearchSpace":
    """Parse the texts of --set for a script, whose arguments `words` use each name in braces.

    Raises UsageError for a name without a place, and a place without a name.
    """
    axes = _parsed_space(texts, None)
    places = [name for word in words for name in _PLACE.findall(word)]
    for name in axes:
        if name not in places:
            raise UsageError(
                f"--set {name}: the script's arguments do not use it: write {{{name}}} among them"
            )
    for place in places:
        if place not in axes:
            raise UsageError(
                f"{{{place}}}: no --set names it{nearest(place, axes)}; give --set {place}=..."
            )
    return axes


def filled_in(words: Sequence[str], point: Point) -> list[str]:
    """Return a script's arguments with values in place of names in braces."""
    return [_PLACE.sub(lambda match: str(point[match[1]]), word) for word in words]


def with_point(run: TrainOptions, point: Point) -> TrainConfig:
    """Return the configuration of a trial. Raises UsageError for values that do not fit."""
    keys = {each.flag[2:]: each.name for each in options_of(TrainOptions)}
    values: dict[str, object] = {**as_mapping(run)}
    values |= {keys[name]: value for name, value in point.items() if name in keys}
    of_model = {
        name.removeprefix(_OF_MODEL): value for name, value in point.items() if name not in keys
    }
    config = from_mapping(TrainConfig, values)
    if not of_model:
        return config
    model, options = split_options("--model", config.model.model)
    inside = ",".join(f"{name}={value!r}" for name, value in {**options, **of_model}.items())
    return config.replaced(model=f"{model}({inside})")


def train_words(point: Point, run: TrainOptions) -> list[str]:
    """Return the arguments of `dlio train` that a point stands for."""
    config = with_point(run, point)
    plain = {name: value for name, value in point.items() if not name.startswith(_OF_MODEL)}
    if len(plain) < len(point):
        plain["model"] = config.model.model
    return [word for name, value in plain.items() for word in argument_words(name, value)]


def grid_of(axes: "SearchSpace") -> list[dict[str, Scalar]]:
    """Return all combinations of values, the last parameter fastest.

    Raises UsageError for a range of real numbers.
    """
    from optuna.distributions import FloatDistribution, IntDistribution

    values: list[Sequence[Scalar]] = []
    for name, axis in axes.items():
        if isinstance(axis, FloatDistribution):
            raise UsageError(
                f"--sampler grid: {name} is a range: list its values, as in "
                f"--set {name}={axis.low:g},{axis.high:g}"
            )
        if isinstance(axis, IntDistribution):
            values.append(range(axis.low, axis.high + 1))
        else:
            values.append(_ends(axis))
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*values)]


def argument_words(name: str, value: Value) -> list[str]:
    """Return the arguments that give an option of `dlio train` a value."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, tuple) else (value,)
    return [word for each in values for word in (f"--{name}", str(each))]


def _ends(axis: "BaseDistribution") -> Sequence[Scalar]:
    """Return all values of a list, or both ends of a range."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, CategoricalDistribution):
        return cast("Sequence[Scalar]", axis.choices)
    assert isinstance(axis, FloatDistribution | IntDistribution)
    return axis.low, axis.high


def _parsed_space(texts: Sequence[str], fields: Mapping[str, OptionField] | None) -> "SearchSpace":
    """Parse the texts of --set; None for the fields of a script, which has any names."""
    axes: dict[str, BaseDistribution] = {}
    for text in texts:
        name, axis = _parsed(text, fields)
        if name in axes:
            raise UsageError(f"--set {name}: given twice: list all of its values in one")
        axes[name] = axis
    return axes


def _parsed(text: str, fields: Mapping[str, OptionField] | None) -> "tuple[str, BaseDistribution]":
    """Return the name and the values of `name=values`."""
    from optuna.distributions import CategoricalDistribution

    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--")
    if not equals or not name or not values:
        raise UsageError(f"--set {text}: write NAME=VALUES, as in lr=1e-4..1e-1:log or lr=0.01,0.1")
    field = None
    if fields is not None and not name.startswith(_OF_MODEL):
        name = name.replace("_", "-")
        field = fields.get(name)
        if field is None or field.many:
            close = nearest(name, fields)
            raise UsageError(f"--set {name}: no option of `dlio train` that can be searched{close}")
    match = _RANGE.fullmatch(values.strip())
    if match is not None:
        return name, _range(text, match, field)
    texts = [each.strip() for each in _COMMA.split(values)]
    choices = tuple(_value(each, field, name) for each in texts)
    if len(set(choices)) != len(choices):
        raise UsageError(f"--set {text}: names a value twice")
    return name, CategoricalDistribution(choices)


def _range(text: str, match: re.Match[str], field: OptionField | None) -> "BaseDistribution":
    from optuna.distributions import FloatDistribution, IntDistribution

    ends = match[1].strip(), match[2].strip()
    try:
        low, high = (float(each) for each in ends)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(text)
    except ValueError:
        scale = ends[1].partition(":")[2]
        raise UsageError(
            f"--set {text}: give numbers at both ends, as in 1e-4..1e-1 or 1e-4..1e-1:log"
            f"{nearest(scale, ('log',)) if scale else ''}"
        ) from None
    if field is not None and field.type not in (int, float):
        raise UsageError(f"--set {text}: {field.flag} is not a number: list its values")
    written = all(re.fullmatch(r"[+-]?\d+", each) for each in ends)
    is_integer = written if field is None else field.type is int
    is_log = match[3] is not None
    if not low < high or (is_log and low <= 0):
        limits = "above 0, the lower one first" if is_log else "the lower one first"
        raise UsageError(f"--set {text}: give numbers {limits}")
    if not is_integer:
        return FloatDistribution(low, high, log=is_log)
    if not (low.is_integer() and high.is_integer()):
        raise UsageError(f"--set {text}: give whole numbers at both ends")
    return IntDistribution(int(low), int(high), log=is_log)


def _value(text: str, field: OptionField | None, name: str) -> Scalar:
    if field is None:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text
    given: object = text
    if field.type is bool:
        if text not in ("yes", "no", "true", "false"):
            raise UsageError(f"--set {name}={text}: give yes or no")
        given = text in ("yes", "true")
    value = field.convert(given, f"--set {name}:")
    field.check(value)
    assert isinstance(value, Scalar)
    return value
