"""A torch.distributed process group on MPI: its communicators, and how operations start.

Every operation (`collectives`) is one or two non-blocking MPI calls (`mpi_work`) on bytes in host
memory (`buffers`). The first and the second call use different communicators, and operations that
callbacks start use two more. With TORCH_DISTRIBUTED_DEBUG=DETAIL, an additional first call checks
that all ranks have called the same operation with the same sizes.
"""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import Store

from dlio.comm.mpi import one_at_a_time
from dlio.comm.process_group.buffers import OperationMemory, typed
from dlio.comm.process_group.mpi_work import (
    CallQueue,
    GroupState,
    JointWork,
    MpiCall,
    MpiWork,
    OperationProgress,
    in_callback,
)
from dlio.errors import CommError, UsageError
from dlio.util.buffer_pool import BufferPool
from dlio.util.units import counted

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

BACKEND: Final = "dlio-mpi"
STEPS: Final = 2
"""Largest number of MPI calls of one operation, each on a communicator of its own."""
CHECKED_STEPS: Final = 3
"""The same, with the call that checks that ranks agree."""

Tensors = Sequence[torch.Tensor]
Start = Callable[[MPI.Intracomm], MPI.Request]


class MpiGroup(dist.ProcessGroup):
    """A torch process group whose ranks are MPI's.

    Owns its communicators: 2 * STEPS of them, or 2 * CHECKED_STEPS if operations are checked.
    """

    def __init__(
        self, comms: Sequence[MPI.Intracomm], store: Store, timeout_s: float, name: str
    ) -> None:
        rank, size = comms[0].rank, comms[0].size
        super().__init__(rank, size)  # type: ignore[call-arg] # the stub knows another form
        self._rank, self._size, self._store, self._comms = rank, size, store, comms
        self._name = name
        self._checked = len(comms) == 2 * CHECKED_STEPS
        half = len(comms) // 2
        self._lanes = [[CallQueue(comm) for comm in part] for part in (comms[:half], comms[half:])]
        """[0]: lanes of operations that the program starts; [1]: of those that callbacks start."""
        self._mail = CallQueue(comms[0])
        self._members = GroupState(f"rank {rank} of {size} of the group {name!r}", timeout_s)
        self._progress, self._scratch = _open_progress(self)
        self._coalesced: list[MpiWork] | None = None
        self.made: Counter[str] = Counter()
        """Number of groups that this rank has created, by their ranks. Used in the world only."""

    # Properties that torch reads.

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's
        return self._name

    @property
    def group_name(self) -> "GroupName":
        return cast("GroupName", self._name)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in devices()]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_group_store(self) -> Store:
        return self._store

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def timeout_s(self) -> float:
        """Deadline in seconds for operations without a timeout of their own."""
        return self._members.timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        self._members.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Wait for this rank's collectives and end the group. Collective; called by torch."""
        for work in list(self._members.pending):
            if work.collective:
                with contextlib.suppress(CommError):
                    work.wait()  # Its error goes to the thread that waits for it.
        broken = self._members.broken
        self._progress.give_up(
            self._members, CommError(f"{self._members.who} was destroyed before this was over")
        )
        if broken is None:
            # After a failure Free could wait for ever for a missing rank.
            for comm in self._comms:
                with one_at_a_time:
                    comm.Free()
        _close_progress(self)

    def abort(self) -> None:
        """Fail all pending operations, without waiting for other ranks."""
        self._progress.give_up(self._members, CommError(f"{self._members.who} was aborted"))

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> JointWork:
        works, self._coalesced = self._coalesced or [], None
        return JointWork(works)

    def _collective(
        self,
        what: str,
        starts: Sequence[Start],
        staging: OperationMemory,
        value: Any,
        opts: Any,
        finish: Callable[[MPI.Status], None] | None = None,
    ) -> MpiWork:
        lanes = self._lanes[in_callback()]
        if self._checked:
            starts = self._agreed(what, starts)
        steps = [MpiCall(lane, start) for lane, start in zip(lanes, starts, strict=False)]
        return self._submit(what, steps, staging, value, opts, finish)

    def _agreed(self, what: str, starts: Sequence[Start]) -> list[Start]:
        """Prepend a step that checks that all ranks have called the same operation.

        If they have not, Open MPI may crash or return wrong numbers.
        """
        code = zlib.crc32(what.encode())
        mine, least = torch.tensor([code, -code]), torch.zeros(2, dtype=torch.int64)

        def ask(comm: MPI.Intracomm) -> MPI.Request:
            kind = MPI.INT64_T
            return comm.Iallreduce(typed(mine, kind), typed(least, kind), MPI.MIN)

        def start(comm: MPI.Intracomm) -> MPI.Request:
            if int(least[0]) != -int(least[1]):
                raise CommError(
                    f"{self._members.who}: ranks have called different operations; this one: {what}"
                )
            return starts[0](comm)

        return [ask, start, *starts[1:]]

    def _submit(
        self,
        what: str,
        steps: Sequence[MpiCall],
        staging: OperationMemory,
        value: Any,
        opts: Any = None,
        finish: Callable[[MPI.Status], None] | None = None,
        collective: bool = True,
    ) -> MpiWork:
        members = self._members
        if members.broken is not None:
            raise CommError(
                f"{members.who}: cannot start {what} after a failure; destroy the group: "
                f"{members.broken}"
            )
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0.0
        work = MpiWork(
            self._progress,
            members,
            what,
            steps,
            staging,
            value,
            timeout_s if timeout_s > 0 else members.timeout_s,
            finish or (lambda _: staging.finish()),
            collective,
        )
        self._progress.submit(work, watched=not getattr(opts, "asyncOp", True))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _staging(self, tensors: Tensors) -> OperationMemory:
        places = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        if len(places) > 1:
            raise UsageError(f"the tensors of one operation are on several devices: {places}")
        device = places.pop()
        if device.type not in devices():
            raise UsageError(f"{BACKEND} takes tensors on {devices()}, not on {device}")
        self._check_layout(tensors)
        return OperationMemory(self._scratch, device)

    def _check_layout(self, tensors: Tensors) -> None:
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise UsageError(f"{BACKEND} takes dense tensors: call to_dense(), or sparse=False")

    def _fit(self, what: str, got: Sequence[int], wanted: Sequence[int]) -> None:
        if list(got) != list(wanted):
            raise UsageError(
                f"{what}: tensors of {list(got)} bytes where {list(wanted)} are needed"
            )

    def _fit_ranks(self, what: str, items: Sequence[Any]) -> None:
        if len(items) != self._size:
            raise UsageError(
                f"{what}: {counted(len(items), 'tensor')} or sizes for "
                f"{counted(self._size, 'rank')}"
            )


_open_groups: list[MpiGroup] = []
_shared: tuple[OperationProgress, BufferPool] | None = None
"""Shared by all groups of this process while one exists."""


def _open_progress(group: MpiGroup) -> tuple[OperationProgress, BufferPool]:
    global _shared
    if _shared is None:
        # Reuse pays: touching new pages of the host costs more than copying.
        _shared = (OperationProgress(), BufferPool(4, slack=4.0))
    _open_groups.append(group)
    return _shared


def _close_progress(group: MpiGroup) -> None:
    global _shared
    if group in _open_groups:
        _open_groups.remove(group)
        if not _open_groups and _shared is not None:
            _shared[0].close()
            _shared = None


def devices() -> list[str]:
    """Return the types of devices whose tensors the group moves."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
