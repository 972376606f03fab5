"""Names that options of a training run take, and their defaults."""

from typing import Final

__all__ = ["DEFAULT_MODEL", "DEFAULT_OPTIMIZER", "TASK_NAMES"]

DEFAULT_MODEL: Final = "resnet"
"""Value of --model that stands for the usual model of the task."""
DEFAULT_OPTIMIZER: Final = "nesterov"
"""Optimizer of images with classes."""
TASK_NAMES: Final = ("classify", "regress", "autoencode", "segment", "table")
"""Tasks of `dlio.train.tasks.registry` that --task takes."""
