"""Tables of benchmarks: no codes of a terminal in files; progress is told there in lines."""

import sys
from io import StringIO

import pytest

from dlio.util.settings import TERMINAL
from dlio_bench.results import terminal
from dlio_bench.results.terminal import steps, table, working


class _PseudoTerminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("seen", [False, True])
def test_a_rank_whose_output_ends_in_a_file_prints_no_codes(
    monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    # As a rank of mpirun has it: a pseudo-terminal, whatever the launcher's output is.
    output = _PseudoTerminal()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(TERMINAL, "1" if seen else "")
    table("title", ("name", "figure"), [("a", "1")])
    assert "figure" in output.getvalue()
    assert ("\x1b" in output.getvalue()) is seen


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, ["a", "b"]), (1e9, [])])
def test_a_long_benchmark_tells_its_progress_where_there_is_no_terminal(
    every_s: float,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(terminal, "_NEWS_EVERY_S", every_s)
    with working("loader"):
        list(steps(["a", "b"], "pass {}".format))
    output = capsys.readouterr()
    assert not output.out
    for name in lines:
        assert f"loader: step {lines.index(name)} of 2; pass {name}\n" in output.err
    assert bool(output.err) is bool(lines)
