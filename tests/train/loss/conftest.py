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

from tests.conftest import SOURCES

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
    changes: list[dict[str, Any]]
    """Of the report, too: ranks that joined and left."""
    trace: list[dict[str, Any]]
    """Its lines."""
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

    def train(
        ranks: int,
        ends: dict[int, list[object]],
        *more: str,
        model: str = "make",
        name: str = "",
        resize: dict[int, int] | None = None,
    ) -> Ran:
        options = ["--epochs", str(EPOCHS), "--batch-size", "4", "--image-size", "32"]
        options += ["--model", f"ending:{model}", "--fault-tolerance", "shrink", "-n", str(ranks)]
        options += ["--trace", f"{name}t.jsonl", "--report", f"{name}r.json", *more]
        options += ["--callback", "ending:Digest", "--callback", "ending:Resize"]
        done = subprocess.run(
            [sys.executable, "-m", "dlio.cli", "train", str(pictures / "train"), *options],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": SOURCES,
                "DLIO_CACHE": str(tmp_path / "cache"),
                "DLIO_TIMEOUT": "180",
                "ENDS": json.dumps(ends),
                "RESIZE": json.dumps(resize or {}),
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        report, trace = tmp_path / f"{name}r.json", tmp_path / f"{name}t.jsonl"
        samples: dict[int, Counter[int]] = {}
        steps: dict[tuple[int, int], set[int]] = {}
        lines = trace.read_text().splitlines() if trace.exists() else []
        traced: list[dict[str, Any]] = list(map(json.loads, lines))
        for line in traced:
            samples.setdefault(line["epoch"], Counter()).update(line["samples"])
            steps.setdefault((line["epoch"], line["rank"]), set()).add(line["step"])
        wrote: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
        epochs, losses = wrote.get("epochs", []), wrote.get("losses", [])
        changes = wrote.get("changes", [])
        weights = [
            {path.read_text() for path in tmp_path.glob(f"weights-{epoch}-*")}
            for epoch in range(len(epochs))
        ]
        restored = wrote.get("restored", [])
        return Ran(
            code=done.returncode,
            output=done.stdout,
            errors=done.stderr,
            epochs=epochs,
            losses=losses,
            changes=changes,
            trace=traced,
            samples=samples,
            steps=steps,
            weights=weights,
            restored=restored,
        )

    return train


def check_exact(ran: Ran, alike: bool = True) -> None:
    """Every sample once in each epoch, and the same weights on all ranks that are left."""
    assert ran.code == 0, ran.errors
    assert ran.samples == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert [epoch["samples"] for epoch in ran.epochs] == [SAMPLES] * EPOCHS
    if alike:
        assert list(map(len, ran.weights)) == [1] * EPOCHS
