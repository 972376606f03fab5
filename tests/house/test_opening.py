"""Files are written, renamed and deleted by one room only."""

import pytest

from tests.conftest import ROOT
from tests.house import opening


def test_nothing_is_written_but_by_the_room_that_verifies_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = opening.main(ROOT)
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')",
        "open(path, mode='r+b')",
        "open(path, how)",
        "import os\nos.open(path, os.O_RDWR | os.O_CREAT)",
        "import os\nos.open(path, flags)",
        "import os\ndef f(path):\n    flags = os.O_WRONLY\n    os.open(path, flags)",
        "import os\ndef f():\n    flags = os.O_RDONLY\ndef g(flags):\n    os.open('a', flags)",
        "import os\nos.replace(a, b)",
        "from os import remove as gone\ngone(a)",
        "import shutil\nshutil.rmtree(a)",
        "Path(a).write_text('b')",
        "def f():\n    def g():\n        path.unlink()",
    ],
)
def test_a_call_that_writes_elsewhere_is_a_complaint(text: str) -> None:
    assert len(opening.complaints(text, "dlio/cli/some.py")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "open(path)",
        "open(path, 'rb')",
        "import os\nos.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "import os\ndef f():\n    flags = os.O_RDONLY\n    os.open('a', flags)",
        "import os\nos.open(os.devnull, os.O_RDWR)",
        "'a'.replace('a', 'b')",
    ],
)
def test_reading_is_allowed(text: str) -> None:
    assert opening.complaints(text, "dlio/cli/some.py") == []


def test_every_exception_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = dict(opening.ALLOWED)
    monkeypatch.setattr(opening, "ALLOWED", {})
    for path, name in allowed:
        lines = opening.complaints((ROOT / path).read_text(encoding="utf-8"), path)
        assert any(f".{name}: " in line for line in lines), f"{path} no longer calls {name}"
