"""The cause of a job's end is printed last: as a rank has left it, or as the launcher knows it."""

import faulthandler
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dlio.integrations.script.script_failure import telling_failures
from dlio.launch.rank_failures import RankFailure, failures_in, leave_failure
from dlio.launch.rank_output import ErrorFilter
from dlio.util.settings import FAILURES
from dlio.util.trusted_files import temporary_name

RULE = "-" * 74 + "\n"
ABORTED = [
    RULE,
    "prterun has exited due to process rank 1 with PID 0 on node vm calling\n",
    '"abort". This may have caused other processes in the application to be\n',
    "terminated by signals sent by prterun (as reported here).\n",
    RULE,
]
KILLED = [
    RULE,
    "prterun noticed that process rank 1 with PID 2269 on node vm exited on\n",
    "signal 9 (Killed).\n",
    RULE,
]
LEFT = [
    RULE,
    "prterun detected that one or more processes exited with non-zero status,\n",
    "thus causing the job to be terminated. The first process to do so was:\n",
    "\n",
    "   Process name: [prterun-vm-1995@1,1]\n",
    "   Exit code:    5\n",
    RULE,
]
GONE = "dlio: error: rank 1 is gone\n"
BY_SIGNAL = (
    "rank 1 was ended by SIGKILL, and with it the others; the kernel does so when memory runs out"
)


def _shown(folder: Path, lines: list[str], *failures: RankFailure) -> list[str]:
    for each in failures:
        (folder / f"failed-{each.rank}").write_text(json.dumps(asdict(each)))
    sorter = ErrorFilter(folder=str(folder))
    return [shown for line in lines for shown in sorter.feed(line)] + sorter.end()


def test_a_traceback_and_its_line_come_last_and_once(tmp_path: Path) -> None:
    failures = [RankFailure(k, 1.0 + k, "Traceback\nKeyError\n", "ended at a:1: X") for k in (0, 1)]
    shown = _shown(tmp_path, [*ABORTED, "late\n"], *failures)
    assert shown == [
        "late\n",
        "Traceback\n",
        "KeyError\n",
        "dlio: error: ranks 0 and 1 ended at a:1: X\n",
    ]


def test_the_cause_wins_over_those_that_missed_the_rank(tmp_path: Path) -> None:
    follows = RankFailure(0, 1.0, "", "waited for rank 1", follows=True)
    cause = RankFailure(1, 2.0, "", "ended at a:1: X")
    later = RankFailure(2, 3.0, "", "ended at a:7: Y")
    shown = _shown(tmp_path, ABORTED, follows, cause, later)
    assert shown == [
        "dlio: then rank 2 ended at a:7: Y\n",
        "dlio: error: rank 1 ended at a:1: X\n",
    ]


def test_a_bus_error_is_said_with_its_causes(tmp_path: Path) -> None:
    by_bus_error = [line.replace("9 (Killed)", "7 (Bus error)") for line in KILLED]
    (line,) = _shown(tmp_path, by_bus_error)
    assert line.startswith("dlio: error: rank 1 was ended by SIGBUS, and with it the others; ")
    assert "a file mapped into memory was cut off" in line
    assert "/dev/shm" in line


def test_a_rank_that_is_interrupted_with_others_does_not_hide_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    with pytest.raises(KeyboardInterrupt), telling_failures("train.py", 0):
        raise KeyboardInterrupt
    assert _shown(tmp_path, KILLED) == [f"dlio: error: {BY_SIGNAL}\n"]
    assert "KeyboardInterrupt" in _shown(tmp_path, [])[-1]  # Nobody else was lost.


@pytest.mark.parametrize("has_stderr", [True, False])
def test_a_script_runs_where_standard_error_is_no_file(
    monkeypatch: pytest.MonkeyPatch, has_stderr: bool
) -> None:
    faulthandler.disable()  # As in a notebook.
    stderr = io.StringIO() if has_stderr else None
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            with telling_failures("train.py", 0):
                pass
    finally:
        faulthandler.enable(2)


