"""Lightning's trainer goes on when ranks are lost: every sample once an epoch, one model."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.launch.mpi_launch import launch

FIT = Path(__file__).parent / "losses" / "fit.py"
SAMPLES, EPOCHS = 101, 3
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="pip install 'dlio[dev]'"
    ),
    pytest.mark.mpi,
    pytest.mark.nightly,
    pytest.mark.cold,  # A stand-in would end a little later than the process that kills itself.
]
Ends = dict[int, tuple[str, int]]


def _fit(
    folder: Path,
    ends: Ends,
    options: dict[str, Any],
    *,
    ranks: int = 3,
    more: tuple[str, ...] = (),
    by_mpirun: bool = False,
) -> tuple[list[dict[str, Any]], str]:
    """Return what each rank that is left has seen, and the errors of all."""
    own = {"ENDS": json.dumps(ends), "OMP_NUM_THREADS": "1", "DLIO_TIMEOUT": "180"}
    argv = [str(FIT), str(folder), json.dumps(options)]
    if by_mpirun:
        python = [sys.executable, *argv]
        done = launch(python, ranks, environment=own, capture=True, timeout_s=400, min_ranks=1)
    else:
        command = ["-m", "dlio.cli", "run", "-n", str(ranks), "--fault-tolerance", "shrink", *more]
        done = subprocess.run(
            [sys.executable, *command, *argv],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    left = sorted(set(range(ranks)) - set(ends))
    assert sorted(path.name for path in folder.glob("*.json")) == [f"{k}.json" for k in left]
    results = [json.loads((folder / f"{k}.json").read_text()) for k in left]
    lost = re.findall(r"^ranks? .*?(\d+) \(node \S+\) lost at step \d+: \d", done.stderr, re.M)
    assert {int(rank) for rank in lost} <= set(ends)
    assert lost
    for rank, each in enumerate(results):
        assert each["weights"] == results[0]["weights"]
        assert (each["rank"], each["ranks"]) == (rank, len(left))
        assert each["sampler"] == {"num_replicas": len(left), "rank": rank}
        assert each["gathered"] == left
        assert each["told"] == [left[0]]
        assert each["all"] is True
        assert each["any"] is True
        assert each["sizes"][-1] == len(left)
        for key in ("validated", "measured"):
            assert each[key] == results[0][key]
    saved = torch.load(folder / "saved" / "last.ckpt", weights_only=False)
    weights = saved["state_dict"]["table.weight"].numpy().tobytes().hex()
    assert weights == results[0]["weights"]
    return results, done.stderr


def _is_exact(results: list[dict[str, Any]]) -> bool:
    return all(each["epochs"] == [[1] * SAMPLES] * EPOCHS for each in results)


@pytest.mark.parametrize(
    ("ends", "options", "steps"),
    [
        pytest.param({1: ("step", 3)}, {}, [7, 7, 7], id="in a step"),
        pytest.param({0: ("batch", 7)}, {}, [8, 7, 7], id="rank 0 in the last step of an epoch"),
        pytest.param({0: ("batch", 21)}, {"by_hand": 1}, [7, 7, 8], id="in the last step of all"),
        # The last batch makes a step of its own, and what comes again another one.
        pytest.param({0: ("batch", 7)}, {"accumulate": 2}, [5, 4, 4], id="accumulation"),
        pytest.param({2: ("epoch", 2)}, {}, [7, 7, 7], id="between two epochs"),
        pytest.param({1: ("before a sum, train", 8)}, {}, [7, 7, 7], id="in a sum"),
        # Under `dlio run`, torch's loader is one of dlio's.
        pytest.param({1: ("batch", 10)}, {"torch": 1}, [7, 7, 7], id="torch's loader"),
    ],
)
def test_each_sample_is_in_one_gradient_of_each_epoch(
    ends: Ends, options: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    results, errors = _fit(tmp_path, ends, options)
    assert _is_exact(results)
    assert results[0]["steps"] == steps
    assert results[0]["validated"] == pytest.approx([50.0] * EPOCHS)
    assert "is missing from it" not in errors


@pytest.mark.parametrize(
    "end", [("validation", 3), ("before a sum, validate", 2), ("after a sum, validate", 2)]
)
def test_a_loss_in_a_validation_leaves_out_its_samples_and_no_more(
    end: tuple[str, int], tmp_path: Path
) -> None:
    """A mean's sum and count come from the same ranks: it is that of torchmetrics."""
    results, errors = _fit(tmp_path, {1: end}, {})
    assert _is_exact(results)
    validated = results[0]["validated"]
    assert validated == pytest.approx(results[0]["measured"])
    assert 30 < validated[0] < 70
    assert validated[1:] == pytest.approx([50.0] * 2)
    assert "this evaluation may lack samples of the lost rank" in errors


def test_a_checkpoint_that_rank_0_has_begun_is_written_by_the_next_rank(tmp_path: Path) -> None:
    results, _ = _fit(tmp_path, {0: ("saving", 1)}, {})
    assert _is_exact(results)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["last.ckpt"]


def test_two_ranks_of_five_are_lost_in_a_step_and_a_validation(tmp_path: Path) -> None:
    ends: Ends = {0: ("batch", 3), 3: ("validation", 1)}
    results, _ = _fit(tmp_path, ends, {}, ranks=5)
    assert _is_exact(results)


def test_ranks_without_mpi_go_on_too(tmp_path: Path) -> None:
    results, _ = _fit(tmp_path, {1: ("batch", 10)}, {}, more=("--backend", "torch"))
    assert _is_exact(results)


@pytest.mark.parametrize("end", [("batch", 10), ("epoch_end", 1)])
def test_the_sampler_of_torchs_loader_is_dealt_anew_from_the_next_epoch_on(
    end: tuple[str, int], tmp_path: Path
) -> None:
    results, errors = _fit(tmp_path, {0: end}, {"torch": 1}, by_mpirun=True)
    assert errors.count("what a lost rank had left of an epoch is missing from it") == 1
    # 101 samples over 3 ranks, 34 each, by 5; then over 2 ranks, 51 each.
    torn = end[0] == "batch"
    assert results[0]["steps"] == ([7, 7, 11] if torn else [7, 11, 11])
    for epoch, counts in enumerate(results[0]["epochs"]):
        # Torch's sampler repeats one sample, so that all ranks have as many.
        is_torn = torn and epoch == 1
        assert (0 in counts) is is_torn
        assert sum(counts) <= SAMPLES + 1
