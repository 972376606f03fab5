"""Where the buckets of an exchange lie, and how they travel.

All ranks choose together, so that no rank of an exchange sums by NCCL while another sums through
the host: a CPU rank next to a GPU rank, or GPUs of which one rank has two.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from dlio.comm import Communicator, Request
from dlio.comm.devices import sums_device_memory
from dlio.exchange.buckets import Bucket, Named
from dlio.exchange.compress.message_layout import Piece
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.exchange_spec import ExchangeSpec
from dlio.exchange.nccl.compressors import make_codec
from dlio.exchange.nccl.device_group import DeviceGroup, Flight
from dlio.exchange.nccl.group_paths import GroupMemory, group_path
from dlio.exchange.nccl.tensor_codec import TensorCodec
from dlio.exchange.paths import (
    CudaCopies,
    DeviceMpiPath,
    HostPath,
    Path,
    PinnedPath,
    SumsDeviceMemory,
)
from dlio.exchange.sums import make_sum
from dlio.util.settings import DEVICE_EXCHANGE

GROUP_PATHS: Final = ("nccl", "gloo")
"""Paths by a process group of the device. gloo is that of CPUs, for tests."""
_cuda: Final[Any] = torch.cuda  # torch does not annotate its streams.
_log: Final = logging.getLogger("dlio")


def choose(
    devices: Sequence[torch.device], spec: ExchangeSpec, group: str, mpi_sums_devices: bool
) -> str:
    """Choose the path for parameters on these devices. Pure.

    Args:
        group: the backend by which torch.distributed connects exactly these ranks on such a device;
            "" if there is none, or if ranks may be lost.
    """
    if len(set(devices)) != 1:
        return "host"
    if group and host_reason(spec) is None:
        return group
    if devices[0].type != "cuda":
        return "host"
    plain = spec.payload == "gradient" and spec.topology == "all" and spec.compressor is None
    return "mpi" if mpi_sums_devices and plain else "pinned"


def host_reason(spec: ExchangeSpec) -> str | None:
    """Why an exchange needs the host's memory even with NCCL; None if it does not. Pure."""
    if spec.merge == "parzen":
        return f"{spec.preset} sends without the receiver's knowledge, which NCCL cannot"
    return None


def agreed(paths: Sequence[str]) -> str | None:
    """The path of GPUs if ranks chose different ones: through the host. None if all agree. Pure."""
    return None if len(set(paths)) == 1 else "pinned"


def find_path(
    devices: Sequence[torch.device],
    spec: ExchangeSpec,
    comm: Communicator,
    survives: bool = False,
) -> str:
    """Choose this rank's path. Collective.

    Args:
        survives: ranks may be lost, and the others go on.
    """
    over_mpi = isinstance(comm, SumsDeviceMemory) and sums_device_memory()
    group = "" if survives else _backend(devices, comm)
    gpus = [gpu for gpu in comm.allgather(_gpu(devices)) if gpu is not None]
    shared = len(set(gpus)) < len(gpus)
    if shared:
        group = ""
    mine = choose(devices, spec, group, over_mpi)
    everyone = comm.allgather(mine)
    path = mine
    if agreed(everyone) is not None:
        path = "pinned" if devices[0].type == "cuda" and mine != "host" else "host"
    if comm.rank == 0 and any(each != "host" for each in everyone):
        why = ", because ranks share a GPU" if shared else _why(spec, everyone, group, survives)
        _log.info("exchange %s: path %s%s", spec, path, why)
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
    if not group:
        return ", because torch.distributed has no NCCL group of these ranks"
    return f", because {host_reason(spec)}"


def _backend(devices: Sequence[torch.device], comm: Communicator) -> str:
    """The backend that connects these ranks on their devices: "nccl", "gloo", or "" for none."""
    kinds = {device.type for device in devices}
    allowed = {"cuda": "nccl"}
    if os.environ.get(DEVICE_EXCHANGE):
        allowed["cpu"] = "gloo"
    if len(kinds) != 1 or not (dist.is_available() and dist.is_initialized()):
        return ""
    (kind,) = kinds
    if kind not in allowed:
        return ""
    if (dist.get_rank(), dist.get_world_size()) != (comm.rank, comm.size):
        return ""
    whole: Any = dist.group.WORLD
    try:
        backend = whole._get_backend(torch.device(kind))
    except RuntimeError:
        return ""
    return allowed[kind] if str(backend.name()) == allowed[kind] else ""