def test_a_signal_or_an_exit_code_is_said_with_its_rank(tmp_path: Path) -> None:
    follows = RankFailure(0, 1.0, "", "waited for rank 1", follows=True)
    for lines, failures in ((KILLED, []), ([GONE, *KILLED], []), (KILLED, [follows])):
        shown = _shown(tmp_path, lines, *failures)
        assert shown[-1] == f"dlio: error: {BY_SIGNAL}\n"
        assert not any(RULE in line for line in shown)
    (tmp_path / "failed-0").unlink()
    code = "dlio: error: rank 1 ended by itself with exit code 5, and with it the others\n"
    assert _shown(tmp_path, LEFT) == [code]
    assert _shown(tmp_path, [GONE, *LEFT]) == [GONE]  # A rank has said more itself.
    assert _shown(tmp_path, ABORTED) == ABORTED


def test_ranks_leave_failures_where_the_launcher_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = RankFailure(3, 1.5, "", "ended at a:1: X")
    monkeypatch.delenv(FAILURES, raising=False)
    assert not leave_failure(failure)
    monkeypatch.setenv(FAILURES, str(tmp_path))
    assert leave_failure(failure)
    assert failures_in(str(tmp_path)) == [failure]


# Launchers' variables, such as RANK, are hidden from scripts.
ENDING = """
import dlio.comm, os, sys, torch
from torch.utils.data import DataLoader
how, rank = sys.argv[1], str(dlio.comm.world().rank)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, k):
        if how == "worker" and k == 13:
            raise KeyError("sample 13")
        return torch.full((4,), float(k))
def fail():
    if how == "all" or (how == "one" and rank == "1"):
        raise KeyError("mine")
    if how == "exit" and rank == "1":
        sys.exit("no more")
    if how == "code":
        sys.exit(3)
    if how == "printed" and rank == "1":
        print("loss is nan, stopping"); sys.exit(1)
    if how == "leave" and rank == "1":
        os._exit(5)
    if how == "kill" and rank == "1":
        os.kill(os.getpid(), 9)
    if how == "crash" and rank == "1":
        import ctypes
        ctypes.string_at(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Data(), batch_size=8, num_workers=1 if how == "worker" else 0):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    fail()
if how == "done":
    sys.exit(0)
"""
ENDS = {
    "all": (1, r"dlio: error: ranks? [01 and]+ ended at script.py:14: KeyError: 'mine'"),
    "one": (1, r"dlio: error: rank 1 ended at script.py:14: KeyError: 'mine'"),
    "exit": (1, r"dlio: error: rank 1 ended by sys.exit with code 1 at script.py:16: no more"),
    "code": (3, r"dlio: error: ranks? [01 and]+ ended by sys.exit with code 3 at script.py:18"),
    "leave": (5, r"dlio: error: rank 1 ended by itself with exit code 5, .*"),
    "kill": (137, r"dlio: error: rank 1 was ended by SIGKILL, and with it the others.*"),
    "crash": (139, r"dlio: error: rank 1 was ended by SIGSEGV, and with it the others"),
    "worker": (1, r"dlio: error: rank [01] ended at script.py:30: KeyError: .* 'sample 13'"),
    "printed": (1, r"dlio: error: rank 1 ended .* script.py:20, after it printed: loss is nan, .*"),
    "done": (0, r""),
}


@pytest.mark.mpi
@pytest.mark.cold("nightly")
@pytest.mark.parametrize("backend", ["mpi", "torch"])
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.nightly
@pytest.mark.daily("one-mpi", "kill-mpi", "exit-torch", "done-mpi", "printed-mpi")
def test_the_end_of_a_rank_is_the_last_line(how: str, backend: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDING)
    code, last = ENDS[how]
    argv = ["-m", "dlio.cli", "run", "-n", "2", "--backend", backend, "script.py", how]
    done = subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DLIO_TIMEOUT": "120"},
    )
    assert done.returncode == code, done.stderr
    if last:
        lines = done.stderr.splitlines()
        assert re.fullmatch(last, lines[-1]), done.stderr
        assert "MPI_ABORT" not in done.stderr
        assert "prterun" not in done.stderr
        assert done.stderr.count("Traceback") <= (3 if how == "worker" else 1)


def test_a_failure_that_is_being_written_is_none_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    assert leave_failure(RankFailure(1, 0.0, "", "ended"))
    (written,) = tmp_path.iterdir()
    (tmp_path / temporary_name(written.name)).touch()
    assert [each.rank for each in failures_in(str(tmp_path))] == [1]
