"""Hand-written loops with `dlio.distribute` go on when ranks are lost."""

import json
import re
import sys
from pathlib import Path

import pytest

from dlio.launch.mpi_launch import launch

LOOP = Path(__file__).with_name("loop.py")
SAMPLES, BATCH, EPOCHS = 101, 4, 3
# The stand-in ends a little later than the process that kills itself: at night, without it.
pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]


@pytest.mark.parametrize(
    ("mode", "ranks", "ends"),
    [
        pytest.param("data", 4, {0: 4, 2: 11}, marks=pytest.mark.nightly),
        ("list", 3, {1: 3}),
        ("nodes", 4, {1: 3, 3: 15}),  # Samples move between nodes by messages.
    ],
)
@pytest.mark.daily("list-3-ends1")
def test_each_sample_is_in_one_gradient_of_each_epoch_in_as_many_steps(
    mode: str,
    ranks: int,
    ends: dict[int, int],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"ENDS": json.dumps(ends), "DLIO_TIMEOUT": "180", "OMP_NUM_THREADS": "1"}
    environment["DLIO_CACHE"] = str(tmp_path / "cache")
    argv = [sys.executable, str(LOOP), str(pictures / "train"), mode]
    done = launch(argv, ranks, environment=environment, capture=True, timeout_s=400, min_ranks=1)
    left = sorted(set(range(ranks)) - set(ends))
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == [f"ended-{k}" for k in left]
    assert re.search(r"^rank \d lost: \d ranks go on", done.stderr, re.MULTILINE)  # Logged.
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = -(-SAMPLES // (BATCH * ranks))
    for epoch in range(EPOCHS):
        of_epoch = [line for line in lines if line["epoch"] == epoch]
        assert len(of_epoch) >= len(left)
        for line in of_epoch:
            assert line["counts"] == [1]
            assert line["steps"] == line["planned"] == steps


@pytest.mark.nightly
def test_a_rank_that_hangs_in_a_loop_is_lost_if_a_variable_says_when(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {"ENDS": json.dumps({1: 15}), "HOW": "hang", "DLIO_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, str(LOOP), str(pictures / "train"), "data"]
    own["DLIO_HANG_AFTER"] = "2"
    done = launch(argv, 3, environment=own, capture=True, timeout_s=400, min_ranks=1)
    assert re.search(r"^rank 1 \(process \d+\) hangs and is killed", done.stderr, re.MULTILINE)
    assert re.search(r"^rank 1 lost: 2 ranks go on", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.daily("run")
def test_a_variable_without_the_option_is_refused(command: str, pictures: Path) -> None:
    argv = [sys.executable, "-m", "dlio.cli", command]
    argv += [str(pictures / "train")] if command == "train" else [str(LOOP)]
    done = launch(argv, 2, capture=True, timeout_s=100, min_ranks=1)
    assert done.returncode == 2
    assert "DLIO_MIN_RANKS is set, so ranks are to survive others" in done.stderr


def test_process_groups_of_torch_are_refused() -> None:
    """They end with any rank, so a job that is to survive would hang."""
    argv = [sys.executable, "-c", "import dlio; dlio.init_process_group()"]
    done = launch(argv, 2, capture=True, timeout_s=100, min_ranks=1)
    assert done.returncode != 0
    assert "torch.distributed's groups end with any rank" in done.stderr
