"""Folders of tiers as users name them: missing ones, and larger than their disk."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.errors import TierError


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.arange(64.0).reshape(16, 4))
    return tmp_path / "rows.npy"


def test_a_missing_folder_is_named_where_it_is_given(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"away is not there: create it.*--tiers \(tiers=\)"):
        dlio.open(rows, tiers=f"ram:1MiB,{tmp_path / 'away'}:1GiB")
    with pytest.raises(TierError, match=r"rows.npy is not a folder: name one of this node"):
        dlio.open(rows, tiers=[(rows, "1GiB")])
    with dlio.open(rows) as data, pytest.raises(TierError, match="away is not there"):
        data.retier(f"{tmp_path / 'away'}:1GiB")


def test_a_script_with_a_missing_folder_shows_one_error(rows: Path, tmp_path: Path) -> None:
    script = f"import dlio\ndlio.open({str(rows)!r}, tiers={f'{tmp_path}/away:1GiB'!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.count("Traceback") == 1
    assert "away is not there" in done.stderr.splitlines()[-1]


def test_folders_of_the_variable_are_checked_too(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TIERS", f"{tmp_path / 'away'}:1GiB")
    with pytest.raises(TierError, match="away is not there"):
        dlio.open(rows)
    dlio.open(rows, tiers="none").close()


@pytest.mark.parametrize(("size", "said"), [("64MiB", 0), ("4000TiB", 1)])
def test_a_tier_larger_than_its_disk_is_told(
    rows: Path, tmp_path: Path, size: str, said: int
) -> None:
    (tmp_path / "tier").mkdir()
    with (
        dlio.open(rows, tiers=f"{tmp_path / 'tier'}:{size}") as data,
        dlio.DataLoader(data, batch_size=4) as loader,
    ):
        assert len(list(loader)) == 4
        notes = [note for note in loader.stats()["notes"] if "has room for" in note]
    assert len(notes) == said


def test_the_default_tier_has_room_for_small_samples_and_their_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DLIO_TIERS", raising=False)
    np.save(tmp_path / "small.npy", np.zeros((100_000, 2), np.float32))
    with (
        dlio.open(tmp_path / "small.npy") as data,
        dlio.DataLoader(data, batch_size=4096, shuffle=True, num_workers=1) as loader,
    ):
        sources = []
        for _ in range(2):
            samples = sum(len(batch["data"]) for batch in loader)
            sources.append(loader.stats()["bytes"]["source"])
    assert samples == 100_000
    assert sources[0] >= 800_000
    assert sources[1] == 0
