"""Messages stay readable whatever names and numbers of names the data have."""

import logging
from pathlib import Path

import pytest

from dlio.data.reader import open_reader
from dlio.errors import DlioError, SourceError
from dlio.util.printable import log_warning


def test_a_message_with_very_many_names_keeps_its_file_and_its_remedy(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(b"picture")
    columns = ",".join(f"column{k}" for k in range(20_000))
    (tmp_path / "labels.csv").write_text(f"{columns}\n{columns}\n")
    with pytest.raises(SourceError) as refused:
        open_reader(str(tmp_path))
    text = str(refused.value)
    assert len(text) < 4096
    assert text.startswith(f"{tmp_path}/labels.csv")
    assert "characters) ..." in text
    assert text.endswith("needs a column file_name and a column label")


def test_long_warnings_are_shortened_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dlio"):
        log_warning("%s", "x" * 4096)
        log_warning("%s", "x" * 10_000_000)
    assert [len(each.getMessage()) < 4097 for each in caplog.records] == [True, True]
    assert "9,996,400 characters" in caplog.records[1].getMessage()
    assert str(DlioError("x" * 4096)) == "x" * 4096
