"""Which engine reads samples of `dlio.open`, and what is said if it is not the planned one."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split

import dlio


class _OwnBatches:
    """A batch sampler of the user's, which may look at what has been trained."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[3, 1], [2]])

    def __len__(self) -> int:
        return 2


@pytest.fixture
def data(pictures: Path) -> Iterator[dlio.Dataset]:
    with dlio.open(str(pictures), tiers="ram:64MiB", image_size=16, seed=5, train=False) as opened:
        yield opened


def _batches(loader: dlio.DataLoader) -> tuple[torch.Tensor, list[int]]:
    batches: list[Any] = list(loader)
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]).tolist()


@pytest.mark.parametrize("kind", ["subset", "split", "concat", "nested"])
def test_parts_of_a_data_set_keep_engine_decoding_and_tiers(
    data: dlio.Dataset, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts: dict[str, Any] = {
        "subset": Subset(data, [7, 2, -1, 5, 0]),
        "split": random_split(data, [5, 7])[0],
        "concat": ConcatDataset([data, Subset(data, [1, 1])]),
        "nested": Subset(Subset(data, [9, 8, 7, 6]), [2, 0]),
    }
    part = parts[kind]
    wanted = [part[k] for k in range(len(part))]
    with dlio.DataLoader(part, 3) as loader:
        assert "engine='planned'" in repr(loader)
        assert loader.data.seed == data.seed
        images, labels = _batches(loader)
        assert torch.equal(images, torch.stack([image for image, _ in wanted]))
        assert labels == [label for _, label in wanted]
        assert loader.stats()["engine"] == "planned"
        _batches(loader)
        read = loader.stats()["bytes"]
        assert (read["source"], read["ram"] > 0) == (0, True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "engine", "reason"),
    [
        ({"sampler": iter([3, 1] * 9)}, "threads", "list_iterator chooses"),
        ({"batch_sampler": _OwnBatches()}, "threads", "_OwnBatches chooses"),
        ({"sampler": [3, 1], "timeout": 60}, "threads", "list chooses"),
        ({"workers": "process"}, "torch", "worker processes"),
        ({"batch_size": None}, "threads", "single samples"),
    ],
)
def test_another_engine_is_named_with_the_reason(
    data: dlio.Dataset,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    engine: str,
    reason: str,
) -> None:
    with dlio.DataLoader(data, **options) as loader, caplog.at_level(logging.WARNING, "dlio"):
        assert f"engine={engine!r} since " in repr(loader)
        assert reason in repr(loader)
        for _ in range(2):
            next(iter(loader))
        assert loader.stats()["engine"] == engine
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1  # Once for a loader, not in each epoch.
    assert f"engine '{engine}'" in said[0]
    assert reason in said[0]


def test_a_list_of_batches_is_read_by_dlio_without_a_word(
    data: dlio.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with dlio.DataLoader(data, batch_sampler=[[3, 1], [0]], num_workers=1) as loader:
        assert "engine='planned')" in repr(loader)
        assert [len(labels) for _, labels in loader] == [2, 1]
        assert loader.stats()["engine"] == "planned"
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_another_engine_keeps_the_tiers(data: dlio.Dataset) -> None:
    with dlio.DataLoader(data, 4, sampler=list(range(12))) as loader:
        _batches(loader)
        _batches(loader)
        assert loader.stats()["bytes"]["source"] == 0


def test_lists_and_other_data_sets_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with dlio.DataLoader([1, 2, 3]) as loader:
        assert "engine='torch' since dlio asks list[i]" in repr(loader)
        assert len(list(loader)) == 3
    assert not caplog.records


def test_a_sampler_gets_the_crops_of_each_epoch(pictures: Path) -> None:
    with (
        dlio.open(str(pictures), tiers="none", image_size=16) as data,
        dlio.DataLoader(data, 12, sampler=list(range(12))) as loader,
        dlio.DataLoader(data, 12) as planned,
    ):
        epochs = [_batches(loader)[0] for _ in range(3)]
        assert not torch.equal(epochs[0], epochs[1])
        for images in epochs:
            assert torch.equal(images, _batches(planned)[0])
        data.set_epoch(0)  # The user's choice holds.
        assert torch.equal(_batches(loader)[0], epochs[0])
