"""Fixtures of runs whose ranks end."""

from tests.train.conftest import pictures
from tests.train.loss.conftest import run

__all__ = ["pictures", "run"]
