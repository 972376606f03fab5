"""Trainings on many ranks that share nothing but the data."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun

_BY_HAND = {
    "object": """
from mpi4py.MPI import COMM_WORLD
def average(gradient):
    COMM_WORLD.Allreduce(gradient.numpy().copy(), gradient.numpy())
""",
    "call": """
def average(gradient):
    from mpi4py import MPI as messages
    messages.COMM_WORLD.Allreduce(gradient.numpy().copy(), gradient.numpy())
""",
}
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
        if "average" in globals():
            average(model.weight.grad)
    optimizer.step()
"""


@pytest.mark.cold  # A fork has modules that average by MPI.
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


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["script", "module"])
@pytest.mark.parametrize("way", _BY_HAND)
def test_sums_by_mpi_of_the_users_own_are_an_exchange_wherever_they_are(
    way: str, where: str, mpirun: MpiRun, tmp_path: Path
) -> None:
    script, module = tmp_path / "train.py", tmp_path / "own_sums.py"
    module.write_text(_BY_HAND[way])
    script.write_text(
        (_BY_HAND[way] if where == "script" else "from own_sums import average") + _SCRIPT
    )
    done = mpirun(2, str(script))
    assert done.returncode == 0, done.stderr
    assert "trains on its own share" not in done.stderr
