"""Scripts that never close their loader end with exit code 0: no thread outlives them."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

BODY = str(Path(__file__).with_name("ends_checks.py"))
KINDS = list(product(("dlio", "plain"), ("break", "finish")))
SPIN = "while True: pass"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """A machine that is kept busy: daemon threads then meet the end of the interpreter."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def end_of(kind: str, end: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", BODY, kind, end, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_a_script_may_end_without_closing_its_loader(pictures: Path, kind: str, end: str) -> None:
    ended = end_of(kind, end, pictures)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.nightly
def test_300_scripts_end_well_on_a_busy_machine(pictures: Path) -> None:
    cases = [KINDS[k % len(KINDS)] for k in range(300)]
    with busy(4), ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda case: end_of(case[0], case[1], pictures), cases))
    wrong = [
        (case, each.returncode, each.stderr[-500:])
        for case, each in zip(cases, ended, strict=True)
        if each.returncode
    ]
    assert wrong == []
