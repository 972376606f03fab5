"""Ranks of one job whose data sets differ are refused, before anything is read."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlio.comm import Communicator
from dlio.data.agreement import check_same_data
from dlio.data.reader import Reader, open_reader
from dlio.errors import UsageError
from dlio.storage.mount import mount
from dlio.testing.thread_ranks import run_ranks
from dlio_staging.pack_folder import pack
from tests.conftest import MpiRun


def _refused(readers: Sequence[Reader], *, mounted: bool = False) -> str:
    """Return the error of all ranks, one for each reader; "" if none is refused."""
    said = [""] * len(readers)

    def body(comm: Communicator) -> None:
        try:
            if mounted:
                mount(readers[comm.rank], "ram:64MiB", comm).close()
            else:
                check_same_data(readers[comm.rank], comm)
        except UsageError as error:
            said[comm.rank] = str(error)

    run_ranks(len(readers), body)
    assert len(set(said)) == 1  # All ranks are told alike.
    return said[0]


@pytest.fixture
def copies(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    return [Path(shutil.copytree(pictures, tmp_path / name)) for name in ("a", "b")]


@pytest.mark.parametrize("mounted", [False, True])
def test_ranks_with_fewer_pictures_are_named(copies: list[Path], mounted: bool) -> None:
    first, second = copies
    next(second.rglob("*.jpg")).unlink()
    of_rank = [first, second, first, first] if mounted else [first, second, first, first, second]
    readers = [open_reader(str(path)) for path in of_rank]
    message = _refused(readers, mounted=mounted)
    assert "ranks 0 and 2, 3 have" in message
    assert ("rank 1 has" if mounted else "ranks 1 and 4 have") in message
    assert f"{first} (folder, 12 samples" in message
    assert f"{second} (folder, 11 samples" in message
    assert "same path" in message
    assert "\n" not in message


def test_copies_of_packed_data_are_one_data_set(copies: list[Path], tmp_path: Path) -> None:
    pack(str(copies[0]), str(tmp_path / "packed"), workers=1)
    shutil.copytree(tmp_path / "packed", tmp_path / "other", copy_function=shutil.copyfile)
    assert not _refused([open_reader(str(tmp_path / name)) for name in ("packed", "other")])


def test_the_same_path_with_other_times_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((5, 4)))
    readers = [open_reader(str(path))]
    os.utime(path, (7, 7))
    readers.append(open_reader(str(path)))
    assert "other files or times of change" in _refused(readers)


@pytest.mark.parametrize("options", [{}, {"select": (slice(0, 2),)}])
def test_other_parts_of_one_file_differ(tmp_path: Path, options: dict[str, Any]) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 4)))
    np.savez(tmp_path / "y.npz", x=np.zeros((5, 4)), y=np.zeros(5))
    whole = open_reader(str(tmp_path / "x.npy"), select=(slice(0, 3),))
    part = open_reader(str(tmp_path / "x.npy"), **options)
    assert "rank 0 has" in _refused([whole, part])
    fields = [open_reader(f"{tmp_path}/y.npz::{names}") for names in ("x", "y", "x,y", "y", "x")]
    assert "rank 2 has" in _refused(fields)


def test_many_different_data_sets_are_counted(tmp_path: Path) -> None:
    readers = []
    for k in range(6):
        np.save(tmp_path / f"{k}.npy", np.zeros((k + 1, 2)))
        readers.append(open_reader(str(tmp_path / f"{k}.npy")))
    assert "and 2 more" in _refused(readers)


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("command", ["pack", "stage", "train"])
def test_commands_refuse_ranks_with_different_data(
    copies: list[Path], tmp_path: Path, mpirun: MpiRun, command: str
) -> None:
    next(copies[1].rglob("*.jpg")).unlink()
    out = tmp_path / "out"
    out.mkdir()
    more = {
        "pack": f"'{out}/packed'",
        "stage": f"'--tiers', '{out}/tier:1GiB'",
        "train": f"'--epochs', '1', '--report', '{out}/report'",
    }
    body = "import os, sys; from dlio.cli import main; "
    body += f"main(['{command}', '{tmp_path}/' + 'ab'[int(os.environ['OMPI_COMM_WORLD_RANK'])], "
    done = mpirun(2, "-c", body + f"{more[command]}])")
    assert done.returncode == 2, done.stderr
    assert "rank 1 has" in done.stderr
    assert not any(path.is_file() for path in out.rglob("*"))
