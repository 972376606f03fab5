"""`dlio train --fault-tolerance shrink` on ranks of which some end, as `ending.py` has it."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
SAMPLES, EPOCHS = 101, 2


class Ran(NamedTuple):
    """A run that has ended."""

    code: int
    output: str
    errors: str
    epochs: list[dict[str, Any]]
    """Of the report; empty if there is none."""
    losses: list[dict[str, Any]]
    """Of the report, too."""
    samples: dict[int, Counter[int]]
    """How often each sample is in the trace, by epoch."""
    steps: dict[tuple[int, int], set[int]]
    """Steps in the trace, by epoch and rank."""
    weights: list[set[str]]
    """Digests of the ranks' weights, by epoch."""
    restored: list[dict[str, Any]]
    """Of the report, too: ranks whose weights were restored."""


Run = Callable[..., Ran]


@pytest.fixture
def run(pictures: Path, tmp_path: Path) -> Run:
    """Train on several ranks of which some end, as `ending.py` has it."""
    shutil.copy(Path(__file__).with_name("ending.py"), tmp_path)
    paths = [str(ROOT), *(str(ROOT / room) for room in ("readers", "staging", "bench"))]

    def train(ranks: int, ends: dict[int, list[object]], *more: str) -> Ran:
        options = ["--epochs", str(EPOCHS), "--batch-size", "4", "--image-size", "32"]
        options += ["--model", "ending:make", "--fault-tolerance", "shrink", "-n", str(ranks)]
        options += ["--trace", "t.jsonl", "--report", "r.json", *more]
        options += ["--callback", "ending:Digest"]
        done = subprocess.run(
            [sys.executable, "-m", "dlio.cli", "train", str(pictures / "train"), *options],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "DLIO_CACHE": str(tmp_path / "cache"),
                "DLIO_TIMEOUT": "60",
                "ENDS": json.dumps(ends),
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        report, trace = tmp_path / "r.json", tmp_path / "t.jsonl"
        samples: dict[int, Counter[int]] = {}
        steps: dict[tuple[int, int], set[int]] = {}
        if trace.exists():
            for line in map(json.loads, trace.read_text().splitlines()):
                samples.setdefault(line["epoch"], Counter()).update(line["samples"])
                steps.setdefault((line["epoch"], line["rank"]), set()).add(line["step"])
        wrote = json.loads(report.read_text()) if report.exists() else {}
        epochs, losses = wrote.get("epochs", []), wrote.get("losses", [])
        weights = [
            {path.read_text() for path in tmp_path.glob(f"weights-{epoch}-*")}
            for epoch in range(EPOCHS)
        ]
        restored = wrote.get("restored", [])
        return Ran(
            done.returncode,
            done.stdout,
            done.stderr,
            epochs,
            losses,
            samples,
            steps,
            weights,
            restored,
        )

    return train


def check_exact(ran: Ran, alike: bool = True) -> None:
    """Every sample once in each epoch, and the same weights on all ranks that are left."""
    assert ran.code == 0, ran.errors
    assert ran.samples == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert [epoch["samples"] for epoch in ran.epochs] == [SAMPLES] * EPOCHS
    if alike:
        assert list(map(len, ran.weights)) == [1] * EPOCHS
