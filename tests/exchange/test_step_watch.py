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
