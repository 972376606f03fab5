"""Lightning's strategy "dlio", under mpirun and torchrun: it trains as one process does."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MpiRun, TorchRun

BODY = str(Path(__file__).with_name("lightning_checks.py"))
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="pip install 'dlio[dev]'"
    ),
    pytest.mark.usefixtures("open_mpi_segments"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one process with the same global batches."""
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, BODY, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return _results(folder, 1)[0]


def _results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _check(alone: dict[str, Any], results: list[dict[str, Any]], folder: Path) -> None:
    for each in results:
        # The gradient is accumulated over two batches, averaged over ranks, and clipped.
        assert each["weights"] == pytest.approx(alone["weights"], abs=1e-5)
        assert each["largest"] == pytest.approx(0.3, abs=1e-4)
        # Two optimizers stepped by hand; the loader distributes its data; the last batch is small.
        assert each["by_hand"] == pytest.approx(alone["by_hand"], abs=1e-5)
        assert each["unfrozen"] == pytest.approx(alone["unfrozen"], abs=1e-5)
        # A learning rate that follows a value of each rank's own samples.
        assert each["scheduled"][:4] == [0.02, 0.02, 0.01, 0.005]
        assert each["scheduled"] == pytest.approx(alone["scheduled"], abs=1e-5)
        for key in ("val", "metric", "again"):
            assert each[key] == pytest.approx(alone[key], abs=1e-5), key
        for exchange in ("gossip", "gossip(gradient)", "local-sgd(2)+int8", "asgd"):
            weights, messages, steps, _ = each[exchange]
            assert weights == pytest.approx(results[0][exchange][0], abs=1e-6)
            assert weights != alone[exchange][0]
            if exchange.startswith("gossip"):
                assert messages == steps
            assert messages > 0
    # Lightning's sampler in torch's loaders distributes the samples over the ranks.
    shares = [each["gossip"][3] for each in results]
    for parts, whole in (
        ([each["seen"] for each in results], alone["seen"]),
        ([each["seen_by_hand"] for each in results], alone["seen_by_hand"]),
        (shares, alone["gossip"][3]),
    ):
        assert sorted(chain.from_iterable(parts)) == sorted(whole)
    assert [path.name for path in (folder / "saved").iterdir()] == ["last.ckpt"]


@pytest.mark.mpi
def test_ranks_of_mpi_train_as_one_process(
    mpirun: MpiRun, alone: dict[str, Any], tmp_path: Path
) -> None:
    done = mpirun(2, BODY, str(tmp_path), timeout_s=400)
    assert done.returncode == 0, done.stderr[-4000:]
    _check(alone, _results(tmp_path, 2), tmp_path)


@pytest.mark.nightly  # By day, ranks of MPI do.
def test_ranks_of_torchrun_train_as_one_process(
    torchrun: TorchRun, alone: dict[str, Any], tmp_path: Path
) -> None:
    torchrun(2, BODY, str(tmp_path))
    _check(alone, _results(tmp_path, 2), tmp_path)
