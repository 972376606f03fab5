"""torch.distributed on MPI: the operations as torch documents them, and torch's trainers."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun

CHECKS = Path(__file__).with_name("process_group_checks.py")
TRAINING = Path(__file__).with_name("training_checks.py")
OPERATIONS = ["single_tensors", "coalesced", "messages", "objects", "groups", "functional"]

pytestmark = pytest.mark.mpi


def _kept(mpirun: MpiRun, ranks: int, body: Path, *checks: str, **env: str) -> str:
    done = mpirun(ranks, str(body), *checks, env=env, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept the promises") == ranks, done.stdout
    return done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.daily("3")
def test_operations_do_what_torch_documents(mpirun: MpiRun, ranks: int) -> None:
    _kept(mpirun, ranks, CHECKS, *OPERATIONS)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.daily("3")
def test_reductions_are_right_and_the_same_on_all_ranks(mpirun: MpiRun, ranks: int) -> None:
    _kept(mpirun, ranks, CHECKS, "reductions", "reductions_to_one")


def test_every_type_layout_and_operation_equals_numpys_or_is_refused(mpirun: MpiRun) -> None:
    done = mpirun(3, "-W", "ignore", "-m", "tests.comm.process_group.collective_table")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cells equal numpy's") == 3


def test_every_type_and_shape_is_moved(mpirun: MpiRun) -> None:
    _kept(mpirun, 3, CHECKS, "movement")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.daily("3")
def test_operations_overlap_and_callbacks_may_start_others(mpirun: MpiRun, ranks: int) -> None:
    _kept(mpirun, ranks, CHECKS, "async", "callbacks")


def test_groups_are_made_anew_and_for_other_backends(mpirun: MpiRun) -> None:
    _kept(mpirun, 3, CHECKS, "again")


def test_one_rank_is_a_group_too(mpirun: MpiRun) -> None:
    _kept(mpirun, 1, CHECKS, "reductions_to_one", "movement", "async", "callbacks")


def test_mpi_with_serialised_threads_is_supported(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, CHECKS, "messages", "async", "callbacks", MPI4PY_RC_THREAD_LEVEL="serialized")


def test_mpi_with_a_single_thread_is_refused(mpirun: MpiRun) -> None:
    done = mpirun(1, str(CHECKS), "async", env={"MPI4PY_RC_THREAD_LEVEL": "funneled"})
    assert done.returncode != 0
    assert "lets only one thread call it" in done.stderr


def test_waiting_for_an_absent_rank_ends_at_the_deadline(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, CHECKS, "absent")


def test_making_a_group_without_one_of_its_members_fails(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, CHECKS, "member")


def test_a_program_ends_with_operations_under_way(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, CHECKS, "unfinished")


def test_ddp_raises_a_clear_error_when_a_rank_has_ended(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, CHECKS, "bereaved")


def test_ranks_that_call_different_operations_are_reported(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, CHECKS, "callbacks", "mismatch")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_and_fsdp_train_as_one_process_does(mpirun: MpiRun, ranks: int) -> None:
    _kept(mpirun, ranks, TRAINING, "ddp", "unused", "fsdp")


def test_comm_hooks_of_ddp_work_and_leave_ranks_equal(mpirun: MpiRun) -> None:
    _kept(mpirun, 2, TRAINING, "hooks")


def test_a_mesh_trains_and_its_checkpoint_loads_on_fewer_ranks(
    mpirun: MpiRun, tmp_path: Path
) -> None:
    _kept(mpirun, 4, TRAINING, "mesh", "save", str(tmp_path / "checkpoint"))
    _kept(mpirun, 2, TRAINING, "load", str(tmp_path / "checkpoint"))
