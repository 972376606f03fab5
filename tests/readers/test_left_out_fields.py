"""Fields that samples lack, and samples that became fields, are told."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError


def _picture() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    return stream.getvalue()


def _tar(path: Path, members: Mapping[str, bytes]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def test_fields_that_crops_and_labels_leave_out_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"0.jpg": _picture(), "0.cls": b"1", "0.txt": b"a cat", "0.seg.png": _picture()}
    path = _tar(tmp_path / "a.tar", members)
    with dlio.open(path, tiers="none", image_size=None) as data:
        assert sorted(data[0]) == ["cls", "jpg", "seg.png", "txt"]
    assert "leave out" not in caplog.text
    with dlio.open(path, tiers="none") as data:
        assert len(data[0]) == 2
    assert "pairs of crop and label leave out its seg.png, txt: image_size=None" in caplog.text


def test_pairs_that_have_all_fields_are_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dlio.open(_tar(tmp_path / "a.tar", {"0.jpg": _picture(), "0.cls": b"1"})) as data:
        assert len(data[0]) == 2
    assert "leave out" not in caplog.text


@pytest.mark.parametrize(
    ("names", "is_told"),
    [
        (["img.001.jpg", "img.001.cls", "img.002.jpg", "img.002.cls"], True),
        (["img.1.jpg", "img.2.jpg"], True),
        (["a.01.txt", "a.02.txt", "b.01.txt", "b.02.txt"], True),
        (["a.0.jpg", "a.1.jpg", "b.0.jpg", "b.1.jpg"], False),  # Views of a scene.
        (["a.left.jpg", "a.right.jpg"], False),
        (["001.jpg", "001.cls", "002.jpg", "002.cls"], False),
    ],
)
def test_samples_that_a_dot_in_their_names_makes_fields_are_told(
    names: list[str], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"jpg": _picture(), "cls": b"1", "txt": b"a"}
    made = {name: data[name.rpartition(".")[2]] for name in names}
    open_reader(_tar(tmp_path / "a.tar", made))
    assert ("as a name's first dot ends its key" in caplog.text) == is_told


def test_a_sample_that_hdf5_cannot_read_is_an_error_that_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TRUST", "1")  # Without a process that reads it first.
    for k in range(2):
        (tmp_path / "a").mkdir(exist_ok=True)
        with h5py.File(tmp_path / "a" / f"{k}.h5", "w") as file:
            data = np.random.default_rng(k).integers(0, 9, (40, 50))
            made = file.create_dataset("x", data=data, chunks=(40, 50), compression="lzf")
            place = made.id.get_chunk_info(0)
    path = tmp_path / "a" / "1.h5"
    whole = bytearray(path.read_bytes())
    whole[place.byte_offset : place.byte_offset + place.size] = b"\xff" * place.size
    path.write_bytes(whole)
    with dlio.open(tmp_path, tiers="none") as opened:
        assert opened[0]["x"].shape == (40, 50)
        with pytest.raises(SourceError, match=r"a/1\.h5::x cannot be read"):
            opened[1]


def test_masks_that_are_gifs_are_not_said_to_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, suffix in (("images", "png"), ("masks", "gif")):
        (tmp_path / folder).mkdir()
        Image.new("L", (8, 8), 1).save(tmp_path / folder / f"a.{suffix}")
    reader = open_reader(str(tmp_path))
    assert (reader.format, len(reader)) == ("masks", 1)
    assert "leaves out" not in caplog.text
