"""Files are opened for reading by one room only."""

import pytest

from tests.conftest import ROOT
from tests.house import reading


def test_nothing_is_read_but_by_the_room_that_refuses_pipes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = reading.main(ROOT)
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "open(path)",
        "open(path, 'rb')",
        "open(path, how)",
        "import os\nos.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "Path(path).read_text(encoding='utf-8')",
        "json.load(file)",
        "yaml.safe_load(text)",
        "numpy.load(path)",
        "torch.load(path)",
        "Image.open(path)",
    ],
)
def test_a_call_that_reads_elsewhere_is_a_complaint(text: str) -> None:
    assert len(reading.complaints(text, "dlio/cli/some.py")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')",
        "import os\nos.open(path, os.O_DIRECTORY)",
        "open('/proc/self/maps')",
        "open(f'/proc/{process}/io')",
        "np.load(io.BytesIO(data))",
        "with open_input(path) as file:\n    torch.load(file)",
        "data.open(path, reader)",
        "json.loads(text)",
    ],
)
def test_other_calls_are_none(text: str) -> None:
    assert reading.complaints(text, "dlio/cli/some.py") == []


def test_every_exception_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = dict(reading.ALLOWED)
    monkeypatch.setattr(reading, "ALLOWED", {})
    for path in allowed:
        files = [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py")
        assert any(
            reading.complaints(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
            for file in files
        ), f"{path} opens nothing"
