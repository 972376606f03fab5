"""Each hostile file ends in the right result or one line, in time and in little memory."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, SOURCES
from tests.hostile.bounds import bytes_there, most_memory, most_seconds
from tests.hostile.child import DEADLINE_S
from tests.hostile.corpus import all_cases, checkpoints
from tests.hostile.corpus.case import Case

ALL = all_cases()
CASES = {case.name: case for case in ALL}
DAILY = 50
"""Every so many-th case is tested each day; all are at night."""
SLOW = ("bomb", "one-group", "repeated", "linked")
"""Names of cases that take seconds to make."""

pytestmark = pytest.mark.cold


class Child:
    """The process that opens hostile data in forks of its own."""

    def __init__(self, home: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": SOURCES,
            "DLIO_TEST_COLD": "1",
            "DLIO_CACHE": str(home / "cache"),
            "HOME": str(home),
            # Reserved memory counts as data; one arena is enough.
            "MALLOC_ARENA_MAX": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/hostile/child.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, **question: object) -> dict[str, Any]:
        """Return the child's answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    made = Child(tmp_path_factory.mktemp("home"))
    checkpoints.keep_sound(tmp_path_factory.mktemp("checkpoints"))
    yield made
    made.close()


def failure(case: Case, answer: dict[str, Any]) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    result, text = answer["result"], answer["text"]
    if result not in ("right", "error"):
        return f"{result}: {text}"
    if case.expected not in ("any", result):
        return f"{result} instead of {case.expected}: {text}"
    if case.says and case.says not in text:
        return f"{case.says!r} is not said: {text}"
    if text == checkpoints.OLD and "; trying an older checkpoint" not in answer["said"]:
        return f"that an older one is taken is not said: {answer['said']}"
    if any(not line.isprintable() for line in answer["said"].splitlines()):
        return f"not printable: {answer['said']!r}"
    if result == "error" and (len(text.splitlines()) != 1 or not text.isprintable()):
        return f"not one line: {text!r}"
    return ""


def _param(number: int, name: str) -> Any:
    # Memory for kept arrays is taken by a size that a damaged file states.
    kept = name.startswith("cache/") and name.endswith("-sparse")
    daily = (kept or number % DAILY == 0) and not any(word in name for word in SLOW)
    return pytest.param(name, marks=[] if daily else pytest.mark.nightly)


@pytest.mark.parametrize("name", [_param(*each) for each in enumerate(CASES)])
# SECURITY.md: S1
def test_a_hostile_file_is_read_right_or_refused_in_one_line(
    child: Child, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    folder = tmp_path / "case"
    folder.mkdir()
    ask = case.make(folder)
    there = bytes_there(folder)
    answer = child.ask(kind=ask.kind, path=ask.path, options=dict(ask.options))
    # Folders that are deeper than Python can recurse would stop pytest from removing them.
    subprocess.run(["rm", "-rf", folder], check=True)
    assert not failure(case, answer)
    assert answer["peak"] <= most_memory(name, there), (answer, there)
    assert answer["seconds"] <= most_seconds(there), (answer, there)


def test_the_memory_that_a_case_takes_is_counted(child: Child) -> None:
    for size in (0, 64 << 20):
        peak = child.ask(kind="memory", path="a", options={"size": size})["peak"]
        assert size - (1 << 20) < peak < size + (16 << 20)


def test_the_corpus_is_large_and_its_names_differ() -> None:
    assert len(ALL) == len(CASES) >= 2200
