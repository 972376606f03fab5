"""The modules that a zygote imports before its ranks are forked: all of them exist."""

import importlib.util

import pytest

from dlio.launch.relaunch import ZYGOTE_MODULES


@pytest.mark.parametrize("name", ZYGOTE_MODULES)
def test_each_module_exists(name: str) -> None:
    """The zygote passes over a missing one, as MPI need not be installed: starts would be slow."""
    assert importlib.util.find_spec(name) is not None
