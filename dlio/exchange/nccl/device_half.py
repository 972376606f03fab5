"""Sixteen bits per entry on a device: the messages of `dlio.exchange.compress.half`."""

from collections.abc import Sequence
from typing import Final

import torch

from dlio.exchange.compress.half import HALF_CHUNK, LOWEST, MOST_BFLOAT16, MOST_FLOAT16
from dlio.exchange.compress.message_layout import Piece
from dlio.exchange.nccl.numbers import bytes_of, exponents_of, in_rows, power, typed
from dlio.exchange.nccl.tensor_codec import DeviceCodec

_TO_SCALE: Final = 14
_TO_INVERSE: Final = 268


class DeviceBfloat16(DeviceCodec):
    """A compressor to bfloat16. Message: bfloat16 (entries,)."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        super().__init__(pieces, device)
        self.max_bytes = 2 * self.entries

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        halves = v.clamp(-MOST_BFLOAT16, MOST_BFLOAT16).bfloat16()
        v -= halves.float()
        return [bytes_of(halves)]

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        into += typed(message[: self.max_bytes], torch.bfloat16).float()


class DeviceFloat16(DeviceCodec):
    """A compressor to float16. Message: float16 (entries,), then exponents uint8 (chunks,)."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        super().__init__(pieces, device)
        self._chunks = -(-self.entries // HALF_CHUNK)
        self.max_bytes = 2 * self.entries + self._chunks

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        chunks = in_rows(v, HALF_CHUNK)
        exponents = exponents_of(chunks.abs().amax(1)).clamp(min=LOWEST)
        scaled = chunks * power(_TO_INVERSE - exponents)[:, None]
        halves = scaled.clamp(-MOST_FLOAT16, MOST_FLOAT16).half()
        v -= (halves.float() * power(exponents - _TO_SCALE)[:, None]).view(-1)[: self.entries]
        return [bytes_of(halves.view(-1)[: self.entries]), exponents.to(torch.uint8)]

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        if not self.entries:
            return
        halves = typed(message[: 2 * self.entries], torch.float16).float()
        exponents = message[2 * self.entries : self.max_bytes].int()
        values = in_rows(halves, HALF_CHUNK) * power(exponents - _TO_SCALE)[:, None]
        into += values.view(-1)[: self.entries]
