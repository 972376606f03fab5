"""`dlio run --check`: the same for scripts that train as one process does, else the reason."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.integrations.script import step_comparison
from dlio.integrations.script.scratch_folder import (
    ScratchFolder,
    made_outside,
    remove_outside,
)
from dlio.integrations.script.step_comparison import Comparison, compare
from dlio.integrations.script.step_records import ScriptRecord, StepRecord, recorded

_SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
how = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(64, 6)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5 * (how == "dropout")))
model.append(nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(9):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True):
        loss = nn.functional.mse_loss(model(a), b)
        if how == "pairs":
            loss = (model(a) - b.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"epoch {epoch}: {nn.functional.mse_loss(model(x), y).item():.4f}")
    model.train()
    torch.save(model.state_dict(), "weights.pt")
    torch.load("weights.pt")
    with open("data/log.csv", "a") as file:
        file.write("one line\\n")
print("the end")
"""


def _check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dlio.cli", "run", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.mpi
def test_a_check_says_that_all_is_the_same_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "weights.pt").write_text("the user's")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "log.csv").write_text("the user's")
    done = _check(tmp_path, "-n", "3", "--check", "7", "train.py", "mean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same for 7 steps (largest difference" in done.stdout
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data", "train.py", "weights.pt"]
    assert (tmp_path / "weights.pt").read_text() == "the user's"
    assert (tmp_path / "data" / "log.csv").read_text() == "the user's"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("pairs", "the loss is not a mean over the samples of one batch"),
        ("dropout", "dropout drops"),
    ],
)
@pytest.mark.daily("pairs-the loss is not a mean over the samples of one batch")
def test_a_difference_ends_with_code_1_and_its_likely_cause(
    how: str, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "data").mkdir()
    done = _check(tmp_path, "--check", "2", "train.py", how)
    assert done.returncode == 1, done.stderr
    assert "gradients differ at step 1: " in done.stdout
    assert f"likely cause: {cause}" in done.stdout


