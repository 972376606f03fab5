"""`dlio join` and `dlio leave`: requests to a job that runs."""

import os
import tempfile
from pathlib import Path

import pytest

from dlio.cli.resize import ResizeOptions, join, leave
from dlio.comm.survival.active_ranks import RankRequest
from dlio.comm.survival.rank_requests import RankRequests, read_wanted
from dlio.errors import UsageError
from dlio.launch.job_folder import begin_job
from dlio.util.settings import DONE


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job of 2 ranks with 2 spares."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "dlio-job-abc"
    folder.mkdir(mode=0o700)
    (folder / "alive").touch()  # As a folder of a job has it.
    assert begin_job(str(folder), 2, 2) == "abc"
    return folder


def test_ranks_see_the_newest_request(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DONE, str(job / "done"))
    join(ResizeOptions("abc", 2))
    leave(ResizeOptions("abc"))
    assert read_wanted(str(job)) == (RankRequest(2, 3), 4)
    assert RankRequests().newest() == RankRequest(2, 3)
    (job / "wanted").write_text("3 x")
    assert RankRequests().newest() == RankRequest(-1, 0)
    assert sorted(os.listdir(job)) == ["alive", "wanted"]


def test_what_is_not_possible_is_refused(job: Path) -> None:
    with pytest.raises(UsageError, match="so 5 are not possible; start it with more --spares"):
        join(ResizeOptions("abc", 3))
    with pytest.raises(UsageError, match="so 0 are not possible"):
        leave(ResizeOptions("abc", 2))
    with pytest.raises(UsageError, match="nothing: not a job of yours that runs here"):
        join(ResizeOptions("nothing"))
    assert read_wanted(str(job)) == (RankRequest(0, 2), 4)


def test_a_job_of_another_user_is_not_believed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.lstat(job).st_uid + 1)
    with pytest.raises(UsageError, match="not a job of yours"):
        join(ResizeOptions("abc"))
