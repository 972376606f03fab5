"""Metrics for Prometheus, and the figures that Weights & Biases and MLflow get."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlio.errors import UsageError
from dlio.train.callbacks import make_callbacks
from dlio.train.config import train_config

Dlio = Callable[..., subprocess.CompletedProcess[str]]
_LINE = re.compile(
    r'[a-z_]+(\{[a-z]+="[a-z_0-9-]+"\})? (-?[0-9.e+-]+|inf|nan)|# (HELP|TYPE) [a-z_]+ .+'
)


def test_prometheus_gets_whole_files(dlio: Dlio, pictures: Path, here: Path) -> None:
    """One of two ranks writes; counters are those of the report."""
    done = dlio(
        *("train", str(pictures), "-n", "2", "--epochs", "2", "--batch-size", "4"),
        *("--image-size", "32", "--model", "resnet(width=4)"),
        *("--callback", "prometheus(file='m.prom', every_s=0)", "--report", "r.json"),
    )
    assert done.returncode == 0, done.stderr
    lines = (here / "m.prom").read_text().splitlines()
    assert all(_LINE.fullmatch(line) for line in lines), lines
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert (values["dlio_ranks"], values["dlio_epochs_total"]) == ("2.0", "2.0")
    assert float(values['dlio_read_bytes_total{place="source"}']) > 0
    assert not [path for path in here.iterdir() if path.name.startswith(".m.prom")]


def test_a_file_that_cannot_be_written_is_refused_at_once(here: Path) -> None:
    config = train_config(source="x", callback=("prometheus(file='gone/m.prom')",))
    with pytest.raises(UsageError, match=r"gone does not exist"):
        make_callbacks(config.callbacks, 0)


class _Recorder:
    """A stand-in for both packages, of which neither is installed: it notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> "_Recorder":
            self.calls.append((name, (args, options)))
            return self

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.mark.parametrize(
    ("text", "started", "sent", "ended"),
    [
        ("wandb(project='p')", ["init"], "log", ("finish", ((), {"exit_code": 0}))),
        (
            "mlflow(experiment='e', uri='file:x')",
            ["set_tracking_uri", "set_experiment", "start_run", "log_params"],
            "log_metrics",
            ("end_run", (("FINISHED",), {})),
        ),
    ],
)
def test_trackers_get_options_and_figures(
    text: str,
    started: list[str],
    sent: str,
    ended: tuple[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = _Recorder()
    monkeypatch.setitem(sys.modules, text.partition("(")[0], recorder)
    config = train_config(source="x", callback=(text,))
    *_, tracker = make_callbacks(config.callbacks, 0)
    run: Any = SimpleNamespace(config=config, comm=SimpleNamespace(rank=0, size=2), updates=5)
    monkeypatch.setattr("dlio.train.callbacks.trackers.figures_of", lambda _: {"epoch/loss": 0.5})
    with tracker:
        tracker.begins(run)
        assert recorder.names() == started
        report: Any = None
        tracker.epoch_ends(run, report)
        assert recorder.calls[-1] == (sent, (({"epoch/loss": 0.5},), {"step": 5}))
    assert recorder.calls[-1] == ended


def test_a_tracker_that_is_not_installed_says_so() -> None:
    config = train_config(source="x", callback=("mlflow()",))
    with pytest.raises(UsageError, match="pip install mlflow"):
        make_callbacks(config.callbacks, 0)


def test_an_unknown_callback_is_refused(dlio: Dlio, pictures: Path) -> None:
    done = dlio("train", str(pictures), "--callback", "wandbb(project='p')")
    assert done.returncode == 2
    assert "wandb" in done.stderr
