"""The conformance suite of communicators: one process, ranks of MPI and of torch.distributed."""

from pathlib import Path

import pytest

from dlio.comm import Communicator
from dlio.comm.single import SingleCommunicator
from dlio.testing import CommunicatorTests
from tests.conftest import MpiRun, TorchRun

SUITE = ("-m", "dlio.testing.communicator")
NODES = str(Path(__file__).with_name("nodes_checks.py"))
KEPT = "every promise is kept"


class TestOneProcess(CommunicatorTests):
    def make(self) -> Communicator:
        return SingleCommunicator()


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.daily("3")
def test_mpi_keeps_the_contract(mpirun: MpiRun, ranks: int) -> None:
    done = mpirun(ranks, *SUITE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(KEPT) == ranks
    assert done.stdout.count("kept: reductions sum in place") == 1


@pytest.mark.mpi
def test_mpi_with_serialised_threads_keeps_the_contract(mpirun: MpiRun) -> None:
    done = mpirun(2, *SUITE, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(KEPT) == 2
    assert "one at a time" in done.stderr


@pytest.mark.mpi
def test_mpi_with_a_single_thread_keeps_the_contract_and_warns(mpirun: MpiRun) -> None:
    done = mpirun(2, *SUITE, env={"MPI4PY_RC_THREAD_LEVEL": "funneled"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(KEPT) == 2
    assert done.stderr.count("lets only one thread call it") == 1


@pytest.mark.mpi
def test_a_broken_communicator_ends_the_program(mpirun: MpiRun) -> None:
    done = mpirun(2, *SUITE, "tests.comm.deaf:make", env={"DLIO_TIMEOUT": "5"})
    assert done.returncode != 0
    assert "broken: " in done.stderr
    assert KEPT not in done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.nightly  # By day, test_torchdist.py does with four ranks.
def test_torch_distributed_keeps_the_contract(torchrun: TorchRun, ranks: int) -> None:
    assert all(KEPT in text for text in torchrun(ranks, *SUITE))


@pytest.mark.mpi
def test_ranks_find_their_nodes(mpirun: MpiRun) -> None:
    done = mpirun(3, NODES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nodes are known") == 3
