"""Folders train/ and val/ that are opened as two classes are warned of."""

import logging
import shutil
from pathlib import Path

import pytest

import dlio
from dlio.data.reader import open_reader


@pytest.mark.parametrize(
    "names", [("train", "val"), ("Training", "test"), ("train", "valid"), ("train", "dev")]
)
def test_parts_of_a_data_set_are_no_classes(
    pictures: Path, tmp_path: Path, names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        shutil.copytree(pictures, tmp_path / "both" / name)
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path / "both")).close()
    (said,) = [each.getMessage() for each in caplog.records]
    assert f"{names[0]} and {names[1]}" in said or f"{names[1]} and {names[0]}" in said
    assert said.endswith(f"open {tmp_path}/both/{names[0]}")


def test_classes_are_not_warned_of(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train", "val", "bus"):  # A train may be a vehicle.
        shutil.copytree(next(each for each in pictures.iterdir()), tmp_path / "three" / name)
    for path in (pictures, tmp_path / "three"):
        with dlio.open(str(path), tiers="none") as data:
            assert len(data.classes) == 3
    assert not caplog.records


def test_a_lone_train_folder_is_warned_of(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(pictures, tmp_path / "one" / "train")
    open_reader(str(tmp_path / "one")).close()
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.endswith(f"open {tmp_path}/one/train")


def test_parts_of_another_format_are_to_be_opened_by_themselves(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / "packed" / name).mkdir(parents=True)
        (tmp_path / "packed" / name / "000000.dlio").write_bytes(b"a shard")
    with pytest.raises(dlio.SourceError, match=r"packed/train .*: open it by itself"):
        open_reader(str(tmp_path / "packed"))
