"""A script that prunes its network, run unmodified on several ranks."""

import re
from pathlib import Path

import pytest
import torch

from tests.integrations.script.test_losses import _survived
from tests.integrations.script.test_scripts import _flat, _run

SCRIPT = Path(__file__).parents[1] / "script.py"


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_pruned_script_gets_the_weights_that_one_process_gets(ranks: int, tmp_path: Path) -> None:
    results = {}
    for name, words in (("one", []), ("many", ["-m", "dlio.cli", "run", "-n", str(ranks)])):
        out = str(tmp_path / f"{name}.pt")
        done = _run(*words, str(SCRIPT), out)
        assert done.returncode == 0, done.stderr
        results[name] = _flat(torch.load(out)), re.sub(r"\d+\.\d+", "#", done.stdout)
    (expected, printed), (trained, said) = results["one"], results["many"]
    assert trained.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(trained[key], tensor, atol=1e-5, rtol=0), key
    assert said == printed


@pytest.mark.mpi
@pytest.mark.cold("nightly")
@pytest.mark.nightly
def test_a_pruned_script_survives_a_kill(tmp_path: Path) -> None:
    """Other neurons may be cut than without the kill."""
    alone = _run(str(SCRIPT), str(tmp_path / "alone.pt"))
    done = _survived(SCRIPT, str(tmp_path / "out.pt"), ranks=3, ends={1: [5, "before"]})
    assert re.sub(r"\d+\.?\d*", "#", done.stdout) == re.sub(r"\d+\.?\d*", "#", alone.stdout)
