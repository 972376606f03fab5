"""`dlio train` with a tier on its device, which is the processor here."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.util.settings import DEVICE_TIER

_SAMPLES = 101
_LOSSES = [0.704, 0.522]
"""Of a run from either tier; pixels differ by 1 of 255 at most."""


@pytest.mark.parametrize("kind", ["gpu", "ram"])
@pytest.mark.daily("gpu")
def test_a_second_epoch_comes_from_the_decoded_tier_with_the_same_loss(
    dlio: Callable[..., subprocess.CompletedProcess[str]],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setenv(DEVICE_TIER, "1")
    shape = ("--epochs", "2", "--batch-size", "20", "--image-size", "32", "--device", "cpu")
    tiers = f"{kind}:8MiB:decoded,ram:64MiB"
    done = dlio("train", str(pictures), *shape, "--tiers", tiers, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert f"{kind}:8MiB:decoded" in report["tiers"]
    assert [epoch["decoded"] for epoch in report["epochs"]] == [0, _SAMPLES]
    losses = [epoch["loss"] for epoch in report["epochs"]]
    assert losses == pytest.approx(_LOSSES, rel=0.05)
