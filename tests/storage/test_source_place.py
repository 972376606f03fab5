"""The place of a data set's source: fields and `file://` do not make a local file remote."""

import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dlio.comm import world
from dlio.data.reader import open_reader
from dlio.data.requests import observed_requests
from dlio.storage.file_system_kind import file_system_of
from dlio.storage.mount import MountOptions, mount
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions

FORMS = ("{0}/a.h5", "{0}/a.h5::x", "file://{0}/a.h5::x", "{0}/a.h5::x,y", "zip://a.h5::{0}/a.zip")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(64 * 4096, dtype=np.float64).reshape(64, -1)
            file["y"] = np.arange(64)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_fields_and_links_of_a_url_leave_a_local_file_local(folder: Path, form: str) -> None:
    assert file_system_of(form.format(folder)).kind == file_system_of(str(folder)).kind


@pytest.mark.parametrize("url", ["s3://b/a.h5::x", "zip://a.h5::s3://b/a.zip", "memory://a.h5"])
def test_a_url_of_a_server_stays_remote(url: str) -> None:
    assert file_system_of(url).network


def test_several_files_with_fields_are_where_the_first_is(folder: Path) -> None:
    reader = open_reader([f"{folder}/a.h5::x,y", f"{folder}/b.h5::x,y"])
    assert file_system_of(reader.path).mount == file_system_of(str(folder)).mount


def test_a_local_file_with_fields_is_asked_for_four_ranges_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{folder}/a.h5::x,y"
    reader = open_reader(path)
    asked, most, guard, read = [0], [0], threading.Lock(), type(reader).read

    def counted(*given: Any) -> Any:
        with guard:
            asked[0] += 1
            most[0] = max(most[0], asked[0])
        try:
            return read(*given)
        finally:
            with guard:
                asked[0] -= 1

    monkeypatch.setattr("dlio.storage.source_requests.can_read_payloads", lambda: False)
    monkeypatch.setattr(type(reader), "read", counted)
    with mount(reader, "ram:8MiB", world(), options=MountOptions()) as mounted:
        assert mounted.requests == 4
    for name in ("tier", "other"):
        (folder / name).mkdir()
    done = stage(path, StageOptions(tiers=f"{folder}/tier:64MiB"))
    assert done.complete
    assert (done.workers, done.request_bytes) == (4, 0)
    assert 1 <= most[0] <= 4
    # `dlio verify --heal` opens it from any folder.
    monkeypatch.chdir(folder)
    assert stage("a.h5::x,y", StageOptions(tiers=f"{folder}/other:64MiB")).complete
    (about,) = (folder / "other").rglob("about.json")
    assert f"{folder}/a.h5::x,y" in about.read_text()


def test_names_of_fields_make_no_more_requests(folder: Path) -> None:
    def requests(path: str, tier: str) -> int:
        (folder / tier).mkdir()
        with observed_requests() as seconds:
            assert stage(path, StageOptions(tiers=f"{folder}/{tier}:64MiB")).complete
        return len(seconds)

    assert requests(f"{folder}/a.h5::x,y", "named") == requests(f"{folder}/a.h5", "plain") > 0
