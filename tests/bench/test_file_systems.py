"""Folders that benchmarks write to are looked at before anything is measured."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlio.cli import main


@pytest.mark.parametrize(
    "command",
    [("checkpoint", "."), ("index", "--scratch", "."), ("staging",), ("watch",)],
    ids=lambda command: command[0],
)
def test_a_folder_without_write_right_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Sequence[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda *given: given[1] != os.W_OK | os.X_OK and access(*given)
    )
    with pytest.raises(SystemExit) as ended:
        main(["bench", *command])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written: Permission denied; make it writable" in line
    assert not list(tmp_path.iterdir())
