"""Features that somebody may have deleted, see tests/house/deletion.py: their tests are skipped."""

from typing import Any

import pytest


def feature(name: str) -> Any:
    """Return a module below `dlio.features`."""
    return pytest.importorskip(f"dlio.features.{name}")
