"""The task of a run: the one that `--task` names, or the one that the data call for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio.loader.dataset import Dataset
from dlio.train.config import TrainConfig
from dlio.train.data import is_table
from dlio.train.names import DEFAULT_MODEL, TASK_NAMES, USUAL_MODELS, USUAL_OPTIMIZERS
from dlio.train.tasks.autoencode import AutoencodeImages
from dlio.train.tasks.base import Task
from dlio.train.tasks.classify import ClassifyImages
from dlio.train.tasks.regress import RegressImages
from dlio.train.tasks.segment import SegmentImages, has_masks
from dlio.train.tasks.table import TableTask

__all__ = ["TASKS", "make_task", "settle"]

_Make = Callable[[TrainConfig, Dataset, Communicator], Task]
TASKS: Final[dict[str, _Make]] = dict(
    zip(
        TASK_NAMES,
        (
            lambda config, data, _: ClassifyImages(config, data),
            lambda config, data, _: RegressImages(config, data),
            lambda config, data, _: AutoencodeImages(config, data),
            SegmentImages,
            TableTask,
        ),
        strict=True,
    )
)
"""How tasks are made, by the names that --task accepts. Collective."""


def settle(config: TrainConfig, data: Dataset) -> TrainConfig:
    """Return the configuration with the task, model and optimizer that a run of these data has.

    Raises UsageError for a task that the data do not suit.
    """
    table = is_table(data.reader.schema)
    usual = "table" if table else "segment" if has_masks(data) else "classify"
    task = config.task or usual
    if table and task in ("autoencode", "segment"):
        raise UsageError(f"--task {task} needs images, and {config.source} is a table")
    if task == "table" and not table:
        raise UsageError(f"--task table: {config.source} is not a table of numbers and texts")
    if not table and (config.target or config.category):
        option = "--target" if config.target else "--category"
        raise UsageError(f"{option} is for tables, and {config.source} is not one")
    kind = "table" if table else task
    return replace(
        config,
        task=task,
        model=USUAL_MODELS[kind] if config.model == DEFAULT_MODEL else config.model,
        optimizer=config.optimizer or USUAL_OPTIMIZERS[kind],
    )


def make_task(config: TrainConfig, data: Dataset, comm: Communicator) -> Task:
    """Make the task of a settled configuration. Collective.

    Raises UsageError for data that lack something that the task needs.
    """
    name = "table" if is_table(data.reader.schema) else config.task
    assert name is not None
    return TASKS[name](config, data, comm)
