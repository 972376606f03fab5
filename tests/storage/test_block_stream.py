"""Streamed blocks: brought once, and removed when nobody needs them any more."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dlio.storage.block_stream import BlockStream, StreamProgress
from dlio.util.trusted_files import closing_descriptor
from dlio.util.user_folders import open_folder
from tests.conftest import in_time


def test_a_block_that_comes_while_old_ones_are_removed_is_kept(tmp_path: Path) -> None:
    """A thread that removes blocks may be paused, while others go on and bring more."""
    with closing_descriptor(open_folder(str(tmp_path))) as folder:
        progress = StreamProgress(folder, 1, 0)
    there, dropped = {0}, []

    def streamed() -> list[int]:
        if 0 in there:
            # The rank goes on to the last position, for which another thread brings block 9.
            there.update({8, 9})
            progress.tell(1, 8)
        return sorted(there, reverse=True)

    def drop(block: int) -> None:
        there.discard(block)
        dropped.append(block)

    def fill(block: int, timeout_s: float) -> bool:
        there.add(block)
        return True

    targets = SimpleNamespace(stream=lambda here, is_over: None, streamed_blocks=streamed)
    hierarchy = SimpleNamespace(
        targets=targets, drop_streamed=drop, block_fetcher=SimpleNamespace(fill=fill)
    )
    numbers = np.arange(10)
    order = SimpleNamespace(
        blocks=numbers, starts=np.arange(11), span=lambda: (numbers, numbers + 1)
    )
    stream = BlockStream(
        cast(Any, hierarchy), cast(Any, order), np.ones(10, np.bool_), 1, 1, progress, 1, 1
    )
    assert in_time(lambda: 0 not in there, 60)
    stream.done(10)
    assert in_time(lambda: not there, 60)
    stream.close()
    assert {8, 9}.isdisjoint(dropped[: dropped.index(0)])


def test_a_lost_rank_holds_no_block_back(tmp_path: Path) -> None:
    with closing_descriptor(open_folder(str(tmp_path))) as folder:
        first, lost, third = (StreamProgress(folder, 3, rank) for rank in range(3))
    for each, position in ((first, 5), (lost, 2), (third, 7)):
        each.tell(1, position)
    assert first.span(1) == (2, 7)
    for each, position in ((first, 8), (third, 9)):
        each.tell(2, position)
    assert first.span(2) is None
    first.keep([0, 2])
    assert first.span(2) == (8, 9)
