"""Iterable data sets on several ranks."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import dlio


class FourNumbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (0, 1)])
def test_ranks_that_each_read_all_of_an_iterable_data_set_say_so_once(
    rank: int, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dlio")
    mesh: Any = SimpleNamespace(data_ranks=lambda: SimpleNamespace(rank=rank, size=ranks))
    with dlio.DataLoader(FourNumbers(), 2, mesh=mesh) as loader:
        assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1], [2, 3]] * 2
    says = [f"each of {ranks} ranks reads all that FourNumbers yields"]
    said = [text.partition(" there")[0] for text in caplog.messages]
    assert said == (says if ranks > 1 and not rank else [])
