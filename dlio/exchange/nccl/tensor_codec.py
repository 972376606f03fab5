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

from dlio.exchange.compress.message_layout import Piece, refuse_not_finite

_cuda: Final[Any] = torch.cuda  # torch does not annotate its events.


class TensorCodec(Protocol):
    """A compressor, as `dlio.exchange.compress.Compressor`, of flat tensors."""

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


class _Finite:
    """Finds entries that are not finite, without waiting for the device.

    They stay in the residual, so that a check that comes too early finds them the next time.

    Args:
        pieces: those of the region, for the tensor's name.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self._pieces = pieces
        on_gpu = device.type == "cuda"
        self._first = torch.full((2,), -1.0, dtype=torch.float64, pin_memory=on_gpu)
        """Number of the first entry that is not finite, and the entry; -1 for none."""
        self._written = _cuda.Event() if on_gpu else None

    def note(self, values: torch.Tensor) -> None:
        """Look at the values, shape (entries,); `check` tells what was seen."""
        bad = ~values.isfinite()
        first = bad.to(torch.uint8).argmax()
        number = torch.where(bad.any(), first, -1)
        entry = torch.stack([number.double(), values.take(first).double()])
        self._first.copy_(entry, non_blocking=True)
        if self._written is not None:
            self._written.record()

    def check(self) -> None:
        """Raise DlioError if a `note` that the device has carried out saw such an entry."""
        if self._written is not None and not self._written.query():
            return
        number, entry = self._first.tolist()
        if number >= 0:
            refuse_not_finite(np.array([entry], np.float32), int(number), self._pieces)


class DeviceCodec:
    """The common part of a device's compressors, whose messages have a fixed length.

    Args:
        pieces: those of the region.
    """

    max_bytes: int

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.entries = pieces[-1].stop if pieces else 0
        self.device = device
        self._finite = _Finite(pieces, device)

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
