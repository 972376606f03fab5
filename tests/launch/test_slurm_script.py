"""Job scripts: their options, their words, and their course when signals and errors come."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.cli.launch_command import LaunchOptions, Program, job_script, read_program
from dlio.errors import UsageError
from dlio.launch.slurm_script import JobScript, parse_slurm, parse_time, shell_words
from dlio.util.child_processes import end_groups
from tests.conftest import in_time


def test_keys_become_options_of_sbatch() -> None:
    text = "nodes=4,ranks_per_node=8,time=1h30m,memory=64GiB,nodelist=n1,n2,gpus-per-node=a100:4"
    options = parse_slurm([text, "sbatch=--mail-type=END,FAIL", "signal=USR1@300,requeue=no"])
    assert (options.nodes, options.ranks_per_node, options.warning_s) == (4, 8, 300)
    assert not options.requeue
    assert set(options.directives) == {
        *("--time=0-01:30:00", "--mem=64G", "--nodelist=n1,n2", "--gpus-per-node=a100:4"),
        "--mail-type=END,FAIL",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount=x", "did you mean account"),
        ("nodes", "has no value"),
        ("nodes=0", "a whole number from 1"),
        ("nodes=1,nodes=2", "given twice"),
        ("time=90", "with its units"),
        ("time=2h3", "with its units"),
        ("name=a b", "letters, digits"),
        ("account=a;b'", "without spaces and quotes"),
        ("signal=TERM@3", "seconds before the time limit"),
        ("requeue=maybe", "yes or no"),
        ("sbatch=-N4", "a long option"),
        ("sbatch=--nodes=4", "use the key nodes"),
    ],
)
def test_wrong_keys_and_values_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_slurm([text])


def test_words_that_a_terminal_would_obey_are_shown_and_mean_the_same() -> None:
    words = ["a\nb", "$HOME/x\x1b[2J", "a\u202eb", "it's", "--x=\u2028", os.fsdecode(b"\xff"), ""]
    text = shell_words(["printf", "%s\\0", *words])
    assert all(line.isprintable() for line in text.splitlines())
    said = subprocess.run(["bash", "-c", text], capture_output=True, check=True).stdout
    home = os.environ["HOME"]
    assert said.split(b"\0")[:-1] == [os.fsencode(w.replace("$HOME", home)) for w in words]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("", 120),
        ("time=2h", 120),
        ("time=infinite", 120),
        ("time=4m", 60),
        ("time=1:00", 15),
        ("time=0-00:02", 30),
        ("time=2h,signal=3600", 3600),
        ("time=2-00,signal=7200", 7200),
    ],
)
def test_a_short_time_limit_has_a_warning_that_leaves_time_to_train(
    text: str, warning: int
) -> None:
    assert parse_slurm([text] if text else []).warning_s == warning


@pytest.mark.parametrize(
    "text", ["time=2m,signal=120", "time=0:30,signal=USR1@31", "signal=65535,time=18h"]
)
def test_a_time_limit_no_longer_than_the_warning_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="requeued for ever: give a longer time, or a shorter sig"):
        parse_slurm([text])


@given(st.integers(1, 10**7))
def test_times_keep_their_length(seconds: int) -> None:
    days, clock = parse_time("time", f"{seconds}s").split("-")
    hours, minutes, rest = map(int, clock.split(":"))
    assert ((int(days) * 24 + hours) * 60 + minutes) * 60 + rest == seconds
    assert parse_time("time", f"{days}-{clock}") == f"{days}-{clock}"


@pytest.mark.parametrize("word", ["a b", "it's", '"', "`id`", "$(id)", "\\", "a;b", "*", "$1"])
def test_words_reach_the_command_as_they_are_and_variables_are_the_jobs(word: str) -> None:
    line = shell_words(["printf", "%s|%s|%s", word, f"$PLACE/{word}", "${PLACE}x"])
    done = subprocess.run(
        ["bash", "-uc", line],
        env={"PLACE": "/local dir", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert done.stdout == f"{word}|/local dir/{word}|/local dirx"


def _script(pictures: Path, *words: str, stage: bool = False) -> JobScript:
    program = read_program(Program("train", (str(pictures), *words)))
    assert program is not None
    return job_script(program, LaunchOptions(slurm=("nodes=2,time=1h",), stage=stage))


def test_a_run_with_checkpoints_is_requeued_and_resumes(pictures: Path) -> None:
    text = _script(pictures, "--checkpoint", "ck").text()
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "$(ls -1 ck " in text
    assert "dlio launch train --resume" in " ".join(text.replace("\\\n", " ").split())
    text = _script(pictures, "--checkpoint", "ck", "--resume").text()
    assert text.count("--resume") == 1


def test_a_run_without_checkpoints_is_not_requeued(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _script(pictures).text()
    assert "#SBATCH --no-requeue\n" in text
    assert "scontrol" not in text
    assert "without --checkpoint" in capsys.readouterr().err


def test_staging_needs_a_disk(pictures: Path) -> None:
    with pytest.raises(UsageError, match=r"names no data and --tiers"):
        _script(pictures, stage=True)
    with pytest.raises(UsageError, match="has no disk"):
        _script(pictures, "--tiers", "ram:1GiB", stage=True)
    text = _script(pictures, "--tiers", "$TMPDIR:1GiB", stage=True).text()
    text = " ".join(text.replace("\\\n", " ").split())
    where = '--tiers "$TMPDIR:1GiB"'
    assert f"stage {shlex.quote(str(pictures))} {where} --allow-partial" in text
    assert f'dlio evict --job "$SLURM_JOB_ID" {where}' in text


def test_a_staged_copy_is_read_by_the_same_options(pictures: Path) -> None:
    chosen = ("--tiers", "$TMPDIR:1GiB", "--reader-option", "layout=classes")
    text = _script(pictures, *chosen, stage=True).text()
    assert text.count("--reader-option layout=classes") == 2


FAKE = """#!/bin/sh
case $0 in
*/squeue) cat state ;;
*) echo "$(basename $0) $*" >> log ;;
esac
"""
RANKS = """
import signal, sys, time
def end(*_): sys.exit(75)
signal.signal(signal.SIGUSR1, end)
open("ready", "w").close()
time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))
"""


class Start(Protocol):
    def __call__(
        self,
        argument: str,
        code: int,
        *,
        staging: str = "true",
        state: str = "RUNNING",
        environment: Mapping[str, str] | None = None,
        checkpoint: str | None = None,
    ) -> "subprocess.Popen[bytes]": ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run scripts, whose processes end with the test."""
    jobs: list[subprocess.Popen[bytes]] = []

    def begin(argument: str, code: int, **more: Any) -> "subprocess.Popen[bytes]":
        jobs.append(_started(tmp_path, argument, code, **more))
        return jobs[-1]

    yield begin
    end_groups(jobs, 0.0)


