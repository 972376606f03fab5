"""The compressors of the host and of devices, by name, for tensors."""

from collections.abc import Sequence

import torch

from dlio.exchange.compress import NAMES, make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, Piece
from dlio.exchange.nccl.device_half import DeviceBfloat16, DeviceFloat16
from dlio.exchange.nccl.device_int8 import DeviceInt8
from dlio.exchange.nccl.device_onebit import DeviceOneBit
from dlio.exchange.nccl.device_sparse import DeviceSparse
from dlio.exchange.nccl.tensor_codec import TensorCodec
from dlio.util.arguments import unknown_word


class _HostCodec:
    """A compressor of the host, for tensors in its memory."""

    def __init__(self, name: str, pieces: Sequence[Piece], scratch: ChunkScratch) -> None:
        self._compressor = make_compressor(name, pieces, scratch)
        self.entries, self.max_bytes = self._compressor.entries, self._compressor.max_bytes

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> int:
        return self._compressor.encode(values.numpy(), residual.numpy(), message.numpy())

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        self._compressor.add(message.numpy(), into.numpy())

    def state(self) -> torch.Tensor:
        return torch.from_numpy(self._compressor.state())

    def load_state(self, state: torch.Tensor) -> None:
        self._compressor.load_state(state.numpy())


def make_codec(
    name: str, pieces: Sequence[Piece], scratch: ChunkScratch, device: torch.device | None
) -> TensorCodec:
    """Create a compressor.

    Args:
        scratch: working memory of the host's.
        device: the device whose compressor is made; the host's for None.

    Raises UsageError for an unknown name.
    """
    if device is None:
        return _HostCodec(name, pieces, scratch)
    match name:
        case "onebit":
            return DeviceOneBit(pieces, device)
        case "ternary":
            return DeviceSparse(pieces, device, dense=True)
        case "threshold":
            return DeviceSparse(pieces, device, thresholds=True)
        case "adaptive":
            return DeviceSparse(pieces, device)
        case "int8":
            return DeviceInt8(pieces, device)
        case "bf16":
            return DeviceBfloat16(pieces, device)
        case "fp16":
            return DeviceFloat16(pieces, device)
    raise unknown_word("compressor (behind a +)", name, NAMES)
