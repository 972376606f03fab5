"""One body of checks, on one process and on MPI's ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.comm.single import SingleCommunicator
from dlio.errors import CommError
from tests.conftest import TorchRun

BODY = Path(__file__).with_name("communicator_checks.py")


def test_one_process_keeps_the_contract(checks: Callable[..., None]) -> None:
    checks(SingleCommunicator())


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_mpi_keeps_the_contract(mpirun: Callable[..., object], ranks: int) -> None:
    done = mpirun(ranks, str(BODY))
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    assert done.stdout.count("kept the contract") == ranks  # type: ignore[attr-defined]


@pytest.mark.mpi
def test_mpi_that_takes_one_call_at_a_time_keeps_it_too(mpirun: Callable[..., object]) -> None:
    done = mpirun(2, str(BODY), env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    assert done.stdout.count("kept the contract") == 2  # type: ignore[attr-defined]
    assert "one at a time" in done.stderr  # type: ignore[attr-defined]


@pytest.mark.mpi
def test_mpi_for_one_thread_keeps_it_with_a_word(mpirun: Callable[..., object]) -> None:
    done = mpirun(2, str(BODY), env={"MPI4PY_RC_THREAD_LEVEL": "funneled"})
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    assert done.stdout.count("kept the contract") == 2  # type: ignore[attr-defined]
    assert done.stderr.count("lets only one thread call it") == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_distributed_keeps_the_contract(torchrun: TorchRun, ranks: int) -> None:
    outputs = torchrun(ranks, str(BODY), "torch")
    assert all("kept the contract" in text for text in outputs)


def test_a_single_process_has_nobody_to_send_to() -> None:
    with pytest.raises(CommError, match="no rank 1"):
        SingleCommunicator().isend(bytearray(1), 1, 0)


@pytest.fixture
def checks() -> Callable[..., None]:
    import runpy

    return runpy.run_path(str(BODY))["check"]  # type: ignore[no-any-return]
