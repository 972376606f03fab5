"""Tables of modules in packages' docstrings: a row for each module, a module for each row."""

import importlib
import re
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "name", ["dlio.comm", "dlio.comm.net", "dlio.comm.survival", "dlio.launch", "dlio.launch.node"]
)
def test_a_table_of_modules_is_complete(name: str) -> None:
    package = importlib.import_module(name)
    rows = [row for row in (package.__doc__ or "").splitlines() if row.startswith("| `")]
    listed = {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    folder = Path(str(package.__file__)).parent
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert listed == modules | packages
