"""Where the buckets of an exchange lie, and how they are summed.

| path | a bucket of gradients | its sum |
|---|---|---|
| `host` | on the host | a sum of host memory |
| `nccl` | on the GPU | `NcclSum`: plain `allreduce` only |
| `mpi` | on the GPU | `DeviceMpiSum`: plain `allreduce` only, if MPI sums GPU memory |
| `pinned` | on the GPU | `PinnedSum`: a sum of page-locked memory, copied there and back |
| `gloo` | on the CPU | as `nccl`, for tests of its code |

Buckets of weights are on the host, with `pinned` in page-locked memory.

All ranks choose together, so that no rank of an exchange sums by NCCL while another sums through
the host: a CPU rank next to a GPU rank, or GPUs of which one rank has two.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from dlio.comm import Communicator
from dlio.comm.devices import sums_device_memory
from dlio.exchange.buckets import Bucket, Named
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.exchange_spec import ExchangeSpec
from dlio.exchange.nccl import DeviceGroup, NcclSum, backend_of
from dlio.exchange.quantised_allreduce import NarrowSum, QuantisedAllreduce
from dlio.exchange.sums import (
    AllreduceSum,
    CudaCopies,
    DeviceMpiSum,
    PinnedSum,
    RoutedSum,
    Sum,
    SumsDeviceMemory,
    Tensors,
)
from dlio.util.printable import log_line
from dlio.util.settings import settings

GROUP_PATHS: Final = ("nccl", "gloo")
"""Paths by a process group of the device. gloo is that of CPUs, for tests."""
_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams.


def is_plain(spec: ExchangeSpec) -> bool:
    """True for sums of gradients as they are: libraries make them in a device's memory. Pure."""
    return spec.payload == "gradient" and spec.topology == "all" and spec.compressor is None


def choose(
    devices: Sequence[torch.device], spec: ExchangeSpec, group: str, mpi_sums_devices: bool
) -> str:
    """Choose the path for parameters on these devices. Pure.

    `group` is the backend by which torch.distributed connects exactly these ranks on such a device;
    "" if there is none, or if ranks may be lost.
    """
    if len(set(devices)) != 1:
        return "host"
    # Compressors stay on the host: written over tensors for both devices, they take 1.8
    # (`ternary`) to 71 times (`threshold`) as long on the CPU as numpy's.
    if group and is_plain(spec):
        return group
    if devices[0].type != "cuda":
        return "host"
    # Through pinned memory, even by a CUDA-aware Open MPI: its non-blocking reductions take host
    # memory only, and its blocking ones copy through the host.
    return "mpi" if mpi_sums_devices and is_plain(spec) else "pinned"


def agreed(paths: Sequence[str]) -> str | None:
    """The path of GPUs if ranks chose different ones: through the host. None if all agree. Pure."""
    return None if len(set(paths)) == 1 else "pinned"


def find_path(
    devices: Sequence[torch.device],
    spec: ExchangeSpec,
    comm: Communicator,
    survives: bool = False,
) -> str:
    """Choose this rank's path; other if ranks may be lost, and the others continue. Collective."""
    over_mpi = isinstance(comm, SumsDeviceMemory) and sums_device_memory()
    group = "" if survives else _backend(devices, comm)
    gpus = [gpu for gpu in comm.allgather(_gpu(devices)) if gpu is not None]
    # NCCL refuses two ranks on one GPU, and does so only when it connects them.
    shared = len(set(gpus)) < len(gpus)
    if shared:
        group = ""
    mine = choose(devices, spec, group, over_mpi)
    # Each rank's own choice is not enough: one that sums by NCCL would wait for ever for one that
    # sums through the host.
    everyone = comm.allgather(mine)
    path = mine
    if agreed(everyone) is not None:
        path = "pinned" if devices[0].type == "cuda" and mine != "host" else "host"
    if comm.rank == 0 and any(each != "host" for each in everyone):
        why = ", because ranks share a GPU" if shared else _why(spec, everyone, group, survives)
        # Whoever has asked for NCCL is told without asking for the log.
        level = logging.WARNING if settings().nccl and path not in GROUP_PATHS else logging.INFO
        log_line(level, "exchange %s: path %s%s", spec, path, why)
    return path


def _gpu(devices: Sequence[torch.device]) -> str | None:
    """Return an identifier of these devices' GPU; None for the CPU, and if torch has none."""
    if not devices or devices[0].type != "cuda" or not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(devices[0]), "uuid", None)
    return None if uuid is None else str(uuid)


