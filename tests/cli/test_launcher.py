"""`dlio launch` starts ranks here, in an allocation and as tasks of srun, or says why not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.cli.launch_command import LaunchOptions, Program, command
from dlio.comm.launch_environment import local_rank
from dlio.launch.slurm_tasks import is_task, task_variables
from dlio.launch.spread import (
    mpirun_command,
    passed_variables,
    run_under_mpirun,
    srun_command,
)
from dlio.util.child_processes import module_command
from tests.staging.small_disks import mounted

_PREFIXES = ("SLURM", "PBS", "LSB", "OMPI_COMM", "PMI", "MASTER", "TORCHELASTIC", "RANK", "WORLD")
_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
_PLACE = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
sys.stdout.write(" ".join(os.environ.get(name, "-") for name in names) + "\\n")
"""
_MEET = """
import os, sys
from dlio.comm import world
ranks = world()
local = " ".join(ranks.allgather(os.environ["LOCAL_RANK"]))
sys.stdout.write(f"{ranks.rank} {ranks.size} {local}\\n")
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run `dlio launch` in an empty folder, outside of all jobs but for the given variables."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}

    def run(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            module_command("dlio.cli", "launch", *words),
            env={**outside, "DLIO_CACHE": str(tmp_path / "cache"), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


@pytest.mark.mpi
def test_any_program_runs_in_ranks_of_this_machine(launch: Launch) -> None:
    text = "import os, sys; print(os.environ['OMPI_COMM_WORLD_RANK']); sys.exit(3)"
    done = launch("-n", "2", "--", sys.executable, "-c", text)
    assert done.returncode == 3
    done = launch("-n", "2", "--", sys.executable, "-c", text.replace("exit(3)", "exit(0)"))
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "1"])
    assert "2 ranks on this machine, by mpirun" in done.stderr


def test_programs_meet_without_mpi(launch: Launch) -> None:
    done = launch("-n", "2", "--backend", "torch", "--", sys.executable, "-c", _PLACE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0 2", "1 1 2"]


@pytest.mark.mpi
def test_stage_and_pack_share_their_work_among_ranks(
    launch: Launch, pictures: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    done = launch("-n", "2", "pack", str(pictures), str(packed))
    assert done.returncode == 0, done.stderr
    (tmp_path / "tier").mkdir()
    where = ("--tiers", f"{tmp_path}/tier:1GiB", "--pretend-nodes", "2", "--report", "stage.json")
    done = launch("-n", "2", "stage", str(packed), *where)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "stage.json").read_text())
    assert (report["complete"], report["nodes"]) == (True, 2)


def test_pack_starts_as_many_ranks_as_launch_says(
    monkeypatch: pytest.MonkeyPatch, pictures: Path, tmp_path: Path
) -> None:
    started: list[tuple[str, int]] = []

    def start(name: str, task: str, ranks: int, *_: object) -> int:
        started.append((name, ranks))
        return 0

    monkeypatch.setattr("dlio.launch.command_ranks._launch", start)
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        monkeypatch.delenv(name)
    command(
        Program("pack", (str(pictures), str(tmp_path / "packed"), "--workers", "1")),
        LaunchOptions(ranks=3),
    )
    assert started == [("pack", 3)]


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ("", "", "COMMAND is missing"),
        ("trian /x", "", "trian: no such command of dlio; did you mean train"),
        ("train /x --lrr 1", "", "--lrr: no such option; did you mean --lr"),
        ("launch train /x", "", "not a command of many ranks"),
        ("-n 2 eval /x --weights w -n 2", "", "give -n to `dlio launch` alone"),
        ("train /x --nodes a,b", "", "leave `launch` out"),
        ("--ranks-per-node 2 -- true", "", "not a job of Slurm, PBS or LSF"),
        ("--print -- true", "", "--print needs --slurm"),
        ("-n 2 --slurm nodes=2 -- true", "", "-n 2 does not go with --slurm"),
        ("--slurm nodes=2 -- true", "SLURM_JOB_ID=7", "--slurm within job 7"),
        ("-- true", "OMPI_COMM_WORLD_SIZE=2", "leave out either `dlio launch`, or mpirun"),
        ("-n 4 -- true", "TASK=1", "srun has started 3 tasks"),
        ("--backend mpi -- true", "TASK=1", "srun --mpi=pmix"),
        (
            "train /x --fault-tolerance shrink",
            "LSB_MCPU_HOSTS=a_2_b_2",
            "dlio train -n 4 --nodes a,b",
        ),
    ],
)
def test_launches_that_cannot_be_are_refused_with_the_remedy(
    launch: Launch, words: str, variables: str, said: str
) -> None:
    given = dict(each.split("=") for each in variables.split())
    given = {name: value.replace("_", " ") for name, value in given.items()}
    done = launch(*words.split(), **(_TASK if "TASK" in given else given))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_task_of_srun_becomes_the_rank_that_slurm_says(launch: Launch) -> None:
    done = launch("--backend", "torch", "--", sys.executable, "-c", _PLACE, **_TASK)
    assert (done.stdout, done.returncode) == ("2 0 3\n", 0)


def test_the_place_of_a_task() -> None:
    place = task_variables({**_TASK, "MASTER_ADDR": "10.0.0.1"})
    assert place.pop("MASTER_PORT").isdigit()
    assert place == {
        "MASTER_ADDR": "10.0.0.1",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
    }
    assert task_variables(_TASK)["MASTER_ADDR"] == "n1"
    other = task_variables({**_TASK, "SLURM_STEP_ID": "1"})["MASTER_PORT"]
    assert other != task_variables(_TASK)["MASTER_PORT"]
    assert is_task(_TASK)
    assert not is_task({**_TASK, "SLURM_STEP_NUM_TASKS": "1"})
    assert not is_task({**_TASK, "SLURM_STEP_ID": "4294967291"})


REMOTE = '#!/bin/sh\necho "$1" >> hosts\nshift\nexec sh -c "$*"\n'


def test_ranks_of_a_pbs_job_meet_by_a_remote_shell(launch: Launch, tmp_path: Path) -> None:
    shell = tmp_path / "rsh"
    shell.write_text(REMOTE)
    shell.chmod(0o755)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "3.x", "DLIO_RSH": str(shell)}
    program = (sys.executable, "-c", _MEET)
    done = launch("--backend", "torch", "--", *program, MASTER_ADDR="127.0.0.1", **job)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{k} 3 0 1 0" for k in range(3)]
    assert sorted((tmp_path / "hosts").read_text().split()) == ["n1", "n2"]
    fails = "import os, sys, time; time.sleep(600) if os.environ['RANK'] == '0' else sys.exit(7)"
    done = launch("--backend", "torch", "--", sys.executable, "-c", fails, **job)
    assert done.returncode == 7


def test_mpirun_gets_hosts_counts_and_variables() -> None:
    environment = {"DLIO_TIERS": "none", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/x", "PATH": "/b"}
    assert passed_variables(environment) == ["DLIO_TIERS", "PATH"]
    line = mpirun_command("mpirun", ["prog"], {"a": 2, "b": 1}, environment, None)
    assert line[:3] == ["mpirun", "--host", "a:2,b:1"]
    assert line[-7:] == ["-x", "DLIO_TIERS", "-x", "PATH", "-n", "3", "prog"]
    line = mpirun_command("m", ["p"], {"a": 2}, {}, "file")
    assert line == ["m", "-machinefile", "file", "-n", "2", "p"]


def test_a_job_whose_node_mpirun_has_lost_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\n[ -z $LOST ] || echo 'PRTE has lost communication with a remote daemon.' >&2\n"
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr("dlio.launch.mpi_launch.find_mpirun", lambda: str(mpirun))
    assert run_under_mpirun(["true"], {"a": 1, "b": 1}) == 0
    monkeypatch.setenv("LOST", "1")
    assert run_under_mpirun(["true"], {"a": 1, "b": 1}) == 1
    assert "mpirun lost a node" in capfd.readouterr().err


def test_srun_places_unequal_numbers_of_tasks() -> None:
    assert "--ntasks-per-node=2" in srun_command(["p"], {"a": 2, "b": 2})
    line = srun_command(["p"], {"a": 2, "b": 1})
    assert {"--distribution=arbitrary", "--nodelist=a,a,b", "--ntasks=3"} <= set(line)


def test_a_job_is_submitted_with_a_script_to_keep(launch: Launch, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@" > called\necho "17;cluster"\n')
    fake.chmod(0o755)
    path = f"{fake.parent}:{os.environ['PATH']}"
    words = ("--slurm", "nodes=2,name=try", "--", "prog", "--x")
    shown = launch("--print", *words, PATH=path)
    assert not (tmp_path / "called").exists()
    done = launch(*words, PATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "called").read_text() == "--parsable try.sbatch\n"
    assert (tmp_path / "try.sbatch").read_text() == shown.stdout
    assert "job 17 is submitted: try.sbatch" in done.stdout
    fake.write_text("#!/bin/sh\necho 'Invalid account' >&2\nexit 1\n")
    refused = launch(*words, PATH=path)
    assert (refused.returncode, "sbatch refuses try.sbatch: Invalid account" in refused.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        ({"LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "3", "DLIO_LAUNCHER_PID": "1"}, 9),
        ({}, 9),
    ],
)
def test_gpus_go_by_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID", "DLIO_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_rank(9) == expected


@pytest.mark.parametrize("place", ["file/tmp", "/proc"])
def test_a_tmpdir_that_cannot_be_used_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / place
    done = subprocess.run(
        module_command("dlio.cli", "run", "-n", "2", __file__),
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, f"TMPDIR: {folder} cannot be written: " in line) == (2, True)


@pytest.mark.parametrize("options", ["size=64m,nr_inodes=2", "size=64m,nr_inodes=4", "size=4k"])
@pytest.mark.parametrize("check", [(), ("--check", "2")], ids=["run", "check"])
def test_a_tmpdir_without_room_is_one_line(
    tmp_path: Path, options: str, check: tuple[str, ...]
) -> None:
    with mounted(tmp_path / "disk", options) as disk:
        (disk / "other").write_bytes(bytes(4096))
        done = subprocess.run(
            module_command("dlio.cli", "run", "-n", "2", *check, __file__),
            env={**os.environ, "TMPDIR": str(disk)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert [path.name for path in disk.iterdir()] == ["other"]
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"TMPDIR: {disk}" in line
    assert "cannot be written: No space left on device; free some space there" in line
