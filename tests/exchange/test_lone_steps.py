"""Trainings on many ranks that share nothing but the data."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun

_SCRIPT = """
import sys, torch
import dlio
data = torch.utils.data.TensorDataset(torch.randn(16, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "together" in sys.argv:
    dlio.distribute(model, optimizer)
if "group" in sys.argv:
    dlio.init_process_group()
    model = torch.nn.parallel.DistributedDataParallel(model)
for (x,) in dlio.DataLoader(data, 4):
    loss = model(x).square().mean()
    if "evaluate" not in sys.argv:
        loss.backward()
    optimizer.step()
"""


@pytest.mark.mpi
def test_ranks_that_train_each_a_model_of_its_own_say_so_once(
    mpirun: MpiRun, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    said = "each of 2 ranks trains on its own share of the data, and nothing averages"
    assert mpirun(2, str(script)).stderr.count(said) == 1
    for way in ("together", "group", "evaluate"):
        done = mpirun(2, str(script), way)
        assert done.returncode == 0, done.stderr
        assert said not in done.stderr
