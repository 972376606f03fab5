"""Tables of benchmarks: no codes of a terminal in files."""

import sys
from io import StringIO

import pytest

from dlio.util.settings import TERMINAL
from dlio_bench.results.terminal import table


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