def _started(
    folder: Path,
    argument: str,
    code: int,
    *,
    staging: str = "true",
    state: str = "RUNNING",
    environment: Mapping[str, str] | None = None,
    checkpoint: str | None = None,
) -> "subprocess.Popen[bytes]":
    """Run a script with false commands of Slurm's, which write a log."""
    for name in ("squeue", "scontrol", "srun"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    (folder / "state").write_text(state)
    (folder / "ranks.py").write_text(RANKS)
    script = JobScript(
        parse_slurm(["nodes=2"]),
        (sys.executable, "ranks.py", argument, str(code)),
        stage=(("sh", "-c", staging),),
        evict=("evict",),
        resumes=True,
        checkpoint=checkpoint,
    )
    (folder / "job").write_text(script.text())
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
    }
    return subprocess.Popen(
        ["bash", "job"], cwd=folder, env={**own, **(environment or {})}, start_new_session=True
    )


def _log(folder: Path) -> list[str]:
    path = folder / "log"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("code", [0, 2, 75])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_job_ends_with_its_commands_code_and_is_requeued_after_75(
    tmp_path: Path, start: Start, code: int, state: str
) -> None:
    assert start("0", code, state=state).wait(60) == code
    assert _log(tmp_path) == (["scontrol"] if (code, state) == (75, "RUNNING") else ["srun"])


def test_two_requeues_without_a_step_stop_the_job_with_the_reason(
    tmp_path: Path, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "check points"

    def run(step: int | None, code: int = 75, staging: str = "true") -> int:
        if step is not None:
            (folder / f"step-{step:08}").mkdir(parents=True, exist_ok=True)
        return start("0", code, checkpoint="check points", staging=staging).wait(60)

    # Steps between the requeues; a start of its own has not been a requeue.
    assert [run(step) for step in (None, None, 8, None, 16, 120)] == [75] * 6
    assert [run(None), run(None)] == [75, 1]
    assert "requeued twice without a step of training" in capfd.readouterr().err
    assert _log(tmp_path) == ["scontrol"] * 7 + ["srun"]
    # Submitted again, it begins to count again; and so it does after another end.
    assert [run(None), run(None), run(None, 0)] == [75, 75, 0]
    assert [run(None), run(None), run(None)] == [75, 75, 1]
    # Staging that is interrupted goes on where it was.
    assert [run(None, staging="exit 75") for _ in range(4)] == [75] * 4


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_reaches_the_ranks_whose_checkpoint_the_job_awaits(
    tmp_path: Path, start: Start, number: int
) -> None:
    job = start("60", 0)
    in_time((tmp_path / "ready").exists)
    job.send_signal(number)
    assert job.wait(60) == 75
    assert _log(tmp_path) == ["scontrol"]


def test_a_failure_to_stage_ends_the_job_and_a_warning_meanwhile_requeues_it(
    tmp_path: Path, start: Start
) -> None:
    assert start("0", 0, staging="exit 3").wait(60) == 3
    assert _log(tmp_path) == ["srun"]
    waits = "trap 'exit 130' TERM; : > staging; while :; do sleep 0.05; done"
    job = start("0", 0, staging=waits)
    in_time((tmp_path / "staging").exists)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 75
    assert not (tmp_path / "ready").exists()
    assert _log(tmp_path) == ["srun", "scontrol"]


def test_a_warning_is_passed_on_that_comes_while_the_child_is_being_started(
    tmp_path: Path, start: Start
) -> None:
    # Bash sources this file, and then stops before it knows the number of its child.
    slow = "set -T\ntrap 'case $BASH_COMMAND in \"child=$\"*) sleep 0.5 ;; esac' DEBUG\n"
    (tmp_path / "slow").write_text(slow)
    waits = "trap 'exit 130' TERM; : > staging; while :; do sleep 0.05; done"
    job = start("0", 0, staging=waits, environment={"BASH_ENV": str(tmp_path / "slow")})
    in_time((tmp_path / "staging").exists)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 75


def test_only_scripts_of_dlios_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    script = JobScript(parse_slurm(["nodes=2"]), ("true",))
    script.write(str(path))
    script.write(str(path))
    assert path.read_text() == script.text()
    path.write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match="dlio did not write it"):
        script.write(str(path))
