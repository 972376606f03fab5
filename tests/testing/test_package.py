"""dlio.testing names the remedy where pytest is missing, and loads each suite on first use."""

import subprocess
import sys

import pytest

import dlio.testing


def test_without_pytest_the_remedy_is_named() -> None:
    text = "import sys; sys.modules['pytest'] = None; import dlio.testing"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 1
    remedy = done.stderr.splitlines()[-1]
    assert "pip install '" in remedy
    assert all(f"'{name}>=" in remedy for name in ("hypothesis", "pytest"))


def test_every_name_is_there() -> None:
    for name in dlio.testing.__all__:
        assert getattr(dlio.testing, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dlio.testing.nonsense
