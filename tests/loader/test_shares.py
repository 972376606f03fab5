"""Ranks with uneven shares: the same global batches, each sample once, dealt as was asked for."""

import json
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

import dlio
from dlio.errors import UsageError
from dlio.plan.order import Order

BODY = str(Path(__file__).with_name("shares_checks.py"))
N = 101
SHARES = ([5, 1, 6], [10, 1, 1], [4, 4, 4], [2, 9, 1], [1, 2, 9])


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["batch", "global"])
@pytest.mark.daily("global")
def test_shares_may_change_between_passes_and_on_resume(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, mode: str
) -> None:
    from tests.drawn import small_pictures

    small_pictures(tmp_path / "pictures", images=N)
    done = mpirun(3, "-W", "error", BODY, str(tmp_path / "pictures"), mode)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reports.sort(key=lambda rank: int(rank["rank"]))
    for rank in reports:
        # Nothing is under way once passes have been dropped, and no peer was waited for in vain.
        calls = rank["calls"]
        assert "leave" not in calls
        assert calls["_agree_on_end"] == len(SHARES)
        assert calls["_settle"] == 2 * len(SHARES)
    for number, shares in enumerate(SHARES):
        # The last goes on after five steps of the one before.
        epoch, begin = min(number, 3), 60 * (number == 4)
        expected = Order(N, 3, epoch).samples(np.arange(begin, N)).tolist()
        steps = list(zip(*(rank["passes"][number] for rank in reports), strict=True))
        for step, parts in enumerate(steps):
            batch = expected[12 * step : 12 * step + 12]
            assert sorted(chain(*parts)) == sorted(batch)
            if len(batch) == 12:
                assert [len(part) for part in parts] == shares
            else:
                sizes = zip(parts, shares, strict=True)
                assert all(abs(len(part) - 5 * most / 12) < 1 for part, most in sizes)
        assert sorted(chain(*chain(*steps))) == sorted(expected)


def test_shares_want_an_order_of_dlios_and_a_mode_that_deals(pictures: Path) -> None:
    with dlio.open(str(pictures), tiers="none", image_size=32) as data:
        with pytest.raises(UsageError, match="choose mode batch or global"):
            dlio.DataLoader(data, 4, mode="local", shares=[4])
        with pytest.raises(UsageError, match="leave the sampler out"):
            dlio.DataLoader(data, 4, sampler=SequentialSampler(data), shares=[4])
        with dlio.DataLoader(data, 4, shares=[4]) as loader:
            assert sum(len(images) for images, _ in loader) == len(data)
