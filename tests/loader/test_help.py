"""The package as `help` and its attributes show it."""

import inspect
import subprocess
import sys

import pytest

import dlio
from dlio.loader.dataset import open_dataset
from dlio.util.plugins import plugins


def test_help_names_each_option_of_each_reader() -> None:
    text = inspect.getdoc(open_dataset) or ""
    own = set(inspect.signature(open_dataset).parameters)
    for entry in plugins("dlio.readers"):
        for name in set(inspect.signature(entry.load()).parameters) - own - {"path"}:
            line = next((row for row in text.splitlines() if f"{entry.name}" in row), "")
            assert f"`{name}`" in text, f"{entry.name}: {name}"
            assert line, entry.name


@pytest.mark.cold
def test_public_modules_need_no_import_of_their_own() -> None:
    code = (
        "import dlio, sys; assert 'torch' not in sys.modules; dlio.transforms.RandomErasing; "
        "dlio.errors.DlioError; assert 'transforms' in dir(dlio)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)
    assert "transforms" in dlio.__all__
    with pytest.raises(AttributeError):
        getattr(dlio, "transform")  # noqa: B009
