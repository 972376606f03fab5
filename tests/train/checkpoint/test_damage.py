"""Damage to each file of a checkpoint: one state is read as it was saved, and it is said if that is
an older one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.train.checkpoint.checkpoint_store import Checkpoints

_FILES = (".metadata", "__0_0.distcp", "about.json")


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"rank0/w": torch.arange(500.0) * step, "all/m": torch.full((30,), float(step))}


def _flip(share: float) -> Callable[[Path, Path], object]:
    def flip(file: Path, _: Path) -> None:
        data = bytearray(file.read_bytes())
        place = int(share * (len(data) - 1))
        data[place] ^= 1 << place % 8
        file.write_bytes(data)

    return flip


def _instead(make: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    def replace(file: Path, _: Path) -> None:
        file.unlink()
        make(file)

    return replace


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "gone": lambda file, _: file.unlink(),
    "empty": lambda file, _: os.truncate(file, 0),
    "half": lambda file, _: os.truncate(file, file.stat().st_size // 2),
    "short": lambda file, _: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file, _: file.write_bytes(file.read_bytes() + bytes(99)),
    "sparse": lambda file, _: os.truncate(file, 1 << 36),
    "zeros": lambda file, _: file.write_bytes(bytes(file.stat().st_size)),
    "older": lambda file, older: shutil.copy(older / file.name, file),
    "link": _instead(lambda file: file.symlink_to("/dev/zero")),
    "pipe": _instead(os.mkfifo),
    "folder": _instead(os.mkdir),
    **{f"bit at {share}": _flip(share) for share in (0, 0.2, 0.4, 0.5, 0.6, 0.8, 1)},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(str(folder), SingleCommunicator(), keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, _state(step), {"epoch": 10 * step})
            checkpoints.wait()
        assert not checkpoints.failures
    return folder


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_said_and_an_older_state_is_read_or_none_is_mixed(
    name: str, damage: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    DAMAGES[damage](folder / "step-00000002" / name, folder / "step-00000001")
    with Checkpoints(str(folder), SingleCommunicator()) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None
        step = newest.about["step"]
        assert isinstance(step, int)
        read = newest.read("")
        assert newest.about["epoch"] == 10 * step
        assert all(torch.equal(read[key], value) for key, value in _state(step).items())
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (step == 1)
    assert all("step-00000002" in line and "trying an older" in line for line in said)
    if damage not in ("longer", "sparse") and not damage.startswith("bit at"):
        assert step == 1
