"""`dlio train` with exchanges in its devices' memory, which are the processor's here."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.util.settings import DEVICE_EXCHANGE


@pytest.mark.nightly
def test_a_training_by_torchs_groups_has_the_losses_of_one_through_the_host(
    dlio: Callable[..., subprocess.CompletedProcess[str]],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses, sent = [], []
    for wanted in ("", "1"):
        monkeypatch.setenv(DEVICE_EXCHANGE, wanted)
        shape = ("--epochs", "1", "--batch-size", "10", "--image-size", "32", "--device", "cpu")
        ranks = ("-n", "2", "--backend", "torch", "--exchange", "allreduce")
        done = dlio("train", str(pictures), *ranks, *shape, "--report", "r.json")
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        (epoch,) = json.loads((tmp_path / "r.json").read_text())["epochs"]
        losses.append(epoch["loss"])
        sent.append(epoch["exchange_bytes"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert sent[1] == sent[0]
