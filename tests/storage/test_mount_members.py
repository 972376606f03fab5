"""A mount knows its ranks by their numbers in the job, whoever was lost before it was made."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dlio.storage.mount as mounting
from dlio.comm.single import SingleCommunicator
from dlio.data.reader import open_reader
from dlio.storage.mount import mount


def test_ranks_that_mount_data_after_a_loss_keep_their_numbers(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As held-out data of a script that is opened when two ranks are lost already."""
    monkeypatch.setattr(mounting, "number_in_job", lambda _: 2)
    with (
        closing(open_reader(str(pictures))) as reader,
        mount(reader, "ram:64MiB", SingleCommunicator()) as mounted,
    ):
        assert mounted.ranks_of([2]).node_of.tolist() == [0]
        mounted.regroup([2])
        assert mounted.ranks.size == 1


def test_a_mount_that_a_loss_interrupts_is_made_once_more_by_all(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    original = mounting.Mount.close

    def close(self: Any) -> None:
        closed.append(self)
        original(self)

    def uniform(_: object, act: Any) -> Any:
        act()
        return act()  # Another rank was lost before it had succeeded.

    monkeypatch.setattr(mounting.Mount, "close", close)
    monkeypatch.setattr(mounting, "uniform", uniform)
    with closing(open_reader(str(pictures))) as reader:
        mounted = mount(reader, "ram:64MiB", SingleCommunicator())
        assert len(closed) == 1
        assert closed[0] is not mounted
        mounted.close()
