"""Options as fields of frozen records, each defined once with its type, default, help and unit.

    @dataclass(frozen=True, slots=True)
    class Shape(CheckedOptions):
        width: Annotated[int, Option("Width of the image.", unit="pixels", least=1)] = 64

The command line, configuration files, the options passed to ranks and the reference in the
documentation are all derived from such records. A field whose type is such a record brings that
record's options along; other fields without an `Option` are ignored.
"""

import dataclasses
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args, get_origin

from dlio.errors import UsageError
from dlio.util.arguments import nearest

Scalar = str | int | float | bool
Value = Scalar | None | tuple[object, ...]
"""Values that a field may have."""
_Record = TypeVar("_Record")
_KINDS: Final[dict[type, str]] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
}


RECORDS: Final = "records"
"""Key in the metadata of a field that is a tuple of records: a function that returns their types,
such as those of plug-ins."""
_KNOWN: Final[dict[type, tuple["OptionField", ...]]] = {}
"""Cache of `options_of`."""
_INNER: Final[dict[type, dict[str, tuple[type, ...]]]] = {}
"""Cache of `inner_records`."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command; annotates a field of a record."""

    help: str
    """Description for users, one sentence."""
    _: KW_ONLY
    unit: str | None = None
    least: float | None = None
    """Smallest allowed value."""
    above: float | None = None
    """Values must be greater than this one."""
    most: float | None = None
    """Largest allowed value."""
    below: float | None = None
    """Values must be less than this one."""
    choices: tuple[str, ...] = ()
    """Allowed values; for a field of a `Literal` type, those of the type."""
    name: str | None = None
    """Name on the command line without its hyphens; None for the field's name."""
    short: str | None = None
    """Short name, such as `-n`."""
    metavar: str | None = None
    """Placeholder of the value in the help."""
    positional: bool = False
    """True if the value is given by its position on the command line, without a name."""
    rest: bool = False
    """True if the field takes all arguments after the last positional one, including options."""
    after_dashes: bool = False
    """True if a field with `rest` takes those after `--` only, wherever options stand before."""
    needs: str | None = None
    """Field that must be set for this option to be allowed."""
    parse: Callable[[str], Value] | None = None
    """Converts text to the value, for types that have no standard conversion."""
    show: Callable[[Any], str] | None = None
    """Converts a value back to text that `parse` accepts."""
    default_text: str | None = None
    """Description of the default, if its value does not describe it."""
    hidden: bool = False
    """True to leave the option out of help and reference."""


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option of a record: the field's name and type, and its `Option`."""

    record: type
    name: str
    """Name of the field."""
    option: Option
    type: type[str] | type[int] | type[float] | type[bool]
    """Type of the value, or of each value of a repeatable option."""
    many: bool
    """True for a repeatable option: the field is a tuple."""
    optional: bool
    """True if None is allowed."""
    choices: tuple[str, ...]
    default: Value
    required: bool

    @property
    def key(self) -> str:
        """Name in a configuration file."""
        return (self.option.name or self.name).replace("-", "_")

    @property
    def flag(self) -> str:
        """Name in messages: `--batch-size`, or the placeholder of a positional argument."""
        if self.option.positional:
            return self.option.metavar or self.name.upper()
        return "--" + self.key.replace("_", "-")

    @property
    def remedy(self) -> str:
        """End of an error message about an invalid value, which names valid ones."""
        if self.choices:
            return f"choose one of {', '.join(self.choices)}"
        unit = f" (unit: {self.option.unit})" if self.option.unit else ""
        return f"give {_KINDS[self.type]}{unit}"

    @property
    def meaning(self) -> str:
        """End of an error message about a missing value: a text's placeholder and the first
        sentence of its help, or the kind of any other value."""
        if self.choices or self.type is not str:
            return self.remedy
        first = re.split(r"(?<=\w[\w)])[.:;] ", self.option.help)[0].removesuffix(".")
        lower = first[0].lower() if first[1:2].islower() or first[1:2] == " " else first[0]
        if self.option.positional:
            return f"{lower}{first[1:]}"
        return f"give {self.option.metavar or 'TEXT'} ({lower}{first[1:]})"

    def show(self, value: Value) -> object:
        """Convert a value to its form in a configuration file."""
        if value is not None and self.option.show is not None:
            return self.option.show(value)
        return list(value) if isinstance(value, tuple) else value

    def convert(self, value: object, where: str) -> Value:
        """Convert a text, or a scalar or list of scalars from YAML or JSON, to the field's type.

        Raises UsageError, which begins with `where`, such as `--epochs` or `run.yaml: epochs`, if
        the value does not have this type.
        """
        if value is None:
            if isinstance(self.default, tuple):
                return self.default  # In YAML, a key without items is None.
            if not self.optional:
                raise UsageError(f"{where}: {self.remedy}")
            return None
        if self.option.parse is not None and isinstance(value, str):
            return self.option.parse(value)
        if self.many:
            items = value if isinstance(value, list | tuple) else [value]
            return tuple(self._scalar(each, where) for each in items)
        return self._scalar(value, where)

    def _scalar(self, value: object, where: str) -> Scalar:
        scalar: Scalar | None = None
        if value is False and "off" in self.choices:
            scalar = "off"  # YAML 1.1 reads the word as a boolean.
        elif isinstance(value, bool) or self.type is bool:
            scalar = value if isinstance(value, bool) and self.type is bool else None
        elif self.type is str:
            scalar = value if isinstance(value, str) else None
        elif isinstance(value, str | int | float):
            scalar = _number(value, self.type)
        if scalar is None:
            raise UsageError(f"{where} {value}: {self.remedy}")
        return scalar

    def normal(self, value: object) -> Value:
        """Return a value that Python code has given as a command line would give it.

        Paths become text, lists tuples, and texts of options of another type are parsed.
        """
        plain = _as_text(value)
        if isinstance(plain, str) and self.many:
            return (plain,)
        typed = self.type is not str or isinstance(self.default, tuple)
        if isinstance(plain, str) and self.option.parse is not None and typed:
            return self.option.parse(plain)
        return plain

    def check(self, value: Value) -> None:
        """Raise UsageError if the value is outside the option's range or choices."""
        option = self.option
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not self._fits(each):
                raise UsageError(f"{self.flag} {each}: {self.remedy}")
            if self.choices and each is not None and each not in self.choices:
                close = nearest(str(each), self.choices)
                raise UsageError(f"{self.flag} {each}: {self.remedy}{close}")
            if not isinstance(each, int | float) or isinstance(each, bool):
                continue
            low = -math.inf if option.least is None else option.least
            high = math.inf if option.most is None else option.most
            inside = low <= each <= high
            inside &= option.above is None or each > option.above
            inside &= option.below is None or each < option.below
            if not inside:
                raise UsageError(f"{self.flag} {each}: give {self._range()}")
            if math.isinf(each):
                raise UsageError(f"{self.flag} {each}: give a finite number")

    def _fits(self, value: object) -> bool:
        """True if a value, which Python code may have given, has the type of this field."""
        if self.option.parse is not None:
            return True
        if self.type in (str, bool):
            return isinstance(value, self.type)
        kind = numbers.Integral if self.type is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)

    def _range(self) -> str:
        option = self.option
        limits = []
        if option.above is not None:
            limits.append(f"above {_limit(option.above)}")
        if option.least is not None:
            alone = option.most is None and option.below is None
            limits.append(f"{'at least' if alone else 'from'} {_limit(option.least)}")
        if option.most is not None:
            to = "to" if option.least is not None else "up to"
            limits.append(
                f"{to} {_limit(option.most)}" if limits else f"at most {_limit(option.most)}"
            )
        if option.below is not None:
            limits.append(f"below {_limit(option.below)}")
        unit = f" {option.unit}" if option.unit and limits != ["at least 1"] else ""
        first = "" if limits[0].startswith("at ") else ("a number" if not unit else unit[1:]) + " "
        joint = " " if option.above is None and option.below is None else " and "
        return first + joint.join(limits) + (unit if not first else "")


