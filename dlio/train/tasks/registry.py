"""The task of a run: the one that `--task` names, or the one that the data call for."""

from collections.abc import Callable
from typing import Final

from dlio.comm import Communicator
from dlio.data.schema import Schema
from dlio.errors import UsageError
from dlio.loader.dataset import Dataset
from dlio.train.array_fields import array_fields, is_arrays, is_table
from dlio.train.config import TrainConfig
from dlio.train.names import (
    ARRAY_MODELS,
    DEFAULT_MODEL,
    TASK_NAMES,
    USUAL_MODELS,
    USUAL_OPTIMIZERS,
)
from dlio.train.tasks.array_tasks import make_array_task, usual_task
from dlio.train.tasks.classification import ClassifyImages
from dlio.train.tasks.reconstruction import AutoencodeImages
from dlio.train.tasks.regression import RegressImages
from dlio.train.tasks.segmentation import SegmentImages, has_masks
from dlio.train.tasks.table_task import TableTask
from dlio.train.tasks.task_base import TrainingTask
from dlio.train.train_options import ModelOptions

_Make = Callable[[ModelOptions, str, Dataset, Communicator], TrainingTask]
TASKS: Final[dict[str, _Make]] = dict(
    zip(
        TASK_NAMES,
        (
            lambda options, source, data, _: ClassifyImages(options, source, data),
            lambda options, _, data, __: RegressImages(options, data),
            lambda options, _, data, __: AutoencodeImages(options, data),
            lambda options, _, data, comm: SegmentImages(options, data, comm),
            lambda options, _, data, comm: TableTask(options, data, comm),
        ),
        strict=True,
    )
)
"""How tasks are made, by the names that --task accepts. Collective."""


def resolve_config(config: TrainConfig, data: Dataset, schema: Schema) -> TrainConfig:
    """Return the configuration with the task, model and optimizer that a run of these data has.

    The schema is of whole samples. Raises UsageError for a task that the data do not suit.
    """
    source, model = config.data.source, config.model
    table, arrays = is_table(schema), is_arrays(schema)
    usual = "table" if table else "segment" if has_masks(data) else "classify"
    if arrays:
        usual = usual_task(array_fields(source, schema, model.target))
    task = model.task or usual
    if arrays and task == "autoencode":
        raise UsageError(f"--task autoencode needs images, and {source} holds arrays")
    if table and task in ("autoencode", "segment"):
        raise UsageError(f"--task {task} needs images, and {source} is a table")
    if task == "table" and not table:
        raise UsageError(f"--task table: {source} is not a table of numbers and texts")
    if not table and ((model.target and not arrays) or model.category):
        option = "--target" if model.target and not arrays else "--category"
        raise UsageError(f"{option} is for tables, and {source} is not one")
    if (config.data.mixup or config.data.cutmix) and (table or arrays or task != "classify"):
        option = "--mixup" if config.data.mixup else "--cutmix"
        raise UsageError(
            f"{option} mixes images with classes (--task classify), and this is --task {task} on "
            f"{source}: leave it out"
        )
    kind = "table" if table else task
    usual_model = (ARRAY_MODELS if arrays else USUAL_MODELS)[kind]
    return config.replaced(
        task=task,
        model=usual_model if model.model == DEFAULT_MODEL else model.model,
        optimizer=config.optimizer.optimizer or USUAL_OPTIMIZERS[kind],
    )


def make_task(
    config: TrainConfig, data: Dataset, comm: Communicator, schema: Schema
) -> TrainingTask:
    """Make the task of a settled configuration, of a schema of whole samples. Collective.

    Raises UsageError for data that lack something that the task needs.
    """
    options, source = config.model, config.data.source
    if is_arrays(schema):
        return make_array_task(options, config.data, data, schema, comm)
    name = "table" if is_table(schema) else options.task
    assert name is not None
    return TASKS[name](options, source, data, comm)
