"""Values that Lightning logs without `sync_dist` are one process's, on ranks of both kinds."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SOURCES, MpiRun

BODY = str(Path(__file__).with_name("logged_values.py"))
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("open_mpi_segments"),
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="pip install 'dlio[dev]'"
    ),
]


def _start(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def _lines(folder: Path, way: str) -> list[Any]:
    return [json.loads(line) for line in (folder / way).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("alone")
    _start(BODY, "one", str(folder))
    lines = _lines(folder, "one")
    assert len(lines) == 16  # Of every other step; of validation and epoch, thrice; and the rest.
    return lines


def _check(lines: list[Any], alone: list[Any]) -> None:
    assert len(lines) == len(alone)
    for (step, values), (of_step, expected) in zip(lines[:-2], alone[:-2], strict=True):
        assert step == of_step
        assert values == pytest.approx(expected, abs=1e-5)
    assert lines[-2] == pytest.approx(alone[-2], abs=1e-5)
    assert lines[-1] == alone[-1]


def test_with_the_strategy(mpirun: MpiRun, tmp_path: Path, alone: list[Any]) -> None:
    done = mpirun(2, BODY, "strategy", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    _check(_lines(tmp_path, "strategy"), alone)


def test_in_a_script_of_dlio_run(tmp_path: Path, alone: list[Any]) -> None:
    said = _start("-m", "dlio.cli", "run", "-n", "2", BODY, "run", str(tmp_path))
    _check(_lines(tmp_path, "run"), alone)
    assert "rank 0's part" not in said
    said = _start("-m", "dlio.cli", "run", "-n", "2", BODY, "run", str(tmp_path), "sum")
    assert said.count("'count', which is logged with reduce_fx='sum', is the sum over") == 1


def test_values_of_several_loaders_are_told(tmp_path: Path) -> None:
    said = _start("-m", "dlio.cli", "run", "-n", "2", BODY, "run", str(tmp_path), "two")
    assert said.count("logs in a step on batches of several loaders are means over ranks") == 1


def test_ranks_exchange_values_that_are_read(tmp_path: Path) -> None:
    _start("-m", "dlio.cli", "run", "-n", "2", BODY, "run", str(tmp_path), "quiet")
    *_, seen, steps, _ = _lines(tmp_path, "run")
    assert not steps
    # Of 15 steps: 7 that are logged, and the last one of an epoch if it is not.
    assert seen == [0, {"messages": 7 + 2}]