def _why(spec: ExchangeSpec, everyone: Sequence[str], group: str, survives: bool) -> str:
    """Return the reason why GPUs do not exchange by NCCL, for the log."""
    if agreed(everyone) is not None:
        return f", because the ranks have different ones: {', '.join(sorted(set(everyone)))}"
    if everyone[0] in GROUP_PATHS:
        return ""
    if survives:
        return ", because NCCL does not go on without lost ranks"
    if not is_plain(spec):
        return ", because only allreduce without a compressor goes by NCCL"
    if not group:
        return ", because torch.distributed has no NCCL group of these ranks"
    return ""


def _backend(devices: Sequence[torch.device], comm: Communicator) -> str:
    """The backend that connects these ranks on their devices: "nccl", "gloo", or "" for none."""
    kinds = {device.type for device in devices}
    if len(kinds) != 1 or not (dist.is_available() and dist.is_initialized()):
        return ""
    (kind,) = kinds
    wanted = backend_of(kind)
    if not wanted or (dist.get_rank(), dist.get_world_size()) != (comm.rank, comm.size):
        return ""
    whole: Any = dist.group.WORLD
    try:
        backend = whole._get_backend(torch.device(kind))
    except RuntimeError:
        return ""
    return wanted if str(backend.name()) == wanted else ""


class BufferPlacement:
    """The memory of the buckets of an exchange's parameters, and their sums: on the host if it
    hands buckets to others (`needs_host`). Collective.
    """

    def __init__(self, named: Named, context: ExchangeContext, needs_host: bool = False) -> None:
        self._context = context
        comm = context.comm
        devices = [parameter.device for _, parameter in named]
        several = comm.size > 1 and len(named) > 0 and not needs_host
        survives = context.recovery is not None
        self.path = find_path(devices, context.spec, comm, survives) if several else "host"
        """`host`, `pinned`, `mpi` or one of GROUP_PATHS."""
        self._device = devices[0] if self.path != "host" else None
        """The device of buckets of gradients; None for the host."""
        self._group: DeviceGroup | None = None
        if self.path in GROUP_PATHS:
            self._group = DeviceGroup(comm, devices[0])
        # One stream for all buckets: their copies keep the order in which they are sent.
        self._stream: Any = _cuda.Stream(self._device) if self.path == "pinned" else None

    @property
    def host_runs_ahead(self) -> bool:
        """True if the device waits for other ranks, and the host for neither."""
        return self._group is not None and self._group.device.type == "cuda"

    @property
    def waited_s(self) -> float:
        """Seconds that the device has waited for other ranks without the host."""
        return 0.0 if self._group is None else self._group.waited_s

    def for_gradients(self, named: Named, extra: int) -> Bucket:
        """Create a bucket of gradients, on their device, with some more elements."""
        return Bucket(named, extra, self._device)

    def for_weights(self, named: Named) -> Bucket:
        """Create a bucket of weights, on the host."""
        return Bucket(named, 0, pinned=self.path == "pinned")

    def make_sum(self, bucket: Bucket, extra: int, tag: int) -> Sum:
        """Create the sum of a bucket with `extra` elements behind the parameters.

        `tag` is the first of `TAGS` tags that nothing else on the communicator uses.
        """
        if self._group is not None:
            return NcclSum(self._group)
        if self.path == "mpi":
            return DeviceMpiSum(self._context.comm)
        more = [("", (extra,))] if extra else []
        total = make_host_sum(self._context, [*bucket.tensors, *more], tag, bucket.flat.dtype)
        if bucket.flat.device.type == "cpu":
            return total
        host = torch.empty_like(bucket.flat, device="cpu", pin_memory=True)
        return PinnedSum(total, CudaCopies(self._stream), host)

    def close(self) -> None:
        """End the group, after all sums are closed."""
        if self._group is not None:
            self._group.close()


def make_host_sum(
    context: ExchangeContext, tensors: Tensors, tag: int, dtype: torch.dtype = torch.float32
) -> Sum:
    """Create the sum of host memory that an exchange's topology and compressor need, for `tensors`
    of one region, with the first of `TAGS` tags that nothing else on the communicator uses.
    """
    spec, comm = context.spec, context.comm
    total: Sum = AllreduceSum(comm)
    if spec.topology in ("hierarchical", "tree", "star"):
        total = RoutedSum(context, tensors, tag, dtype)
    elif spec.codec is not None:
        keeps = context.recovery is not None
        scratch, decay = context.scratch, spec.decay
        total = QuantisedAllreduce(comm, tensors, spec.codec, tag, scratch, keeps, decay)
    return NarrowSum(total) if spec.codec is not None and dtype != torch.float32 else total
