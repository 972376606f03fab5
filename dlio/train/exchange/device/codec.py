"""Compressors of tensors in any memory, with error feedback.

A device's compressors make messages of fixed lengths, because NCCL's receivers have to know these:
`max_bytes`, which is sent and counted. The values are the host's, within the rounding of sums, and
so are the bytes; but `threshold` and `adaptive` fill up what they do not use, see `sparse`.

Nothing here waits for the device: no tensor of it is indexed by a tensor without dimensions, turned
into a Python number, or of a length that depends on values.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from dlio.errors import DlioError
from dlio.train.exchange.compress import NAMES, make_compressor
from dlio.train.exchange.compress.layout import Piece, Scratch, refuse_not_finite
from dlio.util.arguments import unknown_word

__all__ = ["Codec", "DeviceCodec", "make_codec"]

_cuda: Final[Any] = torch.cuda  # torch does not annotate its events.


class Codec(Protocol):
    """A compressor, as `dlio.train.exchange.compress.Compressor`, of flat tensors."""

    entries: int
    max_bytes: int

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> int:
        """Encode values + residual; the residual becomes the part that the message leaves out.

        Args:
            values: float32, shape (entries,); only read.
            residual: float32, shape (entries,); overwritten.
            message: uint8, shape (max_bytes,).

        Returns:
            Number of bytes to send.

        Raises DlioError, naming the tensor, if an entry is NaN or infinite; on a GPU at a later
        call.
        """

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        """Add the decoded message to `into`, shape (entries,)."""

    def state(self) -> torch.Tensor:
        """State on which later messages depend besides residuals; int64, on the host."""

    def load_state(self, state: torch.Tensor) -> None:
        """Restore the `state` of a codec with the same name and pieces, of any memory."""


class HostCodec:
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


class Finite:
    """Finds entries that are not finite, without waiting for the device.

    Args:
        pieces: those of the region, for the tensor's name.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self._pieces = pieces
        on_gpu = device.type == "cuda"
        self._found = torch.full((2,), -1.0, dtype=torch.float64, pin_memory=on_gpu)
        """Number of the first entry that is not finite, and the entry; -1 for none."""
        self._written = _cuda.Event() if on_gpu else None

    def note(self, values: torch.Tensor) -> None:
        """Look at the values, shape (entries,); `check` tells what was seen."""
        bad = ~values.isfinite()
        first = bad.to(torch.uint8).argmax()
        number = torch.where(bad.any(), first, -1)
        found = torch.stack([number.double(), values.take(first).double()])
        self._found.copy_(found, non_blocking=True)
        if self._written is not None:
            self._written.record()

    def check(self) -> None:
        """Raise DlioError if a `note` that the device has carried out saw such an entry."""
        if self._written is not None and not self._written.query():
            return
        number, entry = self._found.tolist()
        if number >= 0:
            refuse_not_finite(np.array([entry], np.float32), int(number), self._pieces)
            raise DlioError("unreachable")


class DeviceCodec:
    """What the compressors of a device have in common: messages of a fixed length.

    Args:
        pieces: those of the region.
    """

    max_bytes: int

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.entries = pieces[-1].stop if pieces else 0
        self.device = device
        self._finite = Finite(pieces, device)

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> int:
        if not self.entries:
            return 0
        self._finite.check()
        residual += values
        self._finite.note(residual)
        if self.device.type == "cpu":
            self._finite.check()
        torch.cat(self.parts(residual), out=message[: self.max_bytes])
        return self.max_bytes

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of the message, uint8, and subtract from v what they say."""
        raise NotImplementedError

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        raise NotImplementedError

    def state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)

    def load_state(self, state: torch.Tensor) -> None:
        pass


def make_codec(
    name: str, pieces: Sequence[Piece], scratch: Scratch, device: torch.device | None
) -> Codec:
    """Create a compressor.

    Args:
        scratch: working memory of the host's.
        device: the device whose compressor is made; the host's for None.

    Raises UsageError for an unknown name.
    """
    from dlio.train.exchange.device.half import DeviceBfloat16, DeviceFloat16
    from dlio.train.exchange.device.int8 import DeviceInt8
    from dlio.train.exchange.device.onebit import DeviceOneBit
    from dlio.train.exchange.device.sparse import DeviceSparse

    if device is None:
        return HostCodec(name, pieces, scratch)
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
