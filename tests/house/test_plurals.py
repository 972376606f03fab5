"""Messages say `1 node` and `2 nodes`."""

from dlio.util.units import counted
from tests.house.plurals import in_room, wrong_plurals


def test_one_is_not_several() -> None:
    assert [counted(k, "rank") for k in (0, 1, 2, 1024)] == [
        *("0 ranks", "1 rank", "2 ranks", "1,024 ranks")
    ]


def test_plurals_are_those_of_english() -> None:
    said = [counted(2, each) for each in ("batch", "class", "box", "entry", "replay", "epoch")]
    assert said == ["2 batches", "2 classes", "2 boxes", "2 entries", "2 replays", "2 epochs"]
    assert counted(1, "batch") == "1 batch"


def test_no_message_has_a_plural_that_may_stand_after_one() -> None:
    assert list(in_room()) == []


def test_the_search_finds_both_forms() -> None:
    lines = wrong_plurals('a = f"{n} nodes"\nb = f"{n} rank(s)"\nc = f"{N} nodes, {n} nodesets"')
    assert list(lines) == [1, 2]
    assert list(wrong_plurals('f"{n:,} damaged entries: {n:.1f} samples/s"')) == [1]
