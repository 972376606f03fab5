"""A rank that waits in vain tells how far it has come, and where."""

from pathlib import Path

import pytest
import torch

from dlio.comm.deadlines import tell_position, wait_all
from dlio.comm.single import SingleCommunicator
from dlio.errors import CommTimeout
from dlio.exchange.step_watch import StepWatch
from tests.conftest import MpiRun

_PARTED = """
import torch
import dlio
from mpi4py import MPI
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
dlio.distribute(net, optimizer)
for calls in TURNS[MPI.COMM_WORLD.rank]:
    for _ in range(calls):
        net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


class _NeverDone:
    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        return True


def test_a_deadline_names_the_steps_and_the_line_of_the_script() -> None:
    watch = StepWatch(SingleCommunicator(), list)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # As Adafactor's, which has a rate of its own.
    for _ in range(3):
        watch.stepped(optimizer)
    tell_position(watch.position)
    try:
        with pytest.raises(
            CommTimeout, match=r"has made 3 steps .* waits at test_step_watch.py:\d+"
        ):
            wait_all([_NeverDone()], "gradients", 0.01, "rank 0")
    finally:
        tell_position(None)
        watch.close()
    with pytest.raises(CommTimeout) as error:
        wait_all([_NeverDone()], "gradients", 0.01, "rank 0")
    assert "has made" not in str(error.value)


@pytest.mark.mpi
def test_a_deadline_names_the_steps_of_ranks_that_called_backward_more_seldom(
    mpirun: MpiRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TIMEOUT", "3")
    script = tmp_path / "parted.py"
    script.write_text(_PARTED.replace("TURNS", "((1, 1, 1), (1, 1, 0))"))
    error = mpirun(2, str(script)).stderr
    assert "Rank 0 has made 2 steps of its optimizers and waits at parted.py:10; " in error
    assert "rank 1 has made 3 steps, the latest at parted.py:11: ranks that" in error


@pytest.mark.mpi
@pytest.mark.parametrize("turns", ["((2, 1), (1, 2))", "((1, 1, 1), (1, 0, 1, 1))"])
def test_gradients_of_different_steps_are_not_averaged(
    mpirun: MpiRun, tmp_path: Path, turns: str
) -> None:
    script = tmp_path / "parted.py"
    script.write_text(_PARTED.replace("TURNS", turns))
    done = mpirun(2, str(script))
    assert done.returncode
    said = "rank 0 is in step {}, at parted.py:10, rank 1 in step {}, at parted.py:10. Ranks have"
    assert said.format(*((1, 2) if "2" in turns else (2, 3))) in done.stderr


_SKIPPING = """
import dlio
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
rank = MPI.COMM_WORLD.rank
data = TensorDataset(torch.randn(24, 3))
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ranks = dlio.distribute(net, optimizer)
for epoch in range(2):
    for number, (x,) in enumerate(LOADER):
        if epoch == 0 and number == 1 and rank in SKIPS:
            continue
        net(x).square().mean().backward()
        optimizer.step()
CLOSES
"""
_DLIO_S = "dlio.DataLoader(data, 4)"
_TORCH_S = "DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank))"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("loader", "skips", "closes"),
    [
        (_DLIO_S, "(1,)", ""),
        (_DLIO_S, "(1,)", "ranks.close()"),
        (_TORCH_S, "(1,)", ""),
        (_DLIO_S, "(0, 1)", ""),
        (_TORCH_S, "()", "ranks.close()"),
    ],
)
def test_a_rank_that_skips_a_batch_is_named_and_nobody_waits_for_it_after_its_end(
    mpirun: MpiRun, tmp_path: Path, loader: str, skips: str, closes: str
) -> None:
    script = tmp_path / "skipping.py"
    text = _SKIPPING.replace("LOADER", loader).replace("SKIPS", skips)
    script.write_text(text.replace("CLOSES", closes))
    done = mpirun(2, str(script))
    if skips != "(1,)":
        assert (done.returncode, "distribute" in done.stderr) == (0, False), done.stderr
        return
    assert done.returncode
    assert "in vain: rank 1 has ended after 5 averages of gradients. Rank 0 has" in done.stderr
    apart = "rank 0 averages gradients of batch 2 at skipping.py:15 and rank 1 those of batch 3"
    assert (apart in done.stderr) == (loader == _DLIO_S), done.stderr


_RAISING = """
import torch
from mpi4py import MPI
import dlio
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
BEGINS
    for step in range(4):
        if step == 2 and MPI.COMM_WORLD.rank == 1:
            raise ValueError("bad sample 17")
        net(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    "begins",
    ["with dlio.distribute(net, optimizer):", "ranks = dlio.distribute(net, optimizer)\nif True:"],
)
def test_ranks_that_wait_for_one_that_has_raised_tell_its_exception_and_line(
    mpirun: MpiRun, tmp_path: Path, begins: str
) -> None:
    script = tmp_path / "raising.py"
    text = _RAISING.replace("BEGINS", begins)
    script.write_text(text)
    done = mpirun(2, str(script))
    assert done.returncode
    line = text.partition("raise")[0].count("\n") + 1
    why = f"ValueError: bad sample 17 at raising.py:{line}"
    in_vain = f"in vain: rank 1 has ended after 2 averages of gradients, by {why}"
    last = [each for each in done.stderr.splitlines() if "Error: " in each][-1]
    assert in_vain in done.stderr, done.stderr
    assert why in last or last == "ValueError: bad sample 17", last
    assert "unlike lengths" not in done.stderr
