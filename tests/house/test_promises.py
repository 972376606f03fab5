"""Each promise of SECURITY.md has a number, and a test that carries it."""

import re

from tests.conftest import ROOT

_PROMISE = re.compile(r"(?:\| |^- )S(\d+)[:.] ", re.MULTILINE)
_POINT = re.compile(r"^\| ([ABC]\d?) [^|]*\| `([\w/]+\.py)::(\w+)` \|", re.MULTILINE)
_CARRIED = re.compile(r"^# SECURITY\.md: S(\d+)\ndef (?:test)?_\w+\(", re.MULTILINE)


def test_every_promise_has_a_test_that_carries_its_number() -> None:
    promised = [int(each) for each in _PROMISE.findall((ROOT / "SECURITY.md").read_text())]
    assert sorted(promised) == list(range(1, len(promised) + 1))
    assert len(promised) >= 24
    carried = {
        int(number)
        for file in (ROOT / "tests").rglob("*.py")
        for number in _CARRIED.findall(file.read_text(encoding="utf-8"))
    }
    assert carried == set(promised)


def test_every_point_of_trust_has_its_test() -> None:
    named = _POINT.findall((ROOT / "docs/design/trust.md").read_text())
    assert {point for point, _, _ in named} == {
        *(f"A{number}" for number in range(1, 9)),
        *(f"B{number}" for number in range(1, 6)),
        "C",
    }
    for point, file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), point
