"""The line of progress that a launcher draws."""

import io
import sys
from collections.abc import Callable

import pytest

from dlio.util.live_line import LiveLine, row_of, tell_launcher

NOTES = ("", "1,234 samples/s, waited 0.3 s for data", "x" * 300, "\x1b[31mred\n")


@pytest.mark.parametrize("columns", [10, 40, 80, 200])
@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize(("done", "total"), [(0, 100), (50, 100), (120, 100), (3, None), (0, 0)])
def test_a_row_fits_into_the_terminal(
    columns: int, note: str, done: float, total: float | None
) -> None:
    row = row_of("epoch 1/10", done, total, note, columns)
    assert len(row) < columns
    assert row.isprintable()


def test_a_row_shows_a_bar_where_there_is_room() -> None:
    row = row_of("epoch 2/3", 5, 10, "99 samples/s", 80)
    assert row == "epoch 2/3 ##########.......... 5/10 99 samples/s"
    assert "#" not in row_of("epoch 2/3", 5, 10, "x" * 60, 80)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[], _Terminal]:
    """Make standard output a terminal, from a call of this function on."""

    def begin() -> _Terminal:
        fake = _Terminal()
        monkeypatch.setattr(sys, "stdout", fake)
        monkeypatch.setenv("COLUMNS", "80")
        return fake

    return begin


def test_text_stays_above_the_line(
    show: Callable[[], _Terminal], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = show()
    with LiveLine("starting 2 ranks") as line:
        assert line.shown
        line.feed("a line of a rank\n")
        line.write(sys.stderr, ["an error\n"])
        line.feed("half a line")
    shown = terminal.getvalue()
    assert "starting 2 ranks (0 s)" in shown
    for text in ("a line of a rank\n", "half a line"):
        before = shown[: shown.index(text)]
        assert not before or before.endswith(("\n", "\x1b[K")), "not in the middle of the line"
    assert "an error\n" in capsys.readouterr().err
    assert shown.endswith(("\x1b[K", "half a line"))


def test_ranks_tell_of_their_progress(show: Callable[[], _Terminal]) -> None:
    terminal = show()
    tell_launcher("epoch 1/3", 4, 8, "77 samples/s")
    message = terminal.getvalue()
    terminal = show()
    with LiveLine("starting") as line:
        line.feed(f"from another rank{message}")
        line.feed("\x1edlio-progress nonsense\n")
        line.feed('\x1edlio-progress {"title": 1}\n')
        line._draw()
    shown = terminal.getvalue()
    assert "from another rank" in shown
    assert "epoch 1/3 ##########.......... 4/8 77 samples/s" in shown
    assert "dlio-progress" not in shown


def test_nothing_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine("starting 2 ranks") as line:
        assert not line.shown
        line.feed("text\n")
    assert capsys.readouterr().out == "text\n"
