"""The compressors of the host and of devices, by name, for tensors."""

from collections.abc import Sequence

import torch

from dlio.train.exchange.compress import NAMES, make_compressor
from dlio.train.exchange.compress.layout import Piece, Scratch
from dlio.train.exchange.device.codec import Codec
from dlio.train.exchange.device.half import DeviceBfloat16, DeviceFloat16
from dlio.train.exchange.device.int8 import DeviceInt8
from dlio.train.exchange.device.onebit import DeviceOneBit
from dlio.train.exchange.device.sparse import DeviceSparse
from dlio.util.arguments import unknown_word


class _HostCodec:
    """A compressor of the host, for tensors in its memory."""

    def __init__(self, name: str, pieces: Sequence[Piece], scratch: Scratch) -> None:
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
    name: str, pieces: Sequence[Piece], scratch: Scratch, device: torch.device | None
) -> Codec:
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
