"""Small last batches: every sample counts once, and metrics are one process's."""

import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import MpiRun

BODY = str(Path(__file__).with_name("tail_table.py"))
FRAMEWORKS = ("lightning", "accelerate", "transformers")
# Sizes, batch sizes and accumulated batches. On 2 ranks the last batch has 1 sample, 2, 3, or some
# on one rank alone; it is alone in its step, or ends one; or it is the only one.
BY_DAY = [
    (1, 4, 1),
    (3, 1, 2),
    (5, 2, 1),
    (9, 2, 2),
    (10, 4, 3),
    (11, 4, 1),
    (16, 4, 1),
    (21, 4, 4),
]
WHOLE = list(product(range(1, 41), range(1, 9), range(1, 5)))
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("open_mpi_segments"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, FRAMEWORKS)), reason="pip install 'dlio[dev]'"
    ),
]


Cases = list[tuple[int, int, int]]


def _faults(
    mpirun: MpiRun, folder: Path, ranks: int, frameworks: tuple[str, ...], cases: Cases
) -> dict[str, object]:
    done = mpirun(
        ranks,
        BODY,
        str(folder),
        ",".join(frameworks),
        json.dumps(cases),
        env={"HF_HUB_OFFLINE": "1"},
        timeout_s=850 if len(cases) < len(WHOLE) else 6000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((folder / "faults.json").read_text())
    assert {name: each["cases"] for name, each in result.items()} == dict.fromkeys(
        frameworks, len(cases)
    )
    return {name: each["faults"] for name, each in result.items() if each["faults"]}


def test_frameworks_train_and_evaluate_as_one_process(mpirun: MpiRun, tmp_path: Path) -> None:
    assert not _faults(mpirun, tmp_path, 2, FRAMEWORKS, BY_DAY)


@pytest.mark.nightly
@pytest.mark.timeout(6500)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_whole_table(mpirun: MpiRun, tmp_path: Path, ranks: int, framework: str) -> None:
    assert not _faults(mpirun, tmp_path, ranks, (framework,), WHOLE)