def test_a_script_that_fails_in_one_process_is_no_matter_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('of its own')")
    done = _check(tmp_path, "--check", "2", "train.py")
    assert done.returncode == 2
    assert (
        "does not run in one process: rank 0 ended at train.py:1: ValueError: of its own"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-n", "1", "--check", "2", "train.py"], "2 ranks or more"),
        (["--batch", "per-rank", "--check", "2", "train.py"], "leave it out of --check"),
        (["--check", "2", "nowhere.py"], "no such script"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(
    words: list[str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    done = _check(tmp_path, *words)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


def _record(
    folder: Path,
    rank: int,
    gradients: list[list[float]],
    weights: list[list[float]],
    *,
    rates: list[float] | None = None,
    losses: list[float] | None = None,
    printed: str = "",
    traits: tuple[str, ...] = (),
) -> ScriptRecord:
    """A record of one parameter of two elements."""
    folder.mkdir(exist_ok=True)
    record = ScriptRecord(str(folder), rank, printed=printed, complete=True)
    record.names = {"0/0": "layer.weight"}
    record.traits = list(traits)
    record.losses = list(losses or [1.0] * len(gradients))
    record.weights = [1.0] * len(gradients)
    for step, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        record.steps.append(StepRecord(0, [rates[step] if rates else 0.1], step + 1, 7))
        arrays = {"gradient/0/0": np.array(gradient), "weight/0/0": np.array(weight)}
        if step == 0:
            arrays["start/0/0"] = np.zeros(2)
        np.savez(f"{folder}/rank{rank}-step{step}.npz", **arrays)  # type: ignore[arg-type]
    return record


_GRADIENTS = [[1.0, 2.0], [2.0, 1.0]]
_WEIGHTS = [[-0.1, -0.2], [-0.3, -0.3]]


def _compared(tmp_path: Path, *ranks: ScriptRecord, printed: str = "") -> Comparison:
    one = _record(tmp_path / "one", 0, _GRADIENTS, _WEIGHTS, printed=printed)
    return compare(one, ranks, "allreduce")


def test_rounding_is_the_same(tmp_path: Path) -> None:
    near = [[1.0 + 1e-6, 2.0], [2.0, 1.0 - 1e-6]]
    ranks = [_record(tmp_path / "ranks", rank, near, _WEIGHTS) for rank in (0, 1)]
    result = _compared(tmp_path, *ranks)
    assert (result.lines, result.causes) == ([], [])
    assert 0 < result.largest < 1e-5


def test_a_half_gradient_is_that_of_a_sum(tmp_path: Path) -> None:
    half = [[0.5, 1.0], [1.0, 0.5]]
    ranks = [_record(tmp_path / "ranks", rank, half, _WEIGHTS) for rank in (0, 1)]
    result = _compared(tmp_path, *ranks)
    assert result.lines == ["gradients differ at step 1: layer.weight by 0.5 of its norm"]
    assert "the loss is a sum over samples" in result.causes[0]


def test_a_gradient_of_another_direction_is_not_that_of_a_sum(tmp_path: Path) -> None:
    turned = [[1.7, 0.4], [2.0, 1.0]]  # Half as long along that of one process.
    ranks = [_record(tmp_path / "ranks", rank, turned, _WEIGHTS) for rank in (0, 1)]
    causes = _compared(tmp_path, *ranks).causes
    assert causes
    assert not any("the loss is a sum over samples" in each for each in causes)


def test_losses_of_a_script_without_an_optimizer_are_compared(tmp_path: Path) -> None:
    records = []
    for name, losses in (("one", [1.0, 0.5]), ("ranks", [1.0, 0.7])):
        record = _record(tmp_path / name, 0, [], [], losses=losses)
        record.weights = [1.0, 1.0]
        records.append(record)
    assert compare(records[0], records[1:], "allreduce").lines == [
        "losses differ at step 1: backward 2: one process has 0.5, the mean of the ranks is 0.7"
    ]


class _Flip(nn.Module):
    """A transform of pictures, with a probability."""

    p = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("part", "traits"),
    [(_Flip(), []), (nn.Dropout(0.5), ["dropout"]), (nn.GRU(2, 2, 2, dropout=0.5), ["dropout"])],
)
def test_dropout_is_a_trait_and_other_probabilities_are_not(
    part: nn.Module, traits: list[str], tmp_path: Path
) -> None:
    record = ScriptRecord(str(tmp_path), 0)
    with recorded(record, 1, lambda: 1.0):
        part(torch.ones(3, 2))
    assert record.traits == traits


def test_a_parameter_that_is_not_exchanged_is_named(tmp_path: Path) -> None:
    other = [[-0.1, -0.2], [-0.3, -0.2]]
    first = _record(tmp_path / "ranks", 0, _GRADIENTS, _WEIGHTS)
    second = _record(tmp_path / "ranks", 1, _GRADIENTS, other)
    result = _compared(tmp_path, first, second)
    assert result.lines == [
        "the ranks' weights differ at step 2: layer.weight of rank 1 is 0.1 from rank 0's"
    ]
    assert "layer.weight is not exchanged" in result.causes[0]


def test_learning_rates_of_a_ranks_own_are_a_cause(tmp_path: Path) -> None:
    first = _record(tmp_path / "ranks", 0, _GRADIENTS, _WEIGHTS, rates=[0.1, 0.1])
    second = _record(tmp_path / "ranks", 1, _GRADIENTS, _WEIGHTS, rates=[0.1, 0.05])
    result = _compared(tmp_path, first, second)
    assert result.lines == ["learning rates differ at step 2: one process has 0.1, rank 1 0.05"]
    assert "a scheduler or the script sets each rank's learning rate" in result.causes[0]


def test_losses_are_the_mean_over_ranks(tmp_path: Path) -> None:
    first = _record(tmp_path / "ranks", 0, _GRADIENTS, _WEIGHTS, losses=[0.5, 1.0])
    second = _record(tmp_path / "ranks", 1, _GRADIENTS, _WEIGHTS, losses=[1.5, 1.5])
    result = _compared(tmp_path, first, second)
    assert result.lines == [
        "losses differ at step 2: backward 2: one process has 1, the mean of the ranks is 1.25"
    ]
    second.weights = [1.0, 0.0]  # A sample that is repeated where a rank has none.
    assert _compared(tmp_path, first, second).lines == []


def test_a_rank_that_makes_fewer_steps_is_a_difference(tmp_path: Path) -> None:
    first = _record(tmp_path / "ranks", 0, _GRADIENTS, _WEIGHTS)
    second = _record(tmp_path / "ranks", 1, _GRADIENTS[:1], _WEIGHTS[:1])
    result = _compared(tmp_path, first, second)
    assert result.lines == ["steps differ at step 2: one process makes 2, the ranks 2, 1"]


@pytest.mark.parametrize(
    ("one", "ranks", "same"),
    [
        ("loss 0.1234", "loss 0.1235", True),
        ("loss 0.1234", "loss 0.1334", False),
        ("right 120 of 240", "right 60 of 240", False),
        ("epoch 1, 3.1s, 00:12", "epoch 1, 9.2s, 01:40", True),
        ("| ms/batch 61.10 | loss  5.97", "| ms/batch 161.99 | loss  5.97", True),
        ("Time  6.996 ( 6.996) Loss 1.5", "Time  4.749 ( 4.700) Loss 1.5", True),
        ("Time  6.996 ( 6.996) Loss 1.5", "Time  4.749 ( 4.700) Loss 1.9", False),
        ("one\ntwo", "one", False),
    ],
)
def test_printed_lines_are_alike_but_for_rounding_and_times(
    one: str, ranks: str, same: bool, tmp_path: Path
) -> None:
    record = _record(tmp_path / "ranks", 0, _GRADIENTS, _WEIGHTS, printed=ranks)
    result = _compared(tmp_path, record, printed=one)
    assert (not result.lines) == same
    assert all("printed" in line for line in [*result.lines, *result.causes])


def test_a_scratch_folder_reads_the_users_files_and_writes_its_own(tmp_path: Path) -> None:
    home, root = tmp_path.resolve() / "home", tmp_path.resolve() / "scratch"
    (home / "data" / "inner").mkdir(parents=True)
    (home / "data" / "inner" / "log").write_text("old")
    (home / "data" / "large").write_text("large")
    (tmp_path / "up").mkdir()
    ScratchFolder(str(root), str(home)).make()
    code = f"""
import os, shutil
from dlio.integrations.script.scratch_folder import ScratchFolder
ScratchFolder({str(root)!r}, {str(home)!r}).enter()
assert open("data/inner/log").read() == "old"
open("data/inner/log", "a").write(" new")
assert open("data/inner/log").read() == "old new"
os.rename("data/inner/log", "data/log")
os.makedirs("../up/made/there")
assert os.path.islink("data/large")
shutil.rmtree("data")
"""
    environment = {**os.environ, "TMPDIR": "/dev/shm"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)
    assert (home / "data" / "inner" / "log").read_text() == "old"
    assert (home / "data" / "large").read_text() == "large"
    assert list((tmp_path / "up").iterdir()) == []
    assert not Path(f"{root}{home}/data").exists()


def test_files_made_outside_are_removed_and_none_is_overwritten(
    tmp_path: Path,
) -> None:
    home = tmp_path.resolve() / "home"
    home.mkdir()
    (home / "old").write_text("old")
    scratch = ScratchFolder(f"{tmp_path.resolve()}/scratch", str(home))
    scratch.own(f"{home}/fresh", changes=True)
    (home / "fresh").write_text("fresh")
    scratch.own(f"{home}/fresh", changes=True)  # Its own file may be changed again.
    with pytest.raises(UsageError, match="which is there already"):
        scratch.own(f"{home}/old", changes=True)
    assert made_outside(scratch.made) == [f"{home}/fresh"]
    remove_outside(scratch.made)
    assert [each.name for each in home.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("one", "ranks", "same"),
    [
        ("Took 0.0008", "Took 0.5", True),
        ("/tmp/dlio-check-a1/one/data", "/tmp/dlio-check-a1/ranks/data", True),
        ("cache/3d565459767d843a/x", "cache/7caf905a73c3f593/x", True),
        ("/data/one/x", "/data/ranks/x", False),
        ("took 0.5 loss 1.0", "took 0.7 loss 2.0", False),
        ("right 123456789012", "right 923456789012", False),
    ],
)
def test_times_and_scratch_folders_in_printed_lines_do_not_count(
    one: str, ranks: str, same: bool
) -> None:
    assert step_comparison._same_line(one, ranks, step_comparison.BOUND) is same
