"""The state that the living nodes have together."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from dlio.agent.snapshot import Slots
from dlio.comm.single import SingleCommunicator
from dlio.train.ledger_file import Line
from dlio.train.snapshot.copying import Facts, turn_of, write_slot
from dlio.train.snapshot.journal import Journal, lines_until
from dlio.train.snapshot.saved import COMMON, Choice, Part, choose, newest_state


def _part(writer: str, turn: int, members: Sequence[int], alike: bool = True) -> Part:
    return {
        "writer": writer,
        "turn": turn,
        "text": 1,
        "data": 1,
        "alike": alike,
        "members": list(members),
    }


def _parts(
    common: Sequence[int], alike: bool = True, members: Sequence[int] = (0, 1, 2), **own: list[int]
) -> list[Part]:
    """Parts of ranks r0, r1, ... and the common ones."""
    parts = [_part(COMMON, turn, members, alike) for turn in common]
    return parts + [
        _part(f"rank-{name[1:]}", turn, members, alike)
        for name, turns in own.items()
        for turn in turns
    ]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (_parts([]), None),
        (_parts([], r0=[4]), None),
        # Rank 2 was on the lost node.
        (_parts([4, 6], r0=[4, 6], r1=[4, 6]), Choice(6, {0: 6, 1: 6}, 6)),
        # Rank 1 had not copied the last step yet: one step is made again.
        (_parts([4, 6], r0=[4, 6], r1=[2, 4]), Choice(4, {0: 4, 1: 4}, 6)),
        # The common part of the last step was not whole yet.
        (_parts([2, 4], r0=[4, 6], r1=[4, 6]), Choice(4, {0: 4, 1: 4}, 6)),
        # Nobody has all of a step: the newest, with the parts that there are.
        (_parts([4, 6], r0=[4, 6], r1=[0, 2]), Choice(6, {0: 6}, 6)),
        # Rank 1 was lost long ago; its part is of no use.
        (_parts([8], members=(0, 2), r0=[8], r1=[2], r2=[8]), Choice(8, {0: 8, 2: 8}, 8)),
        # Models of their own: the slowest rank's place, everyone's newest model.
        (_parts([4, 8], alike=False, r0=[6, 8], r1=[2, 4]), Choice(4, {0: 8, 1: 4}, 8)),
        # All paused after the same step: none is made again.
        (_parts([6, 8], alike=False, r0=[6, 8], r1=[6, 8]), Choice(8, {0: 8, 1: 8}, 8)),
    ],
)
def test_the_newest_whole_state_is_chosen(parts: list[Part], expected: Choice | None) -> None:
    assert choose(parts) == expected


def test_turns_grow_through_steps_and_epochs() -> None:
    places = [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True)]
    turns = [turn_of(updates, is_between) for updates, is_between in places]
    assert turns == sorted(set(turns))


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    common = {
        "model/weight": torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
        "model/half": torch.randn(7).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "step": torch.tensor(5, dtype=torch.int64),
    }
    facts: Facts = {"alike": True, "members": [3], "about": {}}
    own = {"random": torch.get_rng_state(), "sums": torch.ones(3, dtype=torch.float64)}
    with Slots(str(tmp_path), COMMON) as slots, Slots(str(tmp_path), "rank-3") as mine:
        write_slot(mine, 6, own, facts)
        facts["about"] = {"updates": 3}
        write_slot(slots, 6, common, facts)
    state = newest_state(SingleCommunicator(), str(tmp_path))
    assert state is not None
    assert (state.ranks, state.about, state.turn) == (1, {"updates": 3}, 6)
    assert state.is_of_one_step
    for prefix, tensors in (("all/", common), ("rank0/", own)):
        read = state.read(prefix)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(read[name], tensor), name
            assert read[name].dtype == tensor.dtype


def test_nodes_without_copies_have_no_state(tmp_path: Path) -> None:
    assert newest_state(SingleCommunicator(), str(tmp_path)) is None


class _Trail:
    """A dealing that has trained some batches, one per optimizer step."""

    def __init__(self, *batches: tuple[int, list[list[int]]]) -> None:
        self.batches = list(batches)

    @property
    def closed(self) -> int:
        return len(self.batches)

    def trail(self, since: int) -> Iterator[tuple[int, int, int, int, list[int]]]:
        for number, (step, shares) in enumerate(self.batches[since:], since + 1):
            for member, samples in enumerate(shares):
                yield step, len(self.batches) - number, len(shares), member, samples


def _line(step: int, rank: int, samples: list[int], update: int, ranks: int) -> Line:
    line: Line = {"epoch": 1, "step": step, "rank": rank, "samples": samples}
    line["update"], line["ranks"] = update, ranks
    return line


def test_a_journal_has_the_lines_up_to_a_turn(tmp_path: Path) -> None:
    dealt = _Trail((10, [[1, 2], [3]]), (11, [[4], [6]]))
    journal = Journal(str(tmp_path), numbers=[4, 6])
    journal.write(44, 1, dealt, 22, 0)
    dealt.batches.append((12, [[5], [7]]))
    journal.write(46, 1, dealt, 23, 0)
    first = [
        _line(10, 4, [1, 2], 20, 2),
        _line(10, 6, [3], 20, 2),
        _line(11, 4, [4], 21, 2),
        _line(11, 6, [6], 21, 2),
    ]
    assert lines_until(str(tmp_path), 1, 44) == first
    second = [_line(12, 4, [5], 22, 2), _line(12, 6, [7], 22, 2)]
    assert lines_until(str(tmp_path), 1, 47) == [*first, *second]
    assert lines_until(str(tmp_path), 0, 47) == []
    # All begin again at turn 44, without rank 6; then a writer is killed in the middle of a line.
    again = Journal(str(tmp_path), numbers=[4])
    again.begin(1, 44, first)
    again.write(46, 1, _Trail((12, [[5, 7]])), 23, 1)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + '{"turn": 48, "lines": [[13', encoding="ascii")
    last: Line = {**_line(12, 4, [5, 7], 22, 1), "part": 1}
    assert lines_until(str(tmp_path), 1, 99) == [*first, last]
    for epoch in (2, 3):
        again.write(80, epoch, _Trail(), 40, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"journal-2", "journal-3"}
