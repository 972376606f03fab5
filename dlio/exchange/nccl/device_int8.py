"""Eight bits per entry on a device: the messages of `dlio.exchange.compress.int8`."""

from collections.abc import Sequence
from typing import Final

import torch

from dlio.exchange.compress.int8 import BLOCK, HIGHEST, LOWEST, MOST, ROOM
from dlio.exchange.compress.message_layout import Piece
from dlio.exchange.nccl.numbers import bytes_of, exponents_of, in_rows, power
from dlio.exchange.nccl.tensor_codec import DeviceCodec

_TO_SCALE: Final = 6
_TO_INVERSE: Final = 260


class DeviceInt8(DeviceCodec):
    """A compressor to int8. Message: exponents uint8 (blocks,), then multiples int8 (entries,)."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        super().__init__(pieces, device)
        self._blocks = -(-self.entries // BLOCK)
        self.max_bytes = self._blocks + self.entries

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        blocks = in_rows(v, BLOCK)
        exponents = exponents_of(blocks.abs().amax(1), ROOM).clamp(LOWEST, HIGHEST)
        multiples = (blocks * power(_TO_INVERSE - exponents)[:, None]).round_()
        multiples.clamp_(-MOST, MOST)
        v -= (multiples * power(exponents - _TO_SCALE)[:, None]).view(-1)[: self.entries]
        numbers = multiples.to(torch.int8).view(-1)[: self.entries]
        return [exponents.to(torch.uint8), bytes_of(numbers)]

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        if not self.entries:
            return
        exponents = message[: self._blocks].int()
        numbers = message[self._blocks : self.max_bytes].view(torch.int8).float()
        values = in_rows(numbers, BLOCK) * power(exponents - _TO_SCALE)[:, None]
        into += values.view(-1)[: self.entries]


class DeviceSmallTensors:
    """The small pieces of a region, sent as int8 within a message of a stronger compressor."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        where: list[int] = []
        gathered = []
        for piece in pieces:
            if piece.small:
                gathered.append(Piece(piece.name, len(where), 1, piece.size, small=True))
                where.extend(range(piece.start, piece.stop))
        self._where = torch.tensor(where, dtype=torch.int64, device=device)
        self._int8 = DeviceInt8(gathered, device)
        self.max_bytes = self._int8.max_bytes

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        """As `DeviceCodec.parts`, of the small pieces of v."""
        if not self.max_bytes:
            return []
        left = v[self._where]
        parts = self._int8.parts(left)
        v[self._where] = left
        return parts

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        if self.max_bytes:
            sums = into[self._where]
            self._int8.add(message, sums)
            into[self._where] = sums
