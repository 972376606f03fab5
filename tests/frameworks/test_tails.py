"""Small last batches: every sample counts once, and metrics are one process's."""

import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import MpiRun

BODY = str(Path(__file__).with_name("tail_table.py"))
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "frameworks.md"
FRAMEWORKS = ("lightning", "accelerate", "transformers")
COMPARED = {
    "lightning": "Lightning, strategy `dlio` | mean of a logged training loss, and of validation's",
    "accelerate": "Accelerate | gathered samples and their order, the rest after skipped batches",
    "transformers": "Trainer | `train_loss`, `predict`'s loss, predictions and their order",
}
RANKS = (2, 3)
# Sizes, batch sizes and accumulated batches. On 2 ranks the last batch has 1 sample, 2, 3, or some
# on one rank alone; it is alone in its step, or ends one; or it is the only one.
BY_DAY = [
    (1, 4, 1),
    (3, 1, 2),
    (5, 2, 1),
    (7, 2, 1),
    (9, 2, 2),
    (10, 4, 3),
    (11, 4, 1),
    (16, 4, 1),
    (21, 4, 4),
]
RANGES = {
    "sizes of the data set": range(1, 41),
    "batch sizes": range(1, 9),
    "accumulated batches": range(1, 5),
}
WHOLE = [(size, batch, held) for size, batch, held in product(*RANGES.values())]
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


def test_losses_by_items_are_those_of_one_process(mpirun: MpiRun, tmp_path: Path) -> None:
    assert not _faults(mpirun, tmp_path, 2, ("items",), BY_DAY)


@pytest.mark.nightly
@pytest.mark.timeout(6500)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_whole_table(mpirun: MpiRun, tmp_path: Path, ranks: int, framework: str) -> None:
    assert not _faults(mpirun, tmp_path, ranks, (framework,), WHOLE)


def test_the_guide_has_the_table_of_these_cases() -> None:
    ranges = [f"{each[0]} to {each[-1]}" for each in RANGES.values()]
    rows = [
        ["with", "compared, besides weights and samples", "ranks", *RANGES, "cases", "faults"],
        ["---"] * (5 + len(RANGES)),
        *(
            [COMPARED[name], str(ranks), *ranges, f"{len(WHOLE):,}", "0"]
            for name in FRAMEWORKS
            for ranks in RANKS
        ),
    ]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    assert f"\n\n{table}" in GUIDE.read_text(encoding="utf-8"), table
