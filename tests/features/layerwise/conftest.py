"""Fixtures of runs of `dlio train`."""

from tests.train.conftest import dlio, here, pictures

__all__ = ["dlio", "here", "pictures"]
