"""The conformance suite of exchanges on real ranks; tests/testing runs it between threads."""

import pytest

from dlio.exchange import NAMES
from tests.conftest import MpiRun, TorchRun

SUITE = ("-m", "dlio.testing.exchange_suite")


@pytest.mark.mpi
def test_ranks_of_mpi_keep_the_contract(mpirun: MpiRun) -> None:
    done = mpirun(3, *SUITE)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        assert done.stdout.count(f": {name} keeps every promise") == 3


@pytest.mark.nightly  # By day, the checks of tests/exchange run on such ranks.
def test_ranks_of_torch_distributed_keep_the_contract(torchrun: TorchRun) -> None:
    for said in torchrun(2, *SUITE, "allreduce", "gossip"):
        assert said.count("keeps every promise") == 2
