"""Slots in shared memory: whole or not at all."""

from pathlib import Path

import pytest

from dlio.launch.node.snapshot_slots import SnapshotSlots, newest_turn, stored, writers


def _write(slots: SnapshotSlots, turn: int, data: bytes, text: bytes = b"text") -> None:
    with slots.writing(turn, text, len(data)) as memory:
        memory[:] = data


def _turns(folder: Path) -> list[int]:
    return [slot.turn for slot in stored(str(folder), "w")]


def test_the_two_newest_turns_are_there(tmp_path: Path) -> None:
    slots = SnapshotSlots(str(tmp_path), "w")
    for turn in range(5):
        _write(slots, turn, bytes([turn]) * 1000, f"turn {turn}".encode())
    newest, older = stored(str(tmp_path), "w")
    assert (newest.turn, newest.text, bytes(newest.data)) == (4, b"turn 4", b"\4" * 1000)
    assert (older.turn, older.text, bytes(older.data)) == (3, b"turn 3", b"\3" * 1000)
    assert newest_turn(str(tmp_path)) == 4
    assert writers(str(tmp_path)) == ["w"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_a_writer_that_ends_in_the_middle_leaves_the_other_slot(tmp_path: Path) -> None:
    slots = SnapshotSlots(str(tmp_path), "w")
    _write(slots, 1, b"one")
    _write(slots, 2, b"two")

    def interrupted() -> None:
        with slots.writing(3, b"", 3) as memory:
            memory[:2] = b"th"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert _turns(tmp_path) == [2]
    _write(slots, 4, b"four")
    assert _turns(tmp_path) == [4, 2]


def test_damaged_data_are_not_whole(tmp_path: Path) -> None:
    slots = SnapshotSlots(str(tmp_path), "w")
    _write(slots, 1, b"one" * 100)
    _write(slots, 2, b"two" * 100)
    path = tmp_path / "w.1"
    whole = path.read_bytes()
    at = whole.index(b"twotwo")
    path.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
    assert _turns(tmp_path) == [1]
    path.write_bytes(whole[:100])
    assert _turns(tmp_path) == [1]
    path.write_bytes(b"")
    assert _turns(tmp_path) == [1]


def test_slots_grow_and_shrink(tmp_path: Path) -> None:
    slots = SnapshotSlots(str(tmp_path), "w")
    for turn, size in enumerate([10, 10, 100_000, 5, 0, 200_000]):
        _write(slots, turn, b"d" * size, b"t" * size)
        slot = stored(str(tmp_path), "w")[0]
        assert (slot.turn, len(slot.text), len(slot.data)) == (turn, size, size)
    slots.close()


def test_the_next_writer_overwrites_the_older_slot(tmp_path: Path) -> None:
    first = SnapshotSlots(str(tmp_path), "w")
    for turn in (1, 2, 3):
        _write(first, turn, b"x")
    _write(SnapshotSlots(str(tmp_path), "w"), 4, b"y")
    assert _turns(tmp_path) == [4, 3]


def test_data_stay_readable_when_their_writer_goes_on(tmp_path: Path) -> None:
    slots = SnapshotSlots(str(tmp_path), "w")
    _write(slots, 1, b"x" * 10)
    (slot,) = stored(str(tmp_path), "w")
    for turn in (2, 3):
        _write(slots, turn, b"y" * 100_000)
    assert len(bytes(slot.data)) == 10


def test_a_folder_without_slots_has_no_turn(tmp_path: Path) -> None:
    (tmp_path / "journal-0").write_text("")
    assert newest_turn(str(tmp_path)) == -1
    assert writers(str(tmp_path)) == []
    assert stored(str(tmp_path), "w") == []
