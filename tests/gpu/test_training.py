"""Training on a GPU: exchanges of two ranks, checkpoint copies, and steps as on the processor."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.train.checkpoint.host_copies import HostCopies

pytestmark = pytest.mark.gpu
MpiRun = Callable[..., subprocess.CompletedProcess[str]]
_CYCLES = 20_000_000
_cuda: Any = torch.cuda  # `_sleep` has no types.


def _exchanged(mpirun: MpiRun, device: str, exchange: str) -> Any:
    body = str(Path(__file__).with_name("exchange_checks.py"))
    done = mpirun(2, body, device, exchange)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


@pytest.mark.cold
@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["allreduce", "allreduce+onebit", "gossip", "diloco(2)"])
def test_two_ranks_on_one_gpu_exchange_as_on_the_processor(mpirun: MpiRun, exchange: str) -> None:
    on_gpu = _exchanged(mpirun, "cuda:0", exchange)
    on_host = _exchanged(mpirun, "cpu", exchange)
    assert (on_gpu["path"], on_host["path"]) == ("pinned", "host")
    assert on_gpu["different"] == on_host["different"]
    # Signs of sums near zero differ by rounding, so that some entries differ by a step of 1 bit.
    apart = torch.tensor(on_gpu["weights"]) - torch.tensor(on_host["weights"])
    bound = 1e-2 if "onebit" in exchange else 1e-4
    assert float(apart.abs().mean()) < bound


def test_checkpoints_hold_the_values_of_their_step() -> None:
    weights = torch.zeros(1 << 20, device="cuda")
    strange = torch.arange(60.0, device="cuda").reshape(3, 4, 5).permute(2, 0, 1)[:, ::2]
    copies = HostCopies()
    for step in range(3):
        _cuda._sleep(_CYCLES)
        weights.fill_(step)
        copies.begin({"weights": weights, "strange": strange}, later={"weights", "strange"})
        copies.finish()
        assert copies.wait(60)
        weights.fill_(-1)
        assert torch.equal(copies.held["weights"], torch.full((1 << 20,), float(step)))
        assert torch.equal(copies.held["strange"], strange.cpu())


def test_an_epoch_on_the_gpu_is_that_of_the_processor_within_rounding(tmp_path: Path) -> None:
    from dlio.cli import main
    from dlio.cli.demo_pictures import draw_dataset

    draw_dataset(str(tmp_path / "pictures"), images=32, validation=16, classes=4)
    losses = []
    for device in ("cpu", "cuda"):
        report = tmp_path / f"{device}.json"
        shape = ["--epochs", "1", "--batch-size", "16", "--image-size", "32", "--seed", "1"]
        place = ["--device", device, "--precision", "fp32", "--tiers", "ram:64MiB"]
        with pytest.raises(SystemExit) as ended:
            main(["train", str(tmp_path / "pictures"), *shape, *place, "--report", str(report)])
        assert ended.value.code == 0
        losses.append(json.loads(report.read_text())["epochs"][0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
