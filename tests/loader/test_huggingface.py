"""Hugging Face data sets of images are read through tiers, and their samples stay the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

import dlio
from dlio.data.links import following_links
from tests.hostile.test_state_files import STRANGE


@pytest.fixture(scope="module")
def datasets() -> Any:
    """Hugging Face's library, which takes as long to import as torch."""
    return pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def images(pictures: Path, datasets: Any) -> Any:
    """Twelve drawn pictures: half in the data set, half in files that it names."""
    files = sorted(pictures.glob("*/*"))
    rows = [
        {"bytes": path.read_bytes(), "path": None} if k % 2 else {"bytes": None, "path": str(path)}
        for k, path in enumerate(files)
    ]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "caption": datasets.Value("string"),
            "weight": datasets.Value("float32"),
        }
    )
    columns = {
        "image": rows,
        "label": [k % 3 for k in range(len(files))],
        "caption": [f"picture {k}" * (k % 4) for k in range(len(files))],
        "weight": [k / 8 for k in range(len(files))],
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def secret(tmp_path: Path, pictures: Path) -> Path:
    """A picture of the user's that no data set holds."""
    path = tmp_path / "secret.jpg"
    path.write_bytes(next(pictures.glob("*/*")).read_bytes())
    return path


def _naming(datasets: Any, path: Path) -> Any:
    features = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": None, "path": str(path)}]
    return datasets.Dataset.from_dict({"image": rows}, features=features)


@pytest.mark.parametrize("kind", STRANGE)
def test_a_pipe_or_device_that_a_data_set_names_is_refused(
    datasets: Any, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "strange"
    STRANGE[kind](path)
    with pytest.raises(dlio.SourceError, match="strange") as raised:
        list(dlio.DataLoader(_naming(datasets, path), 1, collate_fn=list))
    assert len(str(raised.value).splitlines()) == 1


def test_parquet_does_not_read_the_files_that_its_paths_name(
    datasets: Any, tmp_path: Path, secret: Path
) -> None:
    _naming(datasets, secret).to_parquet(str(tmp_path / "a.parquet"))
    data = datasets.Dataset.from_parquet(
        str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(dlio.SourceError, match=r"does not lie .*DLIO_FOLLOW_LINKS"):
        list(dlio.DataLoader(data, 1, collate_fn=list))
    with following_links(True):
        assert len(list(dlio.DataLoader(data, 1, collate_fn=list))) == 1


def _transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    pixels = [torch.from_numpy(np.array(picture.resize((16, 16)))) for picture in rows["image"]]
    return {"pixels": pixels, "label": rows["label"], "caption": rows["caption"]}


def _samples(loader: dlio.DataLoader) -> list[dict[str, Any]]:
    return [
        {name: column[k] for name, column in batch.items()}
        for batch in loader
        for k in range(len(batch["label"]))
    ]


@pytest.mark.parametrize("kind", ["whole", "selected", "subset", "joined"])
def test_its_samples_come_from_the_tiers(images: Any, kind: str) -> None:
    transformed = images.with_transform(_transform)
    data = {
        "whole": transformed,
        "selected": images.shuffle(seed=1).select(range(2, 9)).with_transform(_transform),
        "subset": Subset(transformed, [7, 2, 2, 11]),
        "joined": ConcatDataset([transformed, Subset(transformed, [3])]),
    }[kind]
    with dlio.DataLoader(data, 5, num_workers=2, tiers="ram:32MiB") as loader:
        results = _samples(loader)
        assert loader.stats()["engine"] == "planned"
        assert len(results) == len(data)
        for k, sample in enumerate(results):
            wanted = data[k]
            assert sample.keys() == wanted.keys()
            assert torch.equal(sample["pixels"], wanted["pixels"])
            assert int(sample["label"]) == wanted["label"]
            assert sample["caption"] == wanted["caption"]
        list(loader)
        assert loader.stats()["bytes"]["source"] == 0
        assert loader.stats()["bytes"]["ram"] > 0


def test_without_a_transform_pictures_are_pillows(images: Any) -> None:
    with dlio.DataLoader(images, 4, num_workers=1, collate_fn=list, tiers="ram:32MiB") as loader:
        results = [sample for batch in loader for sample in batch]
        assert loader.stats()["engine"] == "planned"
    for sample, wanted in zip(results, images, strict=True):
        assert np.array_equal(np.array(sample.pop("image")), np.array(wanted.pop("image")))
        assert sample == wanted


def test_the_planned_shuffle_gives_each_once(images: Any) -> None:
    data = images.with_transform(_transform)
    with dlio.DataLoader(data, 5, shuffle=True, num_workers=2, seed=3) as loader:
        epochs = [[float(s["pixels"].float().mean()) for s in _samples(loader)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", ["formatted", "columns", "lists", "missing"])
def test_others_are_left_to_threads_and_give_the_same(images: Any, kind: str) -> None:
    data = {
        "formatted": images.remove_columns("image").with_format("torch"),
        "columns": images.with_transform(_transform, columns=["image", "label", "caption"]),
        "lists": images.add_column("boxes", [[k, k] for k in range(12)]).with_transform(_transform),
        "missing": images.add_column("odd", [None, *["x"] * 11]).with_transform(_transform),
    }[kind]
    with dlio.DataLoader(data, 4, num_workers=2) as loader:
        assert [int(s["label"]) for s in _samples(loader)] == [k % 3 for k in range(12)]
        assert loader.stats()["engine"] == "threads"


def test_a_picture_that_cannot_be_decoded_is_named(images: Any, datasets: Any) -> None:
    broken = images.cast_column("image", datasets.Image(decode=False)).to_list()
    broken[5]["image"] = {"bytes": b"\xff\xd8 no picture", "path": None}
    data = datasets.Dataset.from_list(broken, features=images.features).with_transform(_transform)
    with (
        dlio.DataLoader(data, 4, num_workers=1) as loader,
        pytest.raises(dlio.DlioError, match=r"\[5\] cannot be decoded"),
    ):
        list(loader)
