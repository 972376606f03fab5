"""Tables: rows of numbers and categories, of which one column is predicted."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.data.labels import label_name
from dlio.data.reader import Reader
from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.loader.sample import label_field
from dlio.train.model import make_model
from dlio.train.tasks.classification import Classes
from dlio.train.tasks.column_statistics import (
    MOST_VALUES,
    ColumnMoments,
    ValueCounts,
    column_names,
    table_statistics,
    value_text,
)
from dlio.train.tasks.regression import Numbers, standardised
from dlio.train.tasks.table_columns import (
    CategoryColumn,
    NumberColumn,
    TableColumns,
    TableEncoder,
    TableNetwork,
    TargetColumn,
    columns_in,
    is_missing,
)
from dlio.train.tasks.task_base import Convert, TrainingTask
from dlio.train.train_options import ModelOptions
from dlio.train.weights import read_weights
from dlio.util.arguments import listed, nearest
from dlio.util.units import counted

_MOST_CLASSES: Final = 100
"""Different whole numbers of a target that are classes by themselves."""
_Get = Callable[[Mapping[str, Any]], torch.Tensor]
"""Takes a column out of a batch; shape (n,)."""


class TableTask(TrainingTask):
    """Predict one column of a table from the others.

    A loader gives {column: (n,) tensor, or list of n texts}; the model maps float64 (n, columns),
    see `TableEncoder`, to logits (n, classes) or to (n, 1). A column of texts is a category, and a
    target of texts or of few whole numbers is a class. Source of the form of input: Gorishniy et
    al., arXiv 2106.11959.
    """

    name = "table"

    def __init__(self, options: ModelOptions, data: Dataset, comm: Communicator) -> None:
        """Read the training data once for the statistics of their columns. Collective."""
        self._options = options
        known = None if options.weights is None else columns_in(read_weights(options.weights))
        if known is not None and options.target in (None, known.target.name):
            _check_known(options, known)
            self.columns = known  # The weights are of use with these statistics only.
        else:
            self.columns, self.notes = find_columns(options, data.reader, comm)
        target = self.columns.target
        self._numbers = Numbers(target.std, target.mean)
        self.objective = self._numbers
        if target.classes:
            watch = "auc" if len(target.classes) == 2 else "accuracy"
            self.objective = Classes(len(target.classes), watch)

    def converter(self, data: Dataset) -> Convert:
        columns, reader = self.columns, data.reader
        rows = [_numbers(reader, each.name) for each in columns.numbers]
        rows += [_codes(reader, each.name, each.codes) for each in columns.categories]
        target = self._target(reader)
        kind = self.objective.kind

        def convert(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            if not isinstance(batch, Mapping):  # A rank without samples.
                empty = torch.empty(0, columns.width, dtype=torch.float64, device=device)
                return empty, torch.empty(0, dtype=kind, device=device)
            inputs = torch.stack([get(batch).double() for get in rows], 1)
            targets = target(batch).to(kind)
            return (
                inputs.to(device, non_blocking=True),
                targets.to(device, non_blocking=True),
            )

        return convert

    def _target(self, reader: Reader) -> _Get:
        target = self.columns.target
        if not target.classes:
            get = _numbers(reader, target.name)
            return lambda batch: standardised(get(batch), self._numbers, reader.path, target.name)
        codes = _codes(reader, target.name, target.codes, unknown=-1)

        def numbers(batch: Mapping[str, Any]) -> torch.Tensor:
            classes = codes(batch)
            if bool((classes < 0).any()):
                raise UsageError(
                    f"{reader.path}: a row lacks its {target.name!r}, or has a class that the "
                    "training data lack: drop such rows"
                )
            return classes

        return numbers

    def make_model(self) -> nn.Module:
        encoder = TableEncoder(self.columns)
        more, size = {"inputs": encoder.outputs}, self._options.image_size
        network = make_model(self._options.model, self.objective.outputs, size, more)
        return TableNetwork(encoder, network)

    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.columns
        rows = torch.randn(samples, columns.width, dtype=torch.float64, generator=generator)
        rows[:, len(columns.numbers) :] = 0
        return rows, torch.zeros(samples, dtype=self.objective.kind)


def find_columns(
    options: ModelOptions, reader: Reader, comm: Communicator
) -> tuple[TableColumns, tuple[str, ...]]:
    """Return the columns of a table with their statistics, and remarks on them. Collective.

    Raises UsageError for columns that the table lacks, and for targets that cannot be predicted.
    """
    names = column_names(reader)
    target = _target_name(options, reader, names)
    for name in options.category:
        if name not in names or name == target:
            raise _unknown(reader, f"--category {name}", names)
    texts = [name for name in names if _is_text(reader, name)]
    numbers = [name for name in names if _is_number(reader, name)]
    notes = [
        f"{name} is left out: a {reader.schema.kinds[names[name][0]].text} is not a number or text."
        for name in names
        if name not in texts and name not in numbers
    ]
    categories = [n for n in names if n in texts or n in options.category or _coded(reader, n)]
    wanted = sorted({*categories, *((target,) if target in numbers or target in texts else ())})
    if target not in texts and target not in numbers:
        raise UsageError(f"{reader.path}: --target {target} is neither a number nor text")
    moments, values = table_statistics(reader, numbers, wanted, comm)
    made = _make_target(options, reader, target, moments.get(target), values[target])
    features = [name for name in names if name != target]
    plain = [name for name in features if name in numbers and name not in categories]
    columns = TableColumns(
        tuple(
            NumberColumn(name, moments[name].mean, moments[name].std, moments[name].missing)
            for name in plain
            if moments[name].count
        ),
        tuple(
            CategoryColumn(name, _values(reader, name, values[name]), values[name].missing)
            for name in features
            if name in categories and not values[name].has_more and values[name].counts
        ),
        made,
    )
    kept = {each.name for each in columns.features}
    for name in [*plain, *(name for name in features if name in categories)]:
        if name in kept:
            continue
        many = name in values and values[name].has_more
        why = f"it has over {MOST_VALUES:,} different values" if many else "all values are missing"
        notes.append(f"{name} is left out: {why}.")
    for name in names:
        if _coded(reader, name):
            notes += _of_numbers(name, ValueCounts.of_texts(reader.classes))
        elif name in texts:
            notes += _of_numbers(name, values[name])
    if not columns.width:
        why = "".join(f" ({note})" for note in notes[:2])
        raise UsageError(f"{reader.path} has no column but {target} to learn from{why}")
    notes += _of_missing(columns, len(reader))
    return columns, tuple(notes)


def _check_known(options: ModelOptions, known: TableColumns) -> None:
    """Raise UsageError for options that differ from the columns that weights were trained with."""
    target = known.target
    kind = "classify" if target.classes else "regress"
    if options.task in ("classify", "regress") and options.task != kind:
        raise UsageError(
            f"--task {options.task}: the weights of {options.weights} are for --task {kind} of "
            f"{target.name}: leave --task or --weights out"
        )
    categories = {each.name for each in known.categories}
    for name in options.category:
        if name not in categories:
            raise UsageError(
                f"--category {name}: it is not a category in the weights of {options.weights}: "
                "leave --category or --weights out"
            )


def _of_numbers(name: str, values: ValueCounts) -> list[str]:
    """Return a remark on a column that is text although most of its values are numbers."""
    if not values.not_number or values.numbers < values.texts / 2:
        return []
    return [
        f"{name} is text, and not a column of numbers, because of values such as "
        f"{values.not_number[:40]!r}: change them, and separators of thousands, if it should be."
    ]


def _of_missing(columns: TableColumns, rows: int) -> list[str]:
    each = [(column.name, column.missing) for column in columns.features if column.missing]
    if not each:
        return []
    shown = ", ".join(f"{name} {count / rows:.1%}" for name, count in each[:8])
    more = f" and {counted(len(each) - 8, 'more column')}" if len(each) > 8 else ""
    return [
        f"Missing values: {shown}{more} of the rows; the network gets the mean, or the category "
        "for unknown values, and whether the value is missing."
    ]


def _target_name(options: ModelOptions, reader: Reader, names: Mapping[str, object]) -> str:
    if options.target is not None:
        if options.target not in names:
            raise _unknown(reader, f"--target {options.target}", names)
        return options.target
    label = label_name(names)
    if label is None:
        raise UsageError(
            f"{reader.path} is a table: give --target with the column to predict, one of "
            f"{listed(names)}"
        )
    return label


def _unknown(reader: Reader, option: str, names: Mapping[str, object]) -> UsageError:
    word = option.partition(" ")[2]
    return UsageError(
        f"{option}: {reader.path} has no such column to use; it has {listed(names)}"
        f"{nearest(word, names)}"
    )


def _make_target(
    options: ModelOptions,
    reader: Reader,
    name: str,
    moments: ColumnMoments | None,
    values: ValueCounts,
) -> TargetColumn:
    missing = values.missing if moments is None else max(values.missing, moments.missing)
    if missing:
        raise UsageError(
            f"{reader.path}: {name} is missing in {counted(missing, 'row')}: drop them"
        )
    task, is_text = options.task, moments is None or _coded(reader, name)
    counts = len(values.counts)
    if is_text:
        is_class = True
    elif _kind_of(reader, name) == "f":
        is_class = not values.has_more and set(values.counts) <= {"0", "1"}
    else:
        is_class = not values.has_more and counts <= _MOST_CLASSES
    if task == "classify":
        is_class = True
    elif task == "regress":
        if is_text:
            raise UsageError(f"--task regress: {name} of {reader.path} is text: predict a number")
        is_class = False
    if not is_class:
        assert moments is not None
        return TargetColumn(name, (), moments.mean, moments.std)
    classes = _values(reader, name, values)
    if values.has_more or len(classes) < 2:
        number = f"over {MOST_VALUES:,}" if values.has_more else str(len(classes))
        raise UsageError(
            f"{reader.path}: {name} has {number} different values: name another --target, or give "
            "--task regress for a number"
        )
    return TargetColumn(name, classes, 0.0, 1.0)


def _values(reader: Reader, name: str, values: ValueCounts) -> tuple[str, ...]:
    """Return the values of a column in the order of their numbers."""
    if _coded(reader, name):
        return tuple(reader.classes)
    if _is_text(reader, name):
        return tuple(sorted(values.counts))
    return tuple(sorted(values.counts, key=float))


def _source(reader: Reader, name: str) -> tuple[str, int | None]:
    names = column_names(reader)
    if name not in names:
        raise UsageError(
            f"{reader.path} lacks the column {name!r} of the training data; it has {listed(names)}"
        )
    return names[name]


def _is_text(reader: Reader, name: str) -> bool:
    return reader.schema.kinds[_source(reader, name)[0]].text == "text"


def _is_number(reader: Reader, name: str) -> bool:
    kind = reader.schema.kinds[_source(reader, name)[0]]
    real = kind.dtype is not None and kind.dtype.kind in "biuf"
    return real and (kind.scalar or (kind.fixed and len(kind.shape) == 1))


def _kind_of(reader: Reader, name: str) -> str:
    dtype = reader.schema.kinds[_source(reader, name)[0]].dtype
    return "" if dtype is None else dtype.kind


def _coded(reader: Reader, name: str) -> bool:
    """True for the reader's label, if it is a number of a named class."""
    return bool(reader.classes) and name == label_field(reader.schema)


def _numbers(reader: Reader, name: str) -> _Get:
    field, place = _source(reader, name)
    if not _is_number(reader, name):
        raise UsageError(f"{reader.path}: {name} is not a number, as it is in the training data")
    if place is None:
        return lambda batch: torch.as_tensor(batch[field])
    return lambda batch: batch[field][:, place]


def _codes(reader: Reader, name: str, codes: Mapping[str, int], unknown: int = 0) -> _Get:
    """Return a function that takes a column's numbers of categories out of a batch."""
    field, _ = _source(reader, name)
    if _is_text(reader, name):
        return lambda batch: torch.tensor(
            [unknown if is_missing(text) else codes.get(text, unknown) for text in batch[field]]
        )
    if _coded(reader, name):
        known = torch.tensor([codes.get(text, unknown) for text in reader.classes])
        return lambda batch: known[batch[field]]
    get = _numbers(reader, name)

    def of_numbers(batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.tensor([_code(value, codes, unknown) for value in get(batch).tolist()])

    return of_numbers


def _code(value: float | bool, codes: Mapping[str, int], unknown: int) -> int:
    # NaN and infinities are missing values.
    return codes.get(value_text(value), unknown) if abs(value) < float("inf") else unknown
