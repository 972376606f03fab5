"""Readers open files of a data set by one room only, which judges links."""

import pytest

from tests.conftest import ROOT
from tests.house import reader_files


def test_readers_open_nothing_but_by_the_room_that_judges_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = reader_files.main(ROOT)
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "open(path)",
        "import os\nos.open(path, os.O_RDONLY)",
        "from os import open as opened\nopened(path, 0)",
        "import os\nos.scandir(path)",
        "from pathlib import Path\nPath(a, b).read_bytes()",
        "import numpy as np\nnp.load(path)",
        "import numpy\nnumpy.load(path)",
        "import h5py\nh5py.File(path)",
        "import pyarrow.parquet as pq\npq.ParquetFile(path)",
        "from dlio.data.source import File\nFile(inside(root, name))",
        "from dlio.data.source import File\nmap(File, names)",
        "from dlio.util.limits import open_regular\nopen_regular(path)",
    ],
)
def test_a_file_that_is_opened_by_its_name_is_a_complaint(text: str) -> None:
    assert len(reader_files.complaints(text, "readers/dlio_readers/some.py")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "source.file(name).read()",
        "source.open(name)",
        "file.open()",
        "file_at(url).opened()",
        "Hdf5File(file)",
        "read_text(path)",
    ],
)
def test_the_room_may_be_used(text: str) -> None:
    assert reader_files.complaints(text, "readers/dlio_readers/some.py") == []


def test_every_exception_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = dict(reader_files.ALLOWED)
    monkeypatch.setattr(reader_files, "ALLOWED", {})
    for path, name in allowed:
        lines = reader_files.complaints((ROOT / path).read_text(encoding="utf-8"), path)
        assert any(f": {name}: " in line for line in lines), f"{path} no longer calls {name}"
