# mypy: disable-error-code="override, assignment"
# torch's stubs overload each operation; torch calls a subclass only in the form with options.
"""The operations of torch.distributed, implemented by MPI calls."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from dlio.comm.process_group.buffers import (
    OperationMemory,
    check_results,
    offsets,
    size_of,
    split,
    typed,
    whole,
)
from dlio.comm.process_group.mpi_group import MpiGroup, Start, Tensors
from dlio.comm.process_group.mpi_reductions import Reduction
from dlio.comm.process_group.mpi_work import MpiCall, MpiWork
from dlio.errors import CommError, UsageError
from dlio.util.units import counted

_SMALL_BYTES: Final = 1 << 15
"""Size up to which a reduction in a type unknown to MPI is converted to a wider one, such as
float32, and reduced by MPI in one step. Small reductions cost mainly messages, and exchanging
pieces takes one per rank."""


class MpiProcessGroup(MpiGroup):
    """The operations of a torch process group whose ranks are MPI's.

    Arguments are those of torch's C++ ProcessGroup. Each operation raises UsageError for tensors of
    the wrong size, type or device, and CommError if the group has failed before.
    """

    # Collectives.

    def barrier(self, opts: BarrierOptions | None = None) -> MpiWork:
        staging = self._staging([])
        return self._collective("barrier", [lambda comm: comm.Ibarrier()], staging, [], opts)

    def broadcast(self, tensors: Tensors, opts: BroadcastOptions) -> MpiWork:
        staging = self._staging(tensors)
        check_results(tensors)  # On all ranks: where one alone refuses, the others wait for it.
        root = opts.rootRank
        flat = staging.source(tensors) if self._rank == root else staging.sink(tensors)
        what = f"broadcast of {len(flat)} bytes from rank {root}"
        return self._collective(
            what, [lambda comm: comm.Ibcast(whole(flat), root)], staging, tensors, opts
        )

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions) -> MpiWork:
        return self._reduce("all_reduce", tensors, opts, None)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: ReduceOptions) -> MpiWork:
        return self._reduce("reduce", tensors, opts, opts.rootRank)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> MpiWork:
        # With several inputs, the i-th is gathered into the i-th list.
        rows = list(zip(*outputs, strict=True))
        return self._all_gather("all_gather", rows, inputs, outputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> MpiWork:
        return self._all_gather("all_gather_coalesced", outputs, inputs, outputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, value: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> MpiWork:
        return self.all_gather_single_coalesced([output], [value], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> MpiWork:
        rows = list(zip(*(self._pieces("all_gather_single", t) for t in outputs), strict=True))
        return self._all_gather("all_gather_single", rows, inputs, outputs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: GatherOptions) -> MpiWork:
        root, what = opts.rootRank, "gather"
        staging = self._staging(inputs)
        mine = staging.source(inputs)
        sizes = [len(mine)] * self._size
        theirs: Any = None
        if self._rank == root:
            self._fit(what, [size_of(t) for t in outputs[0]], sizes)
            theirs = staging.sink(outputs[0])

        def start(comm: MPI.Intracomm) -> MPI.Request:
            into = None if theirs is None else split(theirs, sizes)
            return comm.Igatherv(whole(mine), into, root)

        what = f"gather of {len(mine)} bytes a rank to rank {root}"
        return self._collective(what, [start], staging, outputs, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: ScatterOptions) -> MpiWork:
        root, what = opts.rootRank, "scatter"
        staging = self._staging(outputs)
        mine = staging.sink(outputs)
        sizes = [len(mine)] * self._size
        theirs: Any = None
        if self._rank == root:
            self._fit(what, [size_of(t) for t in inputs[0]], sizes)
            theirs = staging.source(inputs[0])

        def start(comm: MPI.Intracomm) -> MPI.Request:
            given = None if theirs is None else split(theirs, sizes)
            return comm.Iscatterv(given, whole(mine), root)

        what = f"scatter of {len(mine)} bytes a rank from rank {root}"
        return self._collective(what, [start], staging, outputs, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: ReduceScatterOptions
    ) -> MpiWork:
        # With several outputs, the i-th receives the sum of the i-th list.
        return self._reduce_scatter(outputs, list(zip(*inputs, strict=True)), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, value: torch.Tensor, opts: ReduceScatterOptions
    ) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions
    ) -> MpiWork:
        pieces = (self._pieces("reduce_scatter_single", tensor) for tensor in inputs)
        return self._reduce_scatter(outputs, list(zip(*pieces, strict=True)), opts)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: AllToAllOptions | None = None
    ) -> MpiWork:
        return self._all_to_all("all_to_all", outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: AllToAllOptions | None = None,
    ) -> MpiWork:
        what = "all_to_all_single"
        outputs = self._rows(what, output, output_sizes)
        inputs = self._rows(what, value, input_sizes)
        return self._all_to_all(what, outputs, inputs, [output], opts)

    # Names of these operations before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: Tensors, rank: int, tag: int) -> MpiWork:
        staging = self._staging(tensors)
        flat = staging.source(tensors)
        what = f"send to rank {rank}, tag {tag}"
        start = self._message(what, rank, tag, lambda comm: comm.Isend(whole(flat), rank, tag))
        return self._submit(what, [start], staging, tensors, collective=False)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> MpiWork:
        staging = self._staging(tensors)
        flat = staging.sink(tensors)
        anyone = rank == MPI.ANY_SOURCE
        what = f"receive from {'any rank' if anyone else f'rank {rank}'}, tag {tag}"
        start = self._message(what, rank, tag, lambda comm: comm.Irecv(whole(flat), rank, tag))

        def finish(status: MPI.Status) -> None:
            came = status.Get_count(MPI.BYTE)
            if came != len(flat):
                raise CommError(
                    f"{self._members.who}: {what}: {came} bytes came from rank "
                    f"{status.Get_source()} where {len(flat)} were expected"
                )
            staging.finish()

        return self._submit(what, [start], staging, tensors, finish=finish, collective=False)

    def recv_anysource(self, tensors: Tensors, tag: int) -> MpiWork:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # Shared by the operations above.

    def _reduce(self, what: str, tensors: Tensors, opts: Any, root: int | None) -> MpiWork:
        """Reduce to rank `root`, or to all ranks for None."""
        reduction = self._reduction(what, tensors, opts)
        native = reduction.native()
        staging = self._staging(tensors)
        check_results(tensors)
        flat = staging.source(tensors).view(reduction.dtype)
        keeps = root is None or root == self._rank
        what += f" {reduction}, {flat.numel()} numbers" + ("" if root is None else f" to {root}")
        wide = None if native else Reduction(reduction.kind, reduction.wide())
        in_mpi = wide or reduction
        known = in_mpi.native()
        if known is None or (wide is not None and size_of(flat) > _SMALL_BYTES):
            steps = self._in_pieces(reduction, staging, flat, tensors if keeps else None)
            return self._collective(what, steps, staging, tensors, opts)
        # Open MPI's fastest algorithms need input and output in separate memory.
        total = staging.sink(tensors, apart=True).view(reduction.dtype) if keeps else None
        kind, op = known
        sent: list[torch.Tensor] = []
        got = total
        if wide is not None and total is not None:
            got = staging.spare(wide.dtype.itemsize * total.numel()).view(wide.dtype)

        def start(comm: MPI.Intracomm) -> MPI.Request:
            given = reduction.scaled(flat) if wide is None else reduction.widened(flat)
            sent.append(in_mpi.encoded(given))
            into = None if got is None else typed(got, kind)
            if root is None:
                return comm.Iallreduce(typed(sent[0], kind), into, op)
            return comm.Ireduce(typed(sent[0], kind), into, op, root)

        def finish(_: MPI.Status) -> None:
            with torch.inference_mode():
                if got is not None and total is not None:
                    in_mpi.decode(got)
                    in_mpi.averaged(got, self._size)
                    if wide is not None:
                        total.copy_(got)
            staging.finish()

        return self._collective(what, [start], staging, tensors, opts, finish)

    def _in_pieces(
        self,
        reduction: Reduction,
        staging: OperationMemory,
        flat: torch.Tensor,
        into: Tensors | None,
    ) -> list[Start]:
        """Reduce in two steps: each rank reduces one piece of the tensors, then sends it to all."""
        width = reduction.dtype.itemsize
        share, more = divmod(flat.numel(), self._size)
        sizes = [(share + (rank < more)) * width for rank in range(self._size)]
        mine = sizes[self._rank]
        rows, piece = staging.spare(mine * self._size), staging.spare(mine)
        result = staging.spare(size_of(flat)) if into is None else staging.sink(into)
        alive: list[torch.Tensor] = []

        def exchange(comm: MPI.Intracomm) -> MPI.Request:
            alive.append(reduction.scaled(flat))
            return comm.Ialltoallv(split(alive[0], sizes), split(rows, [mine] * self._size))

        def tell(comm: MPI.Intracomm) -> MPI.Request:
            table = rows.view(reduction.dtype).view(self._size, -1)
            reduction.fold(table, piece.view(reduction.dtype))
            return comm.Iallgatherv(whole(piece), split(result, sizes))

        return [exchange, tell]

    def _reduce_scatter(self, outputs: Tensors, rows: Sequence[Tensors], opts: Any) -> MpiWork:
        """Reduce row k of all ranks to rank k: an all-to-all, after which each rank adds up."""
        what = "reduce_scatter"
        given = [tensor for row in rows for tensor in row]
        reduction = self._reduction(what, [*outputs, *given], opts)
        for row in rows:
            self._fit(what, [size_of(t) for t in row], [size_of(t) for t in outputs])
        self._fit_ranks(what, rows)
        staging = self._staging(given)
        flat = staging.source(given).view(reduction.dtype)
        mine = sum(size_of(tensor) for tensor in outputs)
        theirs = staging.spare(mine * self._size)
        result = staging.sink(outputs).view(reduction.dtype)
        sent: list[torch.Tensor] = []

        def start(comm: MPI.Intracomm) -> MPI.Request:
            sent.append(reduction.scaled(flat))
            sizes = [mine] * self._size
            return comm.Ialltoallv(split(sent[0], sizes), split(theirs, sizes))

        def finish(_: MPI.Status) -> None:
            with torch.inference_mode():
                reduction.fold(theirs.view(reduction.dtype).view(self._size, -1), result)
            staging.finish()

        what += f" {reduction}, {flat.numel()} numbers"
        return self._collective(what, [start], staging, outputs, opts, finish)

    def _all_gather(
        self, what: str, rows: Sequence[Tensors], inputs: Tensors, value: Any, opts: Any
    ) -> MpiWork:
        """Gather each rank's inputs into `rows[rank]`; sizes may differ between ranks."""
        self._fit_ranks(what, rows)
        self._fit(what, [size_of(t) for t in rows[self._rank]], [size_of(t) for t in inputs])
        staging = self._staging(inputs)
        mine = staging.source(inputs)
        everything = staging.sink([tensor for row in rows for tensor in row])
        sizes = [sum(size_of(tensor) for tensor in row) for row in rows]

        def start(comm: MPI.Intracomm) -> MPI.Request:
            # FSDP's inputs lie in the output, at the position of this rank's part.
            inplace = mine.data_ptr() == everything.data_ptr() + offsets(sizes)[self._rank]
            given = MPI.IN_PLACE if inplace and len(mine) else whole(mine)
            return comm.Iallgatherv(given, split(everything, sizes))

        what += f" of {len(everything)} bytes"
        return self._collective(what, [start], staging, value, opts)

    def _all_to_all(
        self, what: str, outputs: Tensors, inputs: Tensors, value: Any, opts: Any
    ) -> MpiWork:
        """Send `inputs[k]` to rank k and receive `outputs[k]` from it, for every k."""
        self._fit_ranks(what, outputs)
        self._fit_ranks(what, inputs)
        staging = self._staging(inputs)
        given, got = staging.source(inputs), staging.sink(outputs)
        sends, receives = [size_of(t) for t in inputs], [size_of(t) for t in outputs]
        self._fit(what, [receives[self._rank]], [sends[self._rank]])

        def start(comm: MPI.Intracomm) -> MPI.Request:
            return comm.Ialltoallv(split(given, sends), split(got, receives))

        return self._collective(what, [start], staging, value, opts)

    def _message(self, what: str, rank: int, tag: int, start: Start) -> MpiCall:
        most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0
        if not 0 <= tag <= most:
            raise UsageError(f"{what}: MPI has the tags 0 to {most}")
        if rank != MPI.ANY_SOURCE and not 0 <= rank < self._size:
            raise UsageError(f"{what}: the group {self._name!r} has {counted(self._size, 'rank')}")
        return MpiCall(self._mail, start)

    def _reduction(self, what: str, tensors: Tensors, opts: Any) -> Reduction:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise UsageError(f"{what}: tensors of several types: {dtypes}")
        return Reduction.of(opts.reduceOp, dtypes.pop())

    def _pieces(self, what: str, tensor: torch.Tensor) -> Tensors:
        """Cut a tensor into equal parts, one per rank, in the order of its elements."""
        self._check_layout([tensor])
        # Flat where possible: outputs may be stacked or concatenated, and both have flat parts.
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()
        if len(flat) % self._size:
            raise UsageError(
                f"{what}: shape {list(tensor.shape)} cannot be cut into {self._size} equal parts"
            )
        return flat.tensor_split(self._size)

    def _rows(self, what: str, tensor: torch.Tensor, counts: Sequence[int]) -> Tensors:
        """Cut a tensor along its first dimension into one part per rank, of `counts` rows each.

        Without counts, the parts are equal.
        """
        self._check_layout([tensor])
        if not counts:
            counts = [len(tensor) // self._size] * self._size
        self._fit_ranks(what, counts)
        if sum(counts) != len(tensor):
            raise UsageError(f"{what}: rows {list(counts)} of a tensor of {len(tensor)}")
        return torch.split(tensor.detach(), list(counts))
