"""Arrays, such as volumes: a class or a number for each sample, or a class for each element."""

import inspect
import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.data.reader import Reader, open_split
from dlio.data.schema import Schema
from dlio.errors import SourceError, UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.plan.order import share
from dlio.train.array_fields import ArrayFields, array_fields
from dlio.train.model import MODELS, find_model, make_model
from dlio.train.tasks.classification import Classes
from dlio.train.tasks.regression import Numbers, standardised
from dlio.train.tasks.segmentation import IGNORED, Segments
from dlio.train.tasks.task_base import Convert, TaskObjective, TrainingTask
from dlio.train.train_options import DataOptions, ModelOptions
from dlio.util.units import counted

_PIECE: Final = 64
_PICTURE: Final = (3, 2)
"""Channels and spatial dimensions of pictures."""
_MOST_CLASSES: Final = 100_000


class ArrayTask(TrainingTask):
    """Samples {input: (channels, ...) or (...), target: number or (...)}.

    A loader gives them with a dimension of samples in front; the model maps float32 (n, channels,
    ...) to the outputs of the objective. Values enter as they are: store them with a mean near 0
    and a standard deviation near 1.
    """

    def __init__(
        self, options: ModelOptions, fields: ArrayFields, objective: TaskObjective
    ) -> None:
        assert options.task is not None
        self.name, self.is_dense, self.objective = options.task, fields.is_map, objective
        self._options, self._fields = options, fields

    def converter(self, data: Dataset) -> Convert:
        fields = self._fields
        _check(data, fields)

        def convert(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            assert isinstance(batch, Mapping)
            inputs = torch.as_tensor(batch[fields.input])
            inputs = inputs.to(device, torch.float32, non_blocking=True)
            targets = torch.as_tensor(batch[fields.target])
            if not fields.is_map:
                targets = targets.reshape(-1)
            targets = self._targets(targets, data.path).to(device, non_blocking=True)
            return inputs if fields.has_channels else inputs.unsqueeze(1), targets

        return convert

    def _targets(self, targets: torch.Tensor, path: str) -> torch.Tensor:
        """Return the network's targets of the stored ones; shape (n, ...).

        Raises UsageError for a class that the training data lack.
        """
        if isinstance(self.objective, Numbers):
            return standardised(targets, self.objective, path, self._fields.target).float()
        targets, classes = targets.to(torch.int64), self.objective.outputs
        wrong = (targets < 0) | (targets >= classes)
        if self.is_dense:
            wrong &= targets != IGNORED
        if bool(wrong.any()):
            raise UsageError(
                f"{path}: {self._fields.target} has class {int(targets[wrong][0])}, and the "
                f"training data have 0 to {classes - 1}: repair it"
            )
        return targets

    def make_model(self) -> nn.Module:
        text, fields = self._options.model, self._fields
        shape = fields.channels, len(fields.sides)
        takes = inspect.signature(find_model(text)).parameters
        if shape != _PICTURE and "channels" not in takes and text.partition("(")[0] in MODELS:
            raise UsageError(
                f"--model {text} takes pictures of 3 channels, and {self._fields.path} has "
                f"arrays of {counted(shape[0], 'channel')} and {counted(shape[1], 'dimension')}: "
                "choose convnet, unet or module:factory"
            )
        more = {"channels": shape[0], "dimensions": shape[1]}
        return make_model(text, self.objective.outputs, self._options.image_size, more)

    def example(
        self, samples: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sides = self._fields.sides
        inputs = torch.randn(samples, self._fields.channels, *sides, generator=generator)
        shape = (samples, *sides) if self.is_dense else (samples,)
        return inputs, torch.zeros(shape, dtype=self.objective.kind)


def usual_task(fields: ArrayFields) -> str:
    """Return the task that a target calls for, by its name as a value of --task."""
    return "segment" if fields.is_map else "regress" if fields.is_real else "classify"


def make_array_task(
    options: ModelOptions, given: DataOptions, data: Dataset, whole: Schema, comm: Communicator
) -> ArrayTask:
    """Make the task of a settled configuration on a data set of arrays. Collective.

    Reads all targets once, each rank a part of them: for the number of classes, or for the mean and
    standard deviation. `whole` is the schema of whole samples, of which a rank may read a part.

    Raises UsageError for a target that does not suit the task.
    """
    source = given.source
    fields = array_fields(source, whole, options.target)
    if options.task == "classify" and fields.is_real:
        raise UsageError(
            f"--task classify needs whole numbers, and {fields.target} of {source} is "
            f"{whole.kinds[fields.target].text}: give --task regress, or name another --target"
        )
    if fields.is_map != (options.task == "segment"):
        needs = "a class for each element" if options.task == "segment" else "a number"
        raise UsageError(
            f"--task {options.task} needs {needs}, and {fields.target} of {source} is "
            f"{whole.kinds[fields.target].text}: name another --target"
        )
    with closing(_target_reader(fields, given)) as reader:
        if options.task == "regress":
            values = _values(reader, fields.target, comm)
            with np.errstate(over="ignore", invalid="ignore"):
                mean, std = float(values.mean()), float(values.std())
            if not (math.isfinite(mean) and math.isfinite(std)):
                raise UsageError(
                    f"{source}: numbers of {fields.target} are too large for a standard deviation: "
                    "scale them, or repair those that are wrong"
                )
            return ArrayTask(options, fields, Numbers(std or 1.0, mean))
        ignored = IGNORED if fields.is_map else None
        classes = _count_classes(reader, fields.target, ignored, comm)
    made = Segments if fields.is_map else Classes
    return ArrayTask(options, fields, made(max(classes, len(data.classes))))


def _target_reader(fields: ArrayFields, given: DataOptions) -> Reader:
    """Open the training data with the target alone, if their format can; else whole samples."""
    place = fields.path.partition("::")[0]
    try:
        return open_split(f"{place}::{fields.target}", given.split, given.reader_option)
    except (UsageError, SourceError):
        return open_split(fields.path, given.split, given.reader_option)


def _mine(reader: Reader, name: str, comm: Communicator) -> Any:
    """Yield (first sample, values) of pieces of this rank's part of the samples."""
    mine = share(len(reader), comm.size, comm.rank)
    for first in range(mine.start, mine.stop, _PIECE):
        samples = np.arange(first, min(first + _PIECE, mine.stop), dtype=np.int64)
        values = [reader.schema.split(each)[name] for each in reader.read(samples)]
        yield first, np.stack([np.asarray(value) for value in values])


def _values(reader: Reader, name: str, comm: Communicator) -> npt.NDArray[np.float64]:
    """Return all values of a field of numbers, the same bits on all ranks. Collective."""
    values = np.zeros(len(reader), np.float64)
    for first, piece in _mine(reader, name, comm):
        values[first : first + len(piece)] = piece.reshape(-1)
    comm.wait([comm.iallreduce(values)], "the values of the target")
    if not np.isfinite(values).all():
        raise UsageError(f"{reader.path}: {name} is NaN or infinite somewhere: repair it")
    return values


def _count_classes(reader: Reader, name: str, ignored: int | None, comm: Communicator) -> int:
    """Return the greatest class number plus one. Collective. Raises UsageError."""
    ends = np.zeros(2, np.int64)  # The greatest number, and the negative of the least one.
    for _, piece in _mine(reader, name, comm):
        numbers = piece.astype(np.int64).reshape(-1)
        counted = numbers if ignored is None else numbers[numbers != ignored]
        if counted.size:
            ends = np.maximum(ends, [counted.max(), -counted.min()])
    comm.wait([comm.iallreduce(ends, "max")], "the number of classes")
    greatest, least = int(ends[0]), -int(ends[1])
    if least < 0 or greatest >= _MOST_CLASSES:
        raise UsageError(
            f"{reader.path}: {name} has values from {least} to {greatest}: give classes as numbers "
            "from 0, or --task regress for a number"
        )
    return greatest + 1


def _check(data: Dataset, fields: ArrayFields) -> None:
    """Raise UsageError if a data set lacks the fields of the training data."""
    kinds = data.reader.schema.kinds
    for name in (fields.input, fields.target):
        if name not in kinds:
            raise UsageError(
                f"{data.path} lacks {name!r} of the training data; it has {', '.join(kinds)}"
            )
    dimensions = len(fields.sides) + fields.has_channels
    if len(kinds[fields.input].shape) != dimensions:
        raise UsageError(
            f"{data.path}: {fields.input} is {kinds[fields.input].text}, and the training data "
            f"have {counted(dimensions, 'dimension')}"
        )
