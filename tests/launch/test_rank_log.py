"""`dlio launch --logs`: each rank's output in a file of its own; `--follow`: a job's output."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.errors import UsageError
from dlio.launch.rank_log import rank_number
from dlio.launch.slurm_follow import follow
from dlio.launch.slurm_script import JobScript, parse_slurm, submit
from dlio.util.live_line import without_progress
from dlio.util.whole_files import unwritable
from tests.conftest import SOURCES, FullDisk, in_time

SAYS = """
import os, sys
rank = next(os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "RANK") if n in os.environ)
print("\\x1edlio-progress {}")
print("part", end=""); print("\\x1edlio-progress {}")
print("out", rank); print("err", rank, file=sys.stderr)
sys.stdout.write("no end"); sys.stdout.flush()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_each_rank_has_a_log_and_its_output_is_passed_on(tmp_path: Path, backend: str) -> None:
    argv = [sys.executable, "-m", "dlio.cli", "launch", "-n", "2", "--backend", backend]
    done = subprocess.run(
        [*argv, "--logs", "a/logs", "--", sys.executable, "-c", SAYS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        log = (tmp_path / "a" / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.replace("part", "part\n").split("\n")) == sorted(
            ["part", f"out {rank}", f"err {rank}", "no end"]
        )
        assert f"out {rank}" in done.stdout
        assert f"err {rank}" in done.stderr


@pytest.mark.cold
def test_a_log_without_room_is_told_once_and_the_output_is_passed_on(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    argv = [sys.executable, "-m", "dlio.launch.rank_log", str(tmp_path)]
    code = "for k in range(3000): print('line', k, flush=True)"
    with full_disk(1000):
        done = subprocess.run(
            [*argv, sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": SOURCES},
            capture_output=True,
            text=True,
            check=True,
            timeout=400,
        )
    assert done.stdout.splitlines() == [f"line {k}" for k in range(3000)]
    (said,) = done.stderr.splitlines()
    assert f"{tmp_path / 'rank-0.log'} cannot be written: File too large; raise the limit" in said
    assert (tmp_path / "rank-0.log").read_text() == done.stdout[:1000]


@pytest.mark.cold
def test_the_logged_process_is_the_program(tmp_path: Path) -> None:
    """It has the program's number, gets its signals, and ends as it does."""
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), os._exit(7)))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(300)"
    )
    argv = [sys.executable, "-m", "dlio.launch.rank_log", str(tmp_path), sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7
        assert process.stdout.read() == "told\n"
    log = tmp_path / "rank-0.log"
    assert in_time(lambda: log.read_text() == f"{process.pid}\ntold\n")


def test_mpiruns_number_counts_in_a_job_of_slurms() -> None:
    assert rank_number({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "3"}) == "3"
    assert rank_number({"SLURM_PROCID": "2"}) == "2"
    assert rank_number({}) == "0"
    assert without_progress(b"a\x1edlio-progress {}\n") == b"a"


def test_ranks_that_start_again_have_no_logs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLIO_LOGS", "logs")
        with pytest.raises(SystemExit) as ended:
            main(["train", "x", "-n", "2", "--fault-tolerance", "restart", "--epochs", "1"])
    assert ended.value.code == 2


SCONTROL = """#!/bin/sh
n=$(cat count); echo $((n + 1)) > count
case $n in
0) echo "JobId=7 JobState=PENDING Reason=None" ;;
1) echo "line 1" > out; printf half >> out; echo "JobId=7 JobState=RUNNING" ;;
2) echo "scontrol: error: no answer" >&2; exit 1 ;;
3) echo "JobId=7 JobState=PENDING Reason=PartitionConfig Dependency=(null)" ;;
4) echo " and half" >> out; printf end >> out; echo "JobId=7 JobState=END Reason=x" ;;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(("end", "code"), [("COMPLETED", 0), ("FAILED", 1), ("TIMEOUT", 1)])
def test_a_job_is_followed_to_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: str,
    code: int,
) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL.replace("=END", f"={end}"))
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "count").write_text("0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert follow("7", "out", every_s=0) == code
    assert capsys.readouterr().out.splitlines() == [
        *("job 7 is PENDING", "line 1", "job 7 is RUNNING"),
        *("job 7 is PENDING (PartitionConfig)", "half and half"),
        *(f"job 7 is {end}", "end"),
    ]


def test_a_silent_slurm_ends_the_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UsageError, match="Slurm does not answer"):
        follow("7", "out", every_s=0)


def test_the_output_of_a_job_is_where_sbatch_writes_it() -> None:
    script = JobScript(parse_slurm(["name=x"]), ("true",))
    assert script.output("7") == "x-7.out"
    script = JobScript(parse_slurm(["name=x,output=logs/%x.%j"]), ("true",))
    assert script.output("7") == "logs/x.7"
    script = JobScript(parse_slurm(["output=%N.out"]), ("true",))
    with pytest.raises(UsageError, match="with %x and %j alone"):
        script.output("7")


@pytest.mark.parametrize(
    ("accounts", "said", "code"),
    [
        ("echo COMPLETED", "job 7 is COMPLETED", 0),
        ("echo 'CANCELLED by 0'", "job 7 is CANCELLED by 0", 1),
        ("exit 1", "Slurm no longer knows how job 7 has ended", None),
    ],
)
def test_the_end_of_a_job_that_slurm_has_forgotten_is_not_guessed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    accounts: str,
    said: str,
    code: int | None,
) -> None:
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    (tmp_path / "sacct").write_text(f"#!/bin/sh\n{accounts}\n")
    for name in ("scontrol", "sacct"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if code is None:
        with pytest.raises(UsageError, match=said):
            follow("7", "out", every_s=0)
    else:
        assert follow("7", "out", every_s=0) == code
        assert said in capsys.readouterr().out


def test_a_file_in_the_place_of_the_folder_of_logs_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit) as ended:
        main(["launch", "-n", "2", "--logs", str(tmp_path / "file"), "--", "true"])
    assert ended.value.code == 2
    assert "this is not a folder; name another place" in capsys.readouterr().err
    said = unwritable("--logs a", NotADirectoryError(errno.ENOTDIR, "Not a directory"))
    assert "a file is in the place of a folder" in str(said)
    assert "free some space" in str(unwritable("a", OSError(errno.ENOSPC, "No space left")))
    assert "mount it writable" in str(unwritable("a", OSError(errno.EROFS, "Read-only")))


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("42", "42"),
        ("42;cluster", "42"),
        ("Welcome, 3 jobs are waiting\\nSubmitted batch job 42", "42"),
        ("ok", None),
    ],
)
def test_the_number_of_a_job_is_found_in_what_sbatch_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, job: str | None
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nprintf '{printed}\\n'\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if job is None:
        with pytest.raises(UsageError, match="names no job: it printed ok"):
            submit("job.sbatch")
    else:
        assert submit("job.sbatch") == job


def test_options_of_the_launcher_do_not_name_the_job() -> None:
    command = ("dlio", "launch", "--backend", "mpi", "--logs", "logs", "train", "data")
    assert JobScript(parse_slurm(["nodes=2"]), command).name == "dlio-train"
