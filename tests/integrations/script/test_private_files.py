"""Rank 0 alone writes a script's files, and the other ranks do as if they had."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("files") / "writing.py"


def _run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
    )


def _files(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files, None for folders, without the cache that torch makes for
    itself, in one of the processes or another."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not any(part.startswith("torchinductor_") for part in path.parts)
    }


@pytest.mark.mpi
def test_files_are_those_of_one_process(tmp_path: Path) -> None:
    saved, printed = {}, {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        (folder / "tmp").mkdir(parents=True)
        (folder / "tries").write_text("4")
        (folder / "out" / "run0").mkdir(parents=True)
        start = [] if ranks == 1 else ["-m", "dlio.cli", "run", "-n", str(ranks)]
        done = _run(folder, *start, str(SCRIPT))
        assert done.returncode == 0, done.stderr
        printed[ranks] = done.stdout
        saved[ranks] = _files(folder)
        left = [name for name in os.listdir(folder / "tmp") if name.startswith("dlio-run-")]
        assert not left
    assert printed[1] == printed[2]
    assert saved[1].keys() == saved[2].keys()
    exact = ("log.csv", "train.log", "tries", "state.json", "x.npy", "text.txt")
    for name, text in saved[1].items():
        if name.endswith(exact):
            assert saved[2][name] == text, name
    before, after = (
        torch.load(tmp_path / str(ranks) / "out" / "run1" / "best.pt") for ranks in (1, 2)
    )
    assert torch.allclose(before["weight"], after["weight"], atol=1e-6)
    seen = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert len(seen) == 2
    assert seen[0] == seen[1]  # Both ranks have seen the same files.
    assert done.stderr.count("rank 0 alone wrote the script's files") == 1
    assert "is written by every rank" not in done.stderr


@pytest.mark.mpi
def test_a_write_that_slips_past_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import io, os, subprocess, sys
io.FileIO(sys.argv[1], "a").write(b"line")
subprocess.run(["true"])
"""
    )
    (tmp_path / "tmp").mkdir()
    target = tmp_path / "target"
    target.write_text("")
    done = _run(tmp_path, "-m", "dlio.cli", "run", "-n", "2", str(script), str(target))
    assert done.returncode == 0, done.stderr
    assert f"{target} is written by every rank" in done.stderr
    assert "starts other programs, such as true" in done.stderr


@pytest.mark.mpi
def test_the_first_write_meets_the_folder_of_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        """
import os, subprocess
subprocess.run(["mkdir", "-p", os.environ["TMPDIR"] + "/dlio-run-killed"])
open("log", "w").close()
"""
    )
    (tmp_path / "tmp").mkdir()
    done = _run(tmp_path, "-m", "dlio.cli", "run", "-n", "2", "script.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
def test_files_that_have_the_ranks_number_in_their_names_are_written_by_each(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import os
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
for name in (f"part-{rank:03}.txt", f"run/{rank}/log.txt", "epoch1.txt", "all.txt"):
    os.makedirs(os.path.dirname(os.path.abspath(name)), exist_ok=True)
    with open(name, "a") as file:
        file.write(f"{rank}")
"""
    )
    (tmp_path / "tmp").mkdir()
    for turn in (1, 2):  # Files of an earlier run are there the second time.
        done = _run(tmp_path, "-m", "dlio.cli", "run", "-n", "2", str(script))
        assert done.returncode == 0, done.stderr
        for name in ("epoch1.txt", "all.txt"):
            assert (tmp_path / name).read_text() == "0" * turn
        for rank in (0, 1):
            assert (tmp_path / f"part-{rank:03}.txt").read_text() == str(rank) * turn
            assert (tmp_path / "run" / str(rank) / "log.txt").read_text() == str(rank) * turn


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.cold
def test_the_folder_of_a_killed_rank_is_removed(tmp_path: Path) -> None:
    killed = tmp_path / "tmp" / "dlio-run-killed"
    killed.mkdir(0o700, parents=True)
    (killed / "alive").touch(0o600)
    (tmp_path / "script.py").write_text("open('log.txt', 'w').write('x')")
    done = _run(tmp_path, "-m", "dlio.cli", "run", "-n", "2", "script.py")
    assert done.returncode == 0, done.stderr
    assert not killed.exists()


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_ctrl_c_and_a_killed_rank_leave_no_folder(backend: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "script.py").write_text(
        """
import glob, os, signal, sys, time
open("log.txt", "w").write("x")
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
if rank == 0:
    while not glob.glob(os.environ["TMPDIR"] + "/**/files/**/log.txt", recursive=True):
        time.sleep(0.05)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(int(os.environ["DLIO_LAUNCHER_PID"]), signal.SIGINT)
time.sleep(300)
"""
    )
    command = ["-m", "dlio.cli", "run", "-n", "2", "--backend", backend, "script.py"]
    for end in ("killed", "interrupted"):
        done = _run(tmp_path, *command, end)
        assert done.returncode == (130 if end == "interrupted" else 137), done.stderr
        assert not list(temporary.glob("dlio-*"))