class BufferPlacement:
    """The memory of an exchange's buckets, and the ways of what they hold. Collective.

    Args:
        named: parameters that are exchanged.
        needs_host: the exchange hands its buckets to others, which need host memory.
    """

    def __init__(self, named: Named, setting: ExchangeContext, needs_host: bool = False) -> None:
        self._setting = setting
        comm = setting.comm
        devices = [parameter.device for _, parameter in named]
        several = comm.size > 1 and len(named) > 0 and not needs_host
        survives = setting.recovery is not None
        self.path = find_path(devices, setting.spec, comm, survives) if several else "host"
        """`host`, `pinned`, `mpi` or one of GROUP_PATHS; see `dlio.exchange.paths`."""
        self.device = devices[0] if self.path != "host" else None
        """The device of buckets of gradients; None for the host."""
        self.memory: GroupMemory | None = None
        if self.path in GROUP_PATHS:
            self.memory = GroupMemory.of(DeviceGroup(comm, devices[0]))
        self._stream: Any = _cuda.Stream(self.device) if self.path == "pinned" else None

    @property
    def group(self) -> DeviceGroup | None:
        """The group, if buckets travel from the device's memory."""
        return None if self.memory is None else self.memory.group

    @property
    def host_runs_ahead(self) -> bool:
        """True if the device waits for other ranks, and the host for neither."""
        return self.group is not None and self.group.device.type == "cuda"

    @property
    def waited_s(self) -> float:
        """Seconds that the device has waited for other ranks without the host."""
        return 0.0 if self.memory is None else self.memory.waits.seconds

    def for_gradients(self, named: Named, extra: int) -> Bucket:
        """Create a bucket of gradients, on their device, with some more elements."""
        return Bucket(named, extra, self.device)

    def for_weights(self, named: Named) -> Bucket:
        """Create a bucket of weights: on the device if they travel from there, else on the host."""
        on_device = self.device if self.memory is not None else None
        return Bucket(named, 0, on_device, pinned=self.path == "pinned")

    def path_of(self, bucket: Bucket, extra: int, tag: int) -> Path:
        """Create the path of a bucket to its sum.

        Args:
            extra: elements behind the parameters.
            tag: the first of `TAGS` tags that nothing else on the communicator uses.
        """
        if self.memory is not None:
            return group_path(bucket, self._setting, self.memory)
        if self.path == "mpi":
            return DeviceMpiPath(bucket, self._setting.comm)
        more = [("", (extra,))] if extra else []
        total = make_sum(self._setting, [*bucket.tensors, *more], tag)
        if bucket.flat.device.type == "cpu":
            return HostPath(bucket, total)
        return PinnedPath(bucket, total, CudaCopies(self._stream))

    def codec(self, name: str, pieces: Sequence[Piece]) -> TensorCodec:
        """Create a compressor of tensors in the memory of `for_weights`."""
        device = None if self.group is None else self.group.device
        return make_codec(name, pieces, self._setting.scratch, device)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Give the body's work on buckets to a stream next to the training's, if there is one."""
        return contextlib.nullcontext() if self.memory is None else self.memory.side.after_current()

    def swap(
        self, message: torch.Tensor, to: int, into: torch.Tensor, source: int, tag: int
    ) -> list[Request]:
        """Start sending a message to a rank and receiving one; both in the memory of buckets.

        Args:
            into: at least as long as the message that arrives; on a device as long.
        """
        if self.group is not None:
            return [self.group.pair((message, to), (into, source), f"weights of rank {source}")]
        comm = self._setting.comm
        return [
            comm.irecv(into.view(torch.uint8).numpy(), source, tag),
            comm.isend(message.view(torch.uint8).numpy(), to, tag),
        ]

    def wait(self, requests: Sequence[Request], what: str) -> None:
        """Have later work on buckets wait for requests of `swap`. Raises CommTimeout."""
        if self.memory is None:
            self._setting.comm.wait(requests, what)
            return
        with self.memory.waits.timed():
            for request in requests:
                assert isinstance(request, Flight)
                request.wait()

    def close(self) -> None:
        """End the group, after all paths are closed."""
        if self.group is not None:
            self.group.close()
