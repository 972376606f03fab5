"""Modes of the files that dlio writes for colleagues, and of those that it keeps for itself."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from dlio.util.folders import open_private
from dlio_staging.pack_folder import pack
from dlio_staging.pack_plan import PackOptions


@pytest.fixture(params=[0o002, 0o022, 0o027, 0o077, 0])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _modes(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in files}


def test_packed_files_have_the_mode_of_any_new_file(umask: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(4):
        (source / str(number % 2)).mkdir(parents=True, exist_ok=True)
        picture = np.full((8, 8, 3), 9 * number, np.uint8)
        cv2.imwrite(str(source / str(number % 2) / f"{number}.png"), picture)
    for kind in ("native", "tar", "hdf5", "zarr"):
        pack(str(source), str(tmp_path / kind), options=PackOptions(format=kind))
        modes = _modes(tmp_path / kind)
        assert set(modes.values()) == {0o664 & ~umask}, kind


def test_checkpoints_have_the_mode_of_any_new_file(umask: int, tmp_path: Path) -> None:
    with Checkpoints(str(tmp_path), SingleCommunicator()) as checkpoints:
        checkpoints.save(3, {"all/w": torch.ones(2)}, {})
        checkpoints.wait()
    modes = _modes(tmp_path)
    assert "step-00000003/__0_0.distcp" in modes
    assert modes.pop(".lock") == 0o600  # No group may write there, so only the owner locks it.
    assert set(modes.values()) == {0o664 & ~umask}
    assert stat.S_IMODE((tmp_path / "step-00000003").stat().st_mode) == stat.S_IMODE(
        tmp_path.stat().st_mode
    )


def test_tiers_stay_private(umask: int, tmp_path: Path) -> None:
    os.close(open_private(str(tmp_path), "top", "set", marked=2))
    for path in (tmp_path / "top", tmp_path / "top" / "set"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
