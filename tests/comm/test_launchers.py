"""Processes that a launcher started together, and that do not find each other, are refused."""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from dlio.comm.launch_detection import check_launch, torchrun_place
from dlio.comm.launch_environment import under_mpi
from dlio.errors import UsageError
from tests.conftest import TorchRun

_PREFIXES = ("SLURM", "OMPI_COMM", "PMI", "MV2", "JSM", "MASTER", "TORCHELASTIC", "RANK", "WORLD")
_TASK = "SLURM_PROCID=0 SLURM_STEP_ID=0 "
_MEETING = "MASTER_ADDR=here MASTER_PORT=1 "
_GROUPS = ("before", "after")
BODY = str(Path(__file__).with_name("launched_loop.py"))


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)


def _set(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("=", 1))


@pytest.mark.parametrize(
    ("variables", "count", "remedy"),
    [
        (_TASK + "SLURM_NTASKS=4", 4, "srun --mpi=pmix"),
        (_TASK + "SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=8", 8, "mpirun -n 8"),
        ("SLURM_PROCID=0 SLURM_STEPID=3 SLURM_NPROCS=2", 2, "dlio train -n 2"),
        ("SLURM_PROCID=3 SLURM_NTASKS=4", 4, "srun"),
        ("SLURM_PROCID=2", 3, "srun"),
        (_TASK + "SLURM_NTASKS=4 PMIX_RANK=0", 4, "srun"),
        ("PMIX_RANK=1", 2, "mpirun"),
        ("OMPI_COMM_WORLD_SIZE=4", 4, "mpirun"),
        ("PMI_SIZE=4 PMI_RANK=0", 4, "mpirun"),
        ("PMI_RANK=2", 3, "mpirun"),
        ("MV2_COMM_WORLD_SIZE=4", 4, "mpirun"),
        ("JSM_NAMESPACE_SIZE=6", 6, "mpirun"),
        (_MEETING + "RANK=0 WORLD_SIZE=2", 2, "without torchrun"),
    ],
)
def test_one_of_several_processes_that_finds_no_other_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: str, count: int, remedy: str
) -> None:
    _set(monkeypatch, variables)
    with pytest.raises(UsageError, match=f"started {count} processes.*{remedy}") as raised:
        check_launch(1)
    assert "\n" not in str(raised.value)
    check_launch(count)  # They have found each other.
    monkeypatch.setenv("DLIO_ALONE", "1")
    check_launch(1)


@pytest.mark.parametrize(
    "variables",
    [
        "",
        "SLURM_NTASKS=4 SLURM_JOB_ID=7",  # A shell of salloc.
        "SLURM_NTASKS=4 SLURM_PROCID=0",  # A batch script.
        "SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=4294967290",  # An interactive step.
        _TASK + "SLURM_NTASKS=4 SLURM_PTY_PORT=40000",  # A shell of srun --pty.
        _TASK + "SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1",  # srun -n 1 in a batch script.
        _TASK + "SLURM_NTASKS=2 OMPI_COMM_WORLD_SIZE=1",  # mpirun's daemons are srun's tasks.
        "OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0",
        _MEETING + "RANK=0 WORLD_SIZE=1",
        "WORLD_SIZE=4",  # Set for ranks that are started later.
        "SLURM_NTASKS= SLURM_PROCID=x",
    ],
)
def test_a_single_process_on_purpose_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, variables: str
) -> None:
    _set(monkeypatch, variables)
    check_launch(1)


@pytest.mark.parametrize(
    "outer", [_TASK + "SLURM_NTASKS=4 PMIX_RANK=0", "OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=0"]
)
def test_torchrun_in_each_task_must_reach_the_other_tasks(
    monkeypatch: pytest.MonkeyPatch, outer: str
) -> None:
    _set(monkeypatch, outer + " TORCHELASTIC_RUN_ID=none RANK=1 WORLD_SIZE=2 " + _MEETING)
    assert not under_mpi()  # Its children are not ranks of MPI.
    assert torchrun_place() == (1, 2)
    with pytest.raises(UsageError, match="finds only 2 of them"):
        check_launch(2)
    check_launch(8)


@pytest.mark.parametrize("variables", ["RANK=0", _MEETING + "RANK=2", "MASTER_ADDR=here RANK=1"])
def test_incomplete_variables_of_torchrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: str
) -> None:
    _set(monkeypatch, "WORLD_SIZE=2 " + variables)
    with pytest.raises(UsageError, match="start the ranks with torchrun"):
        torchrun_place()


@pytest.mark.parametrize(
    "group", ["none", *(pytest.param(each, marks=pytest.mark.nightly) for each in _GROUPS)]
)
def test_a_loop_under_torchrun_is_shared_whether_or_not_it_makes_a_group(
    torchrun: TorchRun, group: str
) -> None:
    said = [text.split(";") for text in torchrun(2, BODY, group)]
    assert sorted(chain.from_iterable(_numbers(each) for each, _ in said)) == list(range(10))
    assert said[0][1] == said[1][1]  # Weights, which began differently.


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_loop_among_tasks_that_do_not_find_each_other_is_refused() -> None:
    variables = dict(item.split("=") for item in (_TASK + "SLURM_NTASKS=4").split())
    done = subprocess.run(
        [sys.executable, BODY, "none"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode
    assert "srun started 4 processes" in done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        "SLURM_PROCID=1 SLURM_NTASKS=2",
        pytest.param("OMPI_COMM_WORLD_SIZE=2", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "train {} --epochs 1 --report out/report --checkpoint out/points",
        "train {} -n 2 --backend torch --epochs 1 --report out/report",
        "run script.py",
        "stage {} --tiers out/tier:1GiB",
        "pack {} out/packed",
    ],
)
def test_commands_that_write_are_refused_before_they_write(
    pictures: Path, tmp_path: Path, command: str, variables: str
) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text("import pathlib; pathlib.Path('out/written').touch()")
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", *command.format(pictures).split()],
        cwd=tmp_path,
        env={**os.environ, **dict(item.split("=") for item in variables.split())},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "started 2 processes" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(out.iterdir())
