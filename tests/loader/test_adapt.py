"""torchvision's folders are read through tiers, and their samples stay the same."""

import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DistributedSampler, Subset

import dlio
from dlio.loader.third_party import adapters
from tests.image.pipeline_table import PipelineCase


@pytest.fixture
def image_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torchvision's ImageFolder, or, without it, a class that is as it is where dlio looks."""
    try:
        from torchvision.datasets import ImageFolder
    except (ImportError, RuntimeError):
        yield _stand_in(monkeypatch)
    else:
        yield ImageFolder


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def default_loader(path: str) -> Any:
        with Image.open(path) as image:
            return image.convert("RGB")

    class DatasetFolder(torch.utils.data.Dataset[Any]):
        opened = 0

        def __init__(self, root: str, transform: Any = None, target_transform: Any = None) -> None:
            self.root, self.loader = root, default_loader
            self.transform, self.target_transform = transform, target_transform
            self.classes = sorted(p.name for p in Path(root).iterdir() if p.is_dir())
            self.samples = [
                (str(path), number)
                for number, name in enumerate(self.classes)
                for path in sorted((Path(root) / name).iterdir())
            ]

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> Any:
            type(self).opened += 1
            path, target = self.samples[index]
            sample = self.loader(path)
            if self.transform is not None:
                sample = self.transform(sample)
            if self.target_transform is not None:
                target = self.target_transform(target)
            return sample, target

    DatasetFolder.__module__ = "torchvision.datasets.folder"
    DatasetFolder.__getitem__.__qualname__ = "DatasetFolder.__getitem__"
    module: Any = types.ModuleType("torchvision.datasets.folder")
    module.DatasetFolder = DatasetFolder
    monkeypatch.setitem(sys.modules, "torchvision.datasets.folder", module)
    return DatasetFolder


def _transform(picture: Any) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.array(picture.resize((16, 16))))


def _kinds(folder: Any) -> dict[str, Any]:
    return {
        "folder": folder,
        "subset": Subset(folder, [7, 2, 2, 11]),
        "joined": ConcatDataset([folder, Subset(folder, [3])]),
        "subset of joined": Subset(ConcatDataset([folder, folder]), [1, 20, 5, 13]),
    }


@pytest.mark.parametrize("kind", ["folder", "subset", "joined", "subset of joined"])
@pytest.mark.parametrize("tiers", [None, "ram:32MiB"])
def test_its_samples_come_from_the_tiers(
    pictures: Path, image_folder: Any, kind: str, tiers: str | None
) -> None:
    folder = image_folder(str(pictures), _transform, lambda target: target + 100)
    data = _kinds(folder)[kind]
    wanted = [data[k] for k in range(len(data))]
    with dlio.DataLoader(data, 5, num_workers=2, tiers=tiers) as loader:
        images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
        assert loader.stats()["engine"] == "planned"
        assert torch.equal(images, torch.stack([image for image, _ in wanted]))
        assert labels.tolist() == [label for _, label in wanted]
        list(loader)
        assert loader.stats()["bytes"]["source"] == 0
        assert loader.stats()["bytes"]["ram"] > 0


def test_with_a_sampler_it_is_followed_and_read_from_the_tiers(
    pictures: Path, image_folder: Any
) -> None:
    data = image_folder(str(pictures), _transform)
    sampler: Any = DistributedSampler(data, 2, 1, shuffle=False)
    with dlio.DataLoader(data, 2, sampler=sampler, num_workers=2, tiers="ram:32MiB") as loader:
        labels = [label for _, part in loader for label in part.tolist()]
        assert labels == [data[k][1] for k in range(1, 12, 2)]
        assert loader.stats()["engine"] == "planned"


def test_a_folder_with_a_loader_of_its_own_is_left_alone(pictures: Path, image_folder: Any) -> None:
    data = image_folder(str(pictures), _transform)
    data.loader = lambda path: Image.new("RGB", (16, 16))
    loader = dlio.DataLoader(data, 4, num_workers=1)
    assert sum(int(images.sum()) for images, _ in loader) == 0
    assert loader.stats()["engine"] == "threads"


_STEPS = "Resize(40), CenterCrop(32), ToTensor, Normalize"


