"""Threads that read a source are made in the room that nobody has to wait for."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
WAITS: Final = ("ThreadPoolExecutor", "ThreadPool(", "multiprocessing.dummy")
"""Threads that the end of the interpreter waits for, without a deadline."""
ALLOWED: Final = {
    "dlio/cli/demo_pictures.py": "draws pictures, and waits for no source",
    "dlio/testing/reader_suite.py": "asks a reader under test, from several threads",
    "dlio/testing/tier_suite.py": "the same of a tier",
    "dlio/util/parallel.py": "the room",
}


def test_no_thread_waits_for_a_source_but_in_the_room() -> None:
    others = {
        str(path.relative_to(ROOT))
        for room in ("dlio", "readers", "staging")
        for path in (ROOT / room).rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in WAITS)
    }
    assert others <= set(ALLOWED), f"use dlio.util.parallel: {sorted(others - set(ALLOWED))}"
