"""The communicator of all ranks of the job.

`world()` selects the implementation: torch.distributed if `dlio -n --backend torch` started the
process; MPI if mpirun or srun did, or if the process initialised MPI itself with more than one
rank; else torch.distributed if that is initialised, or if `torchrun` started the process; else a
single process.
"""

import contextlib
import os
import sys
from types import ModuleType

from dlio.comm.comm_protocol import Communicator
from dlio.comm.launch_detection import check_launch, torchrun_place, whole_number
from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.comm.survival.membership import Membership
from dlio.errors import UsageError
from dlio.util.settings import DONE, SPARES, settings
from dlio.util.whole_files import write_whole

_world: Communicator | None = None
_torch_world: object = None
"""Default group of torch.distributed on which `_world` is based."""


def world() -> Communicator:
    """Return the communicator of all ranks.

    It is created at the first call, and again when torch.distributed is re-initialised.

    Collective over the ranks at the first call.

    Raises CommError when the process runs under MPI but no MPI library can be loaded, and
    UsageError when a launcher started others that are not found: see `check_launch`.
    """
    global _world, _torch_world
    if under_torch():
        if _world is None:
            _world = _launched_world()
        return _world
    if under_mpi() or mpi_ranks() > 1:
        if _world is None:
            from dlio.comm.mpi import mpi_world

            check_launch(max(1, mpi_ranks()))
            # A membership costs two communicators and a thread, so only jobs that ask for survival
            # have one.
            least = settings().min_ranks
            if least is not None and mpi_ranks() > 1:
                from dlio.comm.survival.ulfm import UlfmMembership

                _world = UlfmMembership(least, int(os.environ.get(SPARES, "0"))).world
            else:
                _world = mpi_world()
        return _world
    group = _torch_group()
    if _world is None or group is not _torch_world:
        if _torch_world is not None and _world is not None:
            _world.close()
        _world, _torch_world = _ordinary_world(group), group
    return _world


def replace_world(comm: Communicator) -> None:
    """Have `world` return another communicator of the same ranks, from its first use on."""
    global _world
    _world = comm


def keep_world() -> None:
    """Have `world` return the same communicator as before, although torch.distributed has been
    initialised or ended since."""
    global _torch_world
    _torch_world = _torch_group()


def _launched_world() -> Communicator:
    """Return the communicator of ranks that dlio's launcher started without MPI. Collective."""
    from dlio.comm.survival.job_store import open_store

    store, least = open_store(), settings().min_ranks
    rank, size = whole_number("RANK"), whole_number("WORLD_SIZE")
    if least is not None:
        from dlio.comm.survival.store_membership import StoreMembership

        return StoreMembership(store, rank, size, least).world
    from dlio.comm.deadlines import default_timeout_s
    from dlio.comm.survival.rendezvous import Rendezvous
    from dlio.comm.torchdist import TorchCommunicator

    meeting = Rendezvous(store, "", lambda: None, default_timeout_s())
    return TorchCommunicator(meeting, "dlio", rank, size)


def _ordinary_world(group: object) -> Communicator:
    """Return the communicator of a default group of torch's, of torchrun's ranks, or of one rank.

    Collective. Raises UsageError when a launcher started others that are not found.
    """
    if group is not None:
        from dlio.comm.torchdist import torch_world

        comm = torch_world()
    elif torchrun_place() is not None:
        from dlio.comm.torchdist import environment_world

        comm = environment_world()
    else:
        from dlio.comm.single import SingleCommunicator

        comm = SingleCommunicator()
    check_launch(comm.size)
    return comm


def membership() -> Membership | None:
    """Return the surviving ranks of a job whose ranks survive each other's loss.

    None where the job ends with any rank, and before the first call of `world`.
    """
    left: Membership | None = getattr(_world, "membership", None)
    return left


def mpi_ranks() -> int:
    """Ranks of MPI if it is initialised, else 0.

    A single rank does not mean that the process was started under MPI: some libraries initialise it
    only to look for other ranks.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    # Looked up and not imported: importing mpi4py.MPI initialises MPI, and leaves a segment in
    # /dev/shm where no mpirun removes it.
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return 0
    return int(mpi.COMM_WORLD.size)


def torch_distributed() -> ModuleType | None:
    """Return torch.distributed; None if it is not initialised."""
    # Looked up: importing torch takes seconds, and a command such as `dlio ls` needs none of it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _torch_group() -> object:
    distributed = torch_distributed()
    return None if distributed is None else distributed.group.WORLD


def leave_code(code: int) -> None:
    """Leave the job's exit code for the launcher.

    Where that cannot be written, the launcher counts this rank as lost; it has said why it ends.
    """
    with contextlib.suppress(UsageError):
        write_whole(os.environ[DONE], lambda file: file.write(str(code).encode()))


def abort(code: int) -> None:
    """End all ranks; return if this is the only rank, or if the launcher ends the others.

    For the top level of a program, after it has printed its error.
    """
    if under_torch() and DONE in os.environ:
        leave_code(code)
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(code)
