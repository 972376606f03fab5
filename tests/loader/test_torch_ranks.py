"""Ranks of torch.distributed, without MPI, share the data as MPI's do."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TorchRun

BODY = str(Path(__file__).with_name("torch_ranks_checks.py"))
N = 103


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import small_pictures

    root = tmp_path_factory.mktemp("ranks") / "pictures"
    small_pictures(root, images=N)
    return root


def test_ranks_of_torch_share_the_data(torchrun: TorchRun, folder: Path) -> None:
    outputs = torchrun(4, BODY, str(folder), "ram:64MiB", "batch", "4", "4", "2")
    lines = [[json.loads(line) for line in text.splitlines()] for text in outputs]
    reports = [each[0] for each in lines]
    for epoch in range(2):
        steps = [chain.from_iterable(each["epochs"][epoch]["steps"]) for each in reports]
        assert sorted(chain.from_iterable(steps)) == list(range(N))
    # Four pretended nodes: samples went from rank to rank, not from the source again.
    later = [each["epochs"][1]["stats"] for each in reports]
    assert sum(stats["bytes"]["peer"] for stats in later) > 0
    assert sum(stats["sent"] for stats in later) == sum(stats["bytes"]["peer"] for stats in later)
    assert sum(stats["bytes"]["source"] for stats in later) == 0
    _check_numbers([each[1] for each in lines])


def _check_numbers(reports: list[dict[str, Any]]) -> None:
    by_rank = [list(chain.from_iterable(each["numbers"])) for each in reports]
    assert sorted(chain.from_iterable(by_rank)) == list(range(43))
    assert len({len(each["numbers"]) for each in reports}) == 1  # As many steps on every rank.
    # Two data-parallel groups of two: the ranks of one model have the same samples.
    for key, count in (("mesh", 43), ("images", N)):
        assert reports[0][key] == reports[1][key]
        assert reports[2][key] == reports[3][key]
        both = chain.from_iterable(reports[0][key] + reports[2][key])
        assert sorted(both) == list(range(count))
