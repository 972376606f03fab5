"""A batch whose samples are all skipped has the fields of others, with no rows."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio.loader.contract import Sample

SIDES = (10, 12)


def _tar(path: Path, damaged: int, suffix: str = "jpg") -> str:
    """Four samples, of which the first are damaged."""
    stream = io.BytesIO()
    Image.new("RGB", SIDES).save(stream, "JPEG")
    values = io.BytesIO()
    np.save(values, np.ones(3, np.float32))
    with tarfile.open(path, "w") as archive:
        for k in range(4):
            picture = stream.getvalue() if k >= damaged else b"\xff\xd8 no picture"
            members = {suffix: picture, "txt": b"words", "npy": values.getvalue(), "id": b"7"}
            members["json"] = b'{"a": 1}'
            for name, data in members.items():
                info = tarfile.TarInfo(f"{k}.{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return str(path)


def _batches(path: str, maps: Any = None, **options: Any) -> list[Any]:
    with dlio.open(path, tiers="none", on_error="skip", image_size=None) as data:
        source = data if maps is None else data.map(maps)
        with dlio.DataLoader(source, 2, **options) as loader:
            return list(loader)


def test_fields_of_a_dictionary_have_their_types_and_shapes(tmp_path: Path) -> None:
    first, second = _batches(_tar(tmp_path / "a.tar", 2))
    assert first.keys() == second.keys()
    for name, value in second.items():
        if isinstance(value, torch.Tensor):
            assert (first[name].dtype, len(first[name])) == (value.dtype, 0)
            assert first[name].dim() == value.dim()
        else:
            assert first[name] == []
    assert first["npy"].shape == (0, 3)
    assert first["jpg"].shape == (0, 3, 0, 0)


class _Turns:
    """A sampler of the sound samples, then of the others: batches are made one after another."""

    def __init__(self) -> None:
        self.order = [2, 3]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def _chosen(sample: Sample) -> Sample:
    return {"half": sample["npy"] / 2, "words": sample["txt"], "seen": sample["jpg"].sum()}


def test_fields_that_functions_make_are_as_in_other_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _tar(tmp_path / "a.tar", 2)
    with dlio.open(path, tiers="none", on_error="skip", image_size=None) as data:
        mapped = data.map(_chosen)
        turns = _Turns()
        with dlio.DataLoader(mapped, sampler=turns, batch_size=2) as loader:
            (second,) = list(loader)
            turns.order = [0, 1]
            (first,) = list(loader)
    assert first.keys() == second.keys()
    assert (first["half"].shape, first["words"]) == ((0, 3), [])
    assert first["seen"].dtype == second["seen"].dtype
    assert "was made" not in caplog.text
    unknown = _batches(_tar(tmp_path / "b.tar", 4), _chosen)
    assert [each.shape for each in unknown] == [(0,), (0,)]
    assert "all samples of a batch were skipped before any other was made" in caplog.text


def test_whole_pictures_with_boxes_are_two_empty_lists(tmp_path: Path) -> None:
    for k in range(4):
        for folder in ("images", "labels"):
            (tmp_path / folder).mkdir(exist_ok=True)
        place = tmp_path / "images" / f"{k}.jpg"
        if k < 2:
            place.write_bytes(b"\xff\xd8 no picture")
        else:
            Image.new("RGB", SIDES).save(place)
        (tmp_path / "labels" / f"{k}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    first, second = _batches(str(tmp_path))
    assert first == ([], [])
    assert [len(each) for each in second] == [2, 2]
