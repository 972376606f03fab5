"""Bars fit into the terminal, on one row."""

import io
import re
from collections.abc import Callable

import pytest

from dlio.util import progress_bar

NOTE = "123,456 samples/s, waited 1234.5 s for data, 12% of the samples skipped, 98.7% held out"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], list[str]]:
    """Draw a bar on a terminal of a width; return the rows as they were drawn."""
    import rich.console

    def draw(columns: int, in_bytes: bool) -> list[str]:
        file, real = io.StringIO(), rich.console.Console
        monkeypatch.setattr(
            rich.console, "Console", lambda **_: real(file=file, width=columns, force_terminal=True)
        )
        with progress_bar.ProgressBar("first", total=123_456, in_bytes=in_bytes, force=True) as bar:
            for epoch in range(30):
                bar.begin(f"epoch {epoch + 1}/30", 123_456)
                bar.update(100_000, note=NOTE)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
        return [row.strip() for row in re.split(r"[\r\n]", text) if row.strip()]

    return draw


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_a_bar_is_one_row(
    columns: int, in_bytes: bool, drawn: Callable[[int, bool], list[str]]
) -> None:
    rows = drawn(columns, in_bytes)
    assert rows
    assert all(len(row) <= columns for row in rows)
    assert all(row.startswith(("first", "epoch")) for row in rows)
    assert rows[-1].startswith("epoch 30/30")
    if columns == 80 and not in_bytes:
        assert "100000/123456 --:-- 123,456 samples/s" in rows[-1]


def test_a_bar_is_not_drawn_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    for to_stderr in (False, True):
        with progress_bar.ProgressBar("first", total=3, transient=True, to_stderr=to_stderr) as bar:
            bar.update(2, note="half")
    assert capsys.readouterr() == ("", "")


def test_counts_have_a_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console
    import rich.progress

    file, real, now = io.StringIO(), rich.console.Console, [0.0]
    monkeypatch.setattr(
        rich.console, "Console", lambda **_: real(file=file, width=100, force_terminal=True)
    )
    bar = progress_bar.ProgressBar("cases", total=4)
    bar._rows.get_time = lambda: now[0]
    bar.begin("cases", 4)
    with bar:
        for done in range(3):
            bar.update(done)
            now[0] += 90.0
    # Two of four in 180 s; steps far apart count too.
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "2/4 03:00" in drawn


def test_the_cursor_is_back_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    file, real = io.StringIO(), rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **_: real(file=file, width=80, force_terminal=True)
    )
    with pytest.raises(KeyboardInterrupt), progress_bar.ProgressBar("cases", total=4):
        raise KeyboardInterrupt
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
