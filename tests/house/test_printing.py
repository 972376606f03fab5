"""Names reach terminals and logs by functions that escape them."""

import logging
import re
import warnings

import pytest

from dlio.util.printable import log_warning, warn_user
from tests.conftest import ROOT

_RAW = re.compile(
    r"\bwarnings\.warn\(|\b_?log(?:ger)?\.(?:warning|info|debug|error|critical|log)\("
)
_OWNER = "dlio/util/printable.py"


def test_nothing_warns_or_logs_but_by_the_functions_that_escape() -> None:
    raw = [
        f"{file.relative_to(ROOT)}: {call[0]}"
        for room in ("dlio", "readers/dlio_readers", "staging/dlio_staging", "bench/dlio_bench")
        for file in (ROOT / room).rglob("*.py")
        if str(file.relative_to(ROOT)) != _OWNER
        for call in _RAW.finditer(file.read_text(encoding="utf-8"))
    ]
    assert raw == []


# SECURITY.md: S6
def test_control_characters_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    name = "\x1b]0;owned\x07\n"
    with caplog.at_level(logging.WARNING, "dlio"):
        log_warning("%s has %d rows", name, 3)
        log_warning(name)
    for message in caplog.messages:
        assert message.isprintable()
        assert "owned" in message
    assert caplog.records[0].filename == "test_printing.py"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user(name)
    assert str(caught[0].message).isprintable()
    assert caught[0].filename == __file__
