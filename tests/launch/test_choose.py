"""The state that the living nodes have together."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.launch.node.snapshot_slots import SnapshotSlots, stored
from dlio.loader.assignment.assigner import BatchAssigner
from dlio.train.ledger_file import LedgerLine
from dlio.train.memory_snapshot.journal import Journal, divided, lines_until
from dlio.train.memory_snapshot.snapshot_callback import SlotFacts, write_slot
from dlio.train.memory_snapshot.snapshot_state import (
    COMMON,
    SlotChoice,
    SlotPart,
    choose,
    newest_state,
    turn_of,
)


def _part(
    writer: str,
    turn: int,
    members: Sequence[int],
    apart: bool = False,
    generation: int = 0,
    start: int = 0,
) -> SlotPart:
    return {
        "writer": writer,
        "turn": turn,
        "text": 1,
        "data": 1,
        "apart": apart,
        "era": [start, generation],
        "members": list(members),
    }


def _parts(
    common: Sequence[int], members: Sequence[int] = (0, 1, 2), **own: list[int]
) -> list[SlotPart]:
    """Parts of ranks r0, r1, ... and the common ones."""
    parts = [_part(COMMON, turn, members) for turn in common]
    return parts + [
        _part(f"rank-{name[1:]}", turn, members) for name, turns in own.items() for turn in turns
    ]


def _apart(
    members: Sequence[int] = (0, 1, 2), lag: int = 0, newer: Sequence[int] = (), **own: list[int]
) -> list[SlotPart]:
    """Parts of ranks r0, r1, ... that step without waiting for each other.

    Args:
        lag: turns that the common part of rank 0 is behind its own.
        newer: ranks that know of a loss that the others do not know of.
    """
    parts: list[SlotPart] = []
    for name, turns in own.items():
        number = int(name[1:])
        for turn in turns:
            parts.append(_part(f"rank-{number}", turn, members, True, number in newer))
            behind = 0 if number else lag
            common = f"{COMMON}-{number}"
            parts.append(_part(common, turn - behind, members, True, number in newer))
    return parts


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (_parts([]), None),
        (_parts([], r0=[4]), None),
        # Rank 2 was on the lost node.
        (_parts([4, 6], r0=[4, 6], r1=[4, 6]), SlotChoice(6, {0: 6, 1: 6}, 6)),
        # Rank 1 had not copied the last step yet: one step is made again.
        (_parts([4, 6], r0=[4, 6], r1=[2, 4]), SlotChoice(4, {0: 4, 1: 4}, 6)),
        # The common part of the last step was not whole yet.
        (_parts([2, 4], r0=[4, 6], r1=[4, 6]), SlotChoice(4, {0: 4, 1: 4}, 6)),
        # Nobody has all of a step: the newest, with the parts that there are.
        (_parts([4, 6], r0=[4, 6], r1=[0, 2]), SlotChoice(6, {0: 6}, 6)),
        # Rank 1 was lost long ago; its part is of no use.
        (_parts([8], members=(0, 2), r0=[8], r1=[2], r2=[8]), SlotChoice(8, {0: 8, 2: 8}, 8)),
        # Ranks step on their own: the furthest rank's place, everyone's newest model.
        (_apart(r0=[6, 8], r1=[2, 4]), SlotChoice(8, {0: 8, 1: 4}, 8, "common-0")),
        # All paused after the same step.
        (_apart(r0=[6, 8], r1=[6, 8]), SlotChoice(8, {0: 8, 1: 8}, 8, "common-1")),
        # Rank 0 was killed before its place was whole: the part that belongs to it is used.
        (_apart(r0=[6, 8], r1=[2, 4], lag=2), SlotChoice(6, {0: 6, 1: 4}, 8, "common-0")),
        # Rank 0 had come further than all that know of its loss.
        (
            _apart(members=(1, 2), newer=(1, 2), r0=[7, 8], r1=[2, 4], r2=[4, 6]),
            SlotChoice(6, {1: 4, 2: 6}, 8, "common-2"),
        ),
    ],
)
def test_the_newest_whole_state_is_chosen(
    parts: list[SlotPart], expected: SlotChoice | None
) -> None:
    assert choose(parts) == expected


def test_parts_of_two_courses_are_not_mixed(tmp_path: Path) -> None:
    """All began again at turn 4; rank 0 had been at turn 6 before, and rank 1 is there now."""
    parts = [
        _part("rank-0", 4, (0, 1)),
        _part("rank-0", 6, (0, 1)),
        _part("rank-1", 4, (0, 1)),
        _part("rank-1", 6, (0, 1), start=1),
        _part(COMMON, 4, (0, 1)),
        _part(COMMON, 6, (0, 1)),
    ]
    assert choose(parts) == SlotChoice(4, {0: 4, 1: 4}, 6)
    parts += [_part("rank-0", 6, (0, 1), start=1), _part(COMMON, 6, (0, 1), start=1)]
    assert choose(parts) == SlotChoice(6, {0: 6, 1: 6}, 6, start=1)


def test_turns_of_another_course_are_overwritten_first(tmp_path: Path) -> None:
    facts: SlotFacts = {"apart": False, "era": [0, 0], "members": [0], "about": {}}
    with SnapshotSlots(str(tmp_path), COMMON) as slots:
        for turn in (4, 6):
            write_slot(slots, turn, {}, facts)
    with SnapshotSlots(str(tmp_path), COMMON, after=4) as slots:
        write_slot(slots, 5, {}, facts)
    assert [each.turn for each in stored(str(tmp_path), COMMON)] == [5, 4]


def test_a_turn_that_was_reached_twice_is_read_as_it_was_listed(tmp_path: Path) -> None:
    facts: SlotFacts = {"apart": False, "era": [0, 0], "members": [0], "about": {"place": "old"}}
    newer: SlotFacts = {**facts, "era": [1, 0], "about": {"place": "a longer one"}}
    for name in (COMMON, "rank-0"):
        with SnapshotSlots(str(tmp_path), name) as slots:
            for each in (newer, facts):
                write_slot(slots, 4, {"sums": torch.ones(3)}, each)
    state = newest_state(SingleCommunicator(), str(tmp_path))
    assert state is not None
    assert state.about == {"place": "a longer one"}


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
    facts: SlotFacts = {"apart": False, "era": [0, 0], "members": [3], "about": {}}
    own = {"random": torch.get_rng_state(), "sums": torch.ones(3, dtype=torch.float64)}
    with (
        SnapshotSlots(str(tmp_path), COMMON) as slots,
        SnapshotSlots(str(tmp_path), "rank-3") as mine,
    ):
        write_slot(mine, 6, own, facts)
        facts["about"] = {"updates": 3}
        write_slot(slots, 6, common, facts)
    state = newest_state(SingleCommunicator(), str(tmp_path))
    assert state is not None
    assert (state.ranks, state.about, state.choice.turn) == (1, {"updates": 3}, 6)
    assert state.is_of_one_step
    for prefix, tensors in (("all/", common), ("rank0/", own)):
        read = state.read(prefix)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(read[name], tensor), name
            assert read[name].dtype == tensor.dtype


def test_nodes_without_copies_have_no_state(tmp_path: Path) -> None:
    assert newest_state(SingleCommunicator(), str(tmp_path)) is None


class _Trail(BatchAssigner):
    """A dealing that has trained some batches, one per optimizer step."""

    def __init__(self, *batches: tuple[int, list[list[int]]]) -> None:
        self.rows = list(batches)
        self.back: list[tuple[int, int]] = []

    @property
    def closed(self) -> int:
        return len(self.rows)

    def trail(self, since: int) -> Iterator[tuple[int, int, int, int, list[int]]]:
        for step, shares in self.rows[since:]:
            for member, samples in enumerate(shares):
                yield step, step + 10, len(shares), member, samples

    def taken_back(self) -> Iterator[tuple[int, int]]:
        return iter(self.back)


def _line(step: int, rank: int, samples: list[int], update: int, ranks: int) -> LedgerLine:
    line: LedgerLine = {"epoch": 1, "step": step, "rank": rank, "samples": samples}
    line["update"], line["ranks"] = update, ranks
    return line


def test_a_journal_takes_back_what_nobody_had_heard_of(tmp_path: Path) -> None:
    dealt = _Trail((10, [[1, 2], [3]]), (11, [[4], [6]]))
    journal = Journal(str(tmp_path), numbers=[4, 6])
    journal.write(44, 1, dealt, 0)
    dealt.rows.append((12, [[5]]))
    dealt.back.append((11, 1))
    journal.write(46, 1, dealt, 0)
    taken = [_line(10, 4, [1, 2], 20, 2), _line(10, 6, [3], 20, 2), _line(11, 4, [4], 21, 2)]
    assert lines_until(str(tmp_path), 1, 44) == [*taken, _line(11, 6, [6], 21, 2)]
    # A rank that has taken over writes all again.
    Journal(str(tmp_path), numbers=[4, 6]).write(48, 1, dealt, 0)
    for turn in (46, 48):
        assert lines_until(str(tmp_path), 1, turn) == [*taken, _line(12, 4, [5], 22, 1)]


def test_a_journal_has_the_lines_up_to_a_turn(tmp_path: Path) -> None:
    dealt = _Trail((10, [[1, 2], [3]]), (11, [[4], [6]]))
    journal = Journal(str(tmp_path), numbers=[4, 6])
    journal.write(44, 1, dealt, 0)
    dealt.rows.append((12, [[5], [7]]))
    journal.write(46, 1, dealt, 0)
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
    again.write(46, 1, _Trail((12, [[5, 7]])), 1)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + '{"turn": 48, "lines": [[13', encoding="ascii")
    last: LedgerLine = {**_line(12, 4, [5, 7], 22, 1), "part": 1}
    assert lines_until(str(tmp_path), 1, 99) == [*first, last]
    for epoch in (2, 3):
        again.write(80, epoch, _Trail(), 0)
    assert {path.name for path in tmp_path.iterdir()} == {"journal-common-2", "journal-common-3"}


def test_samples_that_only_lost_weights_have_seen_come_again() -> None:
    lines = [
        _line(10, 4, [1, 2], 20, 2),
        _line(10, 6, [3], 20, 2),
        _line(11, 4, [4], 21, 2),
        _line(11, 6, [6], 21, 2),
    ]
    assert divided(lines, {}) == (lines, [])
    # Rank 6's part was made after optimizer step 20, before step 21.
    assert divided(lines, {4: 44, 6: turn_of(21, False)}) == (lines[:3], lines[3:])


def test_a_start_that_comes_no_further_takes_nothing_from_the_next(tmp_path: Path) -> None:
    """The second start has samples come again, but makes no state before the third begins."""
    folder, lines = str(tmp_path), [_line(10, 4, [1, 2], 20, 2), _line(10, 6, [3], 20, 2)]
    Journal(folder, [4, 6], start=2).begin(1, 44, lines, lines[1:])
    assert lines_until(folder, 1, 44, start=1) == lines
    assert lines_until(folder, 1, 44, start=2) == lines[:1]
    Journal(folder, [4, 6], start=3).begin(1, 44, lines, lines[1:])
    assert lines_until(folder, 1, 44, start=1) == lines
    assert lines_until(folder, 1, 46, start=3) == lines[:1]


def test_parts_tell_which_steps_of_other_ranks_they_have(tmp_path: Path) -> None:
    facts: SlotFacts = {"apart": True, "era": [0, 0], "members": [3, 4, 5], "about": {}}
    for member, turn, heard in ((3, 8, 4), (4, 6, 6)):
        about = {"heard": [[5, heard], [4, 8]]}
        with SnapshotSlots(str(tmp_path), f"rank-{member}") as own:
            write_slot(own, turn, {"sums": torch.ones(3)}, {**facts, "about": about})
        with SnapshotSlots(str(tmp_path), f"{COMMON}-{member}") as common:
            write_slot(common, turn, {}, {**facts, "about": {"updates": turn // 2}})
    state = newest_state(SingleCommunicator(), str(tmp_path))
    assert state is not None
    assert (state.choice.turn, state.about, state.choice.writer) == (8, {"updates": 4}, "common-3")
    # Rank 4 restores what it had copied, whatever others have taken in of it.
    assert state.reached == {3: 8, 4: 6, 5: 6}