def _limit(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _number(value: str | float, kind: type) -> int | float | None:
    try:
        if kind is float:
            return float(value)
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if isinstance(value, str) or number == value else None


def options_of(record: type) -> tuple[OptionField, ...]:
    """Return the options among a record's fields, in order."""
    fields: tuple[OptionField, ...] | None = _KNOWN.get(record)
    if fields is None:
        fields = _KNOWN[record] = tuple(_fields_of(record))
    return fields


def _fields_of(record: type) -> Iterator[OptionField]:
    hints = typing.get_type_hints(record, include_extras=True)
    inner = inner_records(record)
    for each in dataclasses.fields(record):
        for part in inner.get(each.name, ()):
            yield from options_of(part)
        hint = hints[each.name]
        annotations = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        option = next((a for a in annotations if isinstance(a, Option)), None)
        if option is None:
            continue
        kind, many, optional, choices = _plain(get_args(hint)[0], option)
        required = each.default is dataclasses.MISSING
        default: Any = None if required else each.default
        yield OptionField(
            record, each.name, option, kind, many, optional, choices, default, required
        )


def _plain(hint: Any, option: Option) -> tuple[Any, bool, bool, tuple[str, ...]]:
    """Analyse an annotation without its `Option`: return (type, many, optional, choices)."""
    optional = many = False
    if get_origin(hint) in (types.UnionType, typing.Union):
        inner = [each for each in get_args(hint) if each is not type(None)]
        optional, hint = len(inner) < len(get_args(hint)), inner[0]
    if get_origin(hint) is tuple:
        many = option.parse is None
        hint = get_args(hint)[0] if many else str
    if get_origin(hint) is Literal:
        return str, many, optional, get_args(hint)
    return hint, many, optional, option.choices


class CheckedOptions:
    """Base of records of options, which are checked when they are made; see `check`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


def check(record: object) -> None:
    """Check the values of a record that has just been made; a pathlib.Path becomes text.

    Raises UsageError if a value is outside its option's range or choices, or not of its type, or if
    an option is set without the one that it needs.
    """
    for field in options_of(type(record)):
        if field.record is not type(record):
            continue  # A record within this one has checked itself.
        value = field.normal(getattr(record, field.name))
        if value is not getattr(record, field.name):
            # Options are frozen for their users; their own __post_init__ calls this function.
            object.__setattr__(record, field.name, value)
        field.check(value)
        needs = field.option.needs
        is_set = value and value != field.default
        if needs is not None and is_set and not getattr(record, needs):
            other = next(each for each in options_of(type(record)) if each.name == needs)
            raise UsageError(f"{field.flag} needs {other.flag}, too")


def _as_text(value: object) -> Value:
    """Return paths as text, lists as tuples, and any other value as it is."""
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, list):
        return tuple(map(_as_text, value))
    if isinstance(value, tuple) and any(isinstance(each, os.PathLike) for each in value):
        return tuple(map(_as_text, value))
    return cast(Value, value)


def inner_records(record: type) -> dict[str, tuple[type, ...]]:
    """Return the records of options within a record, by the name of the field that holds them.

    A field of several records is a tuple; its metadata has their types as `RECORDS`.
    """
    inner = _INNER.get(record)
    if inner is not None:
        return inner
    hints, inner = typing.get_type_hints(record), {}
    for each in dataclasses.fields(record):
        if RECORDS in each.metadata:
            inner[each.name] = tuple(each.metadata[RECORDS]())
        elif dataclasses.is_dataclass(hints[each.name]):
            inner[each.name] = (hints[each.name],)
    _INNER[record] = inner
    return inner


def as_mapping(record: object) -> dict[str, Value]:
    """Return a record's options by field name, for `from_mapping`."""
    values: dict[str, Value] = {}
    inner = inner_records(type(record))
    for each in dataclasses.fields(cast("Any", record)):
        value = getattr(record, each.name)
        if each.name in inner:
            for part in value if RECORDS in each.metadata else (value,):
                values |= as_mapping(part)
        else:
            values[each.name] = value
    return {field.name: values[field.name] for field in options_of(type(record))}


def from_mapping(record: type[_Record], values: Mapping[str, object]) -> _Record:
    """Create a record, and those within it, from values by field name.

    Fields without a value have their defaults. The values may be the result of `as_mapping`, also
    if it has been converted to JSON.
    """
    arguments: dict[str, Any] = {
        each.name: _frozen(value) if isinstance(value := values[each.name], list) else value
        for each in dataclasses.fields(cast("Any", record))
        if each.name in values
    }
    fields = {each.name: each for each in dataclasses.fields(cast("Any", record))}
    for name, parts in inner_records(record).items():
        made: tuple[object, ...] = tuple(from_mapping(part, values) for part in parts)
        arguments[name] = made if RECORDS in fields[name].metadata else made[0]
    return record(**arguments)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
