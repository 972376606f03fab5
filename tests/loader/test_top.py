"""`dlio top` is told of the reads, tiers and progress that there really are."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import dlio
from dlio.train.config import train_config
from dlio.train.training_progress import TrainingProgress
from dlio.util.live_figures import ask_all
from dlio_staging.byte_progress import show_progress

_TIMEOUT_S = 10.0


def parts(kind: str, path: str | None = None) -> list[dict[str, Any]]:
    """Figures of this process; with a path, those of one data set: others may be open still."""
    mine = [each for each in ask_all(_TIMEOUT_S) if each.pid == os.getpid()]
    published = [dict(part) for each in mine for part in each.parts if part["kind"] == kind]
    return [part for part in published if path is None or part["path"] == path]


def test_a_loader_tells_samples_bytes_and_tiers_while_its_data_set_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(4000, dtype=np.float32).reshape(100, 40))
    tier = tmp_path / "tier"
    tier.mkdir()
    with (
        dlio.open(path, tiers=f"{tier}:20MiB") as data,
        dlio.DataLoader(data, batch_size=10, num_workers=1) as loader,
    ):
        assert parts("data", str(path)) == []  # Nothing is read yet.
        for _ in range(2):
            assert sum(1 for _ in loader) == 10
        (part,) = parts("data", str(path))
        counted = loader.stats()["bytes"]
    assert parts("data", str(path)) == []
    assert (part["path"], part["rank"], part["ranks"]) == (str(path), 0, 1)
    assert part["samples"] == 200
    assert part["waited_s"] > 0
    assert part["bytes"]["source"] >= 16_000
    assert part["bytes"]["disk"] >= counted["disk"] == 16_000
    (shown,) = part["tiers"]
    assert shown["kind"] == "disk"
    assert shown["capacity"] == 20 << 20
    assert shown["used"] == shown["wanted"] > 16_000


def test_a_training_tells_epoch_and_step_on_every_rank() -> None:
    for rank in (0, 1):
        config, comm = train_config("x", epochs=3), SimpleNamespace(rank=rank)
        run: Any = SimpleNamespace(config=config, comm=comm, steps=10)
        with TrainingProgress(run) as progress:
            assert parts("training")[0]["epoch"] == 1
            progress.step(1, 4, 8, 0.0)
            (part,) = parts("training")
        assert part == {"kind": "training", "epoch": 2, "epochs": 3, "step": 5, "steps": 10}
    assert parts("training") == []


def test_staging_tells_bytes_even_if_it_shows_nothing() -> None:
    with show_progress(0, shown=False, title="packing") as shown:
        shown(20, 50)
        assert parts("work") == [{"kind": "work", "title": "packing", "done": 20, "total": 50}]
    assert parts("work") == []