@pytest.mark.parametrize(
    "steps",
    [
        _STEPS,
        "RandomResizedCrop(32), HorizontalFlip, ToTensor",
        "Resize((40, 56)), ToTensor",
        "RandomResizedCrop(32), Grayscale(3), ToTensor",
    ],
)
def test_a_known_pipeline_is_done_without_pillow(
    image_folder: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    folder = image_folder(str(pictures), PipelineCase("v1", steps, True, "Pillow").pipeline())
    wanted = [folder[k] for k in range(len(folder))]
    opened: list[object] = []
    opening = Image.open

    def counted(*given: Any) -> Any:
        opened.append(given)
        return opening(*given)

    monkeypatch.setattr(Image, "open", counted)
    with dlio.DataLoader(folder, 4, num_workers=1, tiers="none") as loader:
        images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert loader.stats()["engine"] == "planned"
        subset = dlio.DataLoader(Subset(folder, [3, 1]), 2, num_workers=1, tiers="none")
        ((some, _),) = list(subset)
        subset.close()
        (first, *_) = loader
        rows = dlio.DataLoader(folder, 2, num_workers=1, tiers="none", collate_fn=list)
        kept = [image for batch in rows for image, _ in batch]
        rows.close()
    assert not opened
    # In torch's layout: `view` works, and networks compute in the layout of their input.
    assert first[0].is_contiguous()
    assert all(image.is_contiguous() for image in kept)
    for image, label, (expected, number) in zip(images, labels, wanted, strict=True):
        assert int(label) == number
        assert (image - expected).abs().mean() < 1 / 255 / 0.224
    assert torch.equal(some, images[[3, 1]])


def _passes(loader: Any, folder: Any) -> list[tuple[list[int], list[int], float]]:
    """(labels, sizes of the pictures, least value) of a pass after each change."""
    seen: list[tuple[list[int], list[int], float]] = []

    def note() -> None:
        batches = list(loader)
        assert all(type(batch) is list for batch in batches)  # As torch's default_collate has it.
        labels = [int(label) for _, each in batches for label in each]
        seen.append((labels, [each.shape[-1] for each, _ in batches], float(batches[0][0].min())))

    note()
    folder.transform.transforms[1].size = (24, 24)
    note()
    folder.transform = PipelineCase("v1", f"{_STEPS}, HorizontalFlip", True, "Pillow").pipeline()
    note()
    folder.target_transform = lambda label: label + 10
    note()
    folder.target_transform = None
    folder.samples[0] = (folder.samples[0][0], 7)
    note()
    folder.samples = folder.samples[1:3]
    note()
    return seen


@pytest.mark.parametrize("persistent", [False, True])
def test_changes_between_passes_are_followed_as_in_torch(
    image_folder: Any, pictures: Path, persistent: bool
) -> None:
    pipeline = PipelineCase("v1", _STEPS, True, "Pillow").pipeline
    options: Any = {"num_workers": 1, "persistent_workers": persistent}
    if persistent:
        folder = image_folder(str(pictures), pipeline())
        with dlio.DataLoader(folder, 2, tiers="none", **options) as loader:
            sizes = [batch[0].shape[-1] for batch in loader]
            folder.transform.transforms[1].size = (24, 24)
            assert [batch[0].shape[-1] for batch in loader] == sizes
        return
    theirs, ours = (image_folder(str(pictures), pipeline()) for _ in range(2))
    wanted = _passes(torch.utils.data.DataLoader(theirs, 2, **options), theirs)
    with dlio.DataLoader(ours, 2, tiers="none", **options) as loader:
        made = _passes(loader, ours)
    assert [each[:2] for each in made] == [each[:2] for each in wanted]
    assert [each[2] for each in made] == pytest.approx([each[2] for each in wanted], abs=0.02)


def test_another_choice_of_samples_is_followed(image_folder: Any, pictures: Path) -> None:
    pipeline = PipelineCase("v1", _STEPS, True, "Pillow").pipeline()
    subset = Subset(image_folder(str(pictures), pipeline), [0, 1, 2, 3])
    with dlio.DataLoader(subset, 3, num_workers=1, tiers="none") as loader:
        first = torch.cat([images for images, _ in loader])
        subset.indices = [3, 0]
        assert torch.equal(torch.cat([images for images, _ in loader]), first[[3, 0]])


@pytest.mark.parametrize(
    ("steps", "change", "reason"),
    [
        ("Resize(40, bicubic), ToTensor", {}, "Resize in its transform has options, or a place,"),
        ("Pad(3), ToTensor", {}, "Pad in its transform is not known"),
        ("Resize(40)", {}, "its transform makes no tensors"),
        (_STEPS, {"target_transform": lambda label: label}, "it has a target_transform"),
        ("", {"transform": _transform}, "function in its transform is not of torchvision"),
        ("", {"transform": None}, "it has no transform"),
    ],
)
def test_what_keeps_a_folder_slow_is_said_once(
    image_folder: Any,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    steps: str,
    change: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(adapters, "_told", set())
    # Tests before may have turned logging off.
    caplog.set_level(logging.WARNING, "dlio")
    pipeline = PipelineCase("v1", steps, True, "Pillow").pipeline() if steps else None
    folder = image_folder(str(pictures), **{"transform": pipeline, **change})
    for _ in range(2):
        loader = dlio.DataLoader(folder, 4, tiers="none", collate_fn=list)
        samples = [sample for batch in loader for sample in batch]
        assert len(samples) == len(folder)
        loader.close()
    assert [reason in each.getMessage() for each in caplog.records] == [True]
    assert "dlio.open" in caplog.records[0].getMessage()
