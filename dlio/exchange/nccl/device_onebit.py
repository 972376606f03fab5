"""One bit per entry on a device: the messages of `dlio.exchange.compress.onebit`.

The rotation multiplies by the same two small matrices as the host's. Their entries are +1 and -1,
and what they decode are whole numbers of few bits, so decoding is exact in any order of additions,
and with TF32. Signs of rotated values near zero may differ from the host's.
"""

from collections.abc import Sequence
from typing import Final

import torch

from dlio.exchange.compress.message_layout import Piece
from dlio.exchange.compress.onebit import LARGEST, blocks_of, flips, turned, walsh
from dlio.exchange.nccl.device_int8 import DeviceSmallTensors
from dlio.exchange.nccl.numbers import bytes_of, packed, typed, unpacked
from dlio.exchange.nccl.tensor_codec import DeviceCodec

_BYTE: Final = 8


class DeviceOneBit(DeviceCodec):
    """A compressor to signs.

    A message has each block's s as bfloat16, the small tensors as int8, and one bit per sign.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        super().__init__(pieces, device)
        self._small = DeviceSmallTensors(pieces, device)
        self._runs = _runs(pieces)
        widths = {width for _, _, width in self._runs}
        self._flips = {width: torch.from_numpy(flips(width)).to(device) for width in widths}
        self._walsh = {
            width: tuple(torch.from_numpy(each).to(device) for each in walsh(width))
            for width in widths
            if turned(width) > 1
        }
        self._heads = 2 * sum(blocks for _, blocks, _ in self._runs)
        self._signs_at = self._heads + self._small.max_bytes
        self.max_bytes = self._signs_at + sum(
            -(-blocks * width // _BYTE) for _, blocks, width in self._runs
        )

    def parts(self, v: torch.Tensor) -> list[torch.Tensor]:
        small = self._small.parts(v)
        sizes, signs = [], []
        for start, blocks, width in self._runs:
            here = v[start : start + blocks * width].view(blocks, width)
            # Divide by W before, not after the rotation: its sums can then not overflow.
            w = self._turn(here * (self._flips[width] / turned(width)))
            negative = torch.signbit(w)
            means = w.abs_().sum(1) / width
            means = torch.where(means > float(LARGEST) / turned(width), 0.0, means).bfloat16()
            here -= self._decoded(negative, means)
            sizes.append(bytes_of(means))
            signs.append(packed(negative.view(-1)))
        return [*sizes, *small, *signs]

    def add(self, message: torch.Tensor, into: torch.Tensor) -> None:
        self._small.add(message[self._heads :], into)
        means = typed(message[: self._heads], torch.bfloat16)
        block, at = 0, self._signs_at
        for start, blocks, width in self._runs:
            count = blocks * width
            stop = at + -(-count // _BYTE)
            negative = unpacked(message[at:stop], count).view(blocks, width)
            into[start : start + count] += self._decoded(
                negative, means[block : block + blocks]
            ).view(-1)
            block, at = block + blocks, stop

    def _decoded(self, negative: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """Return the values of blocks, from their signs and sizes; shape (blocks, width)."""
        q = self._turn(1 - 2 * negative.float())
        return q.mul_(means.float()[:, None]).mul_(self._flips[q.shape[1]])

    def _turn(self, w: torch.Tensor) -> torch.Tensor:
        """Multiply each row by the Walsh-Hadamard matrix."""
        if turned(w.shape[1]) == 1:
            return w
        left, right = self._walsh[w.shape[1]]
        blocks = w.view(-1, len(left), len(right))
        return (left @ (blocks @ right)).view(w.shape)


def _runs(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Return (start, blocks, entries per block) of blocks of one width, one behind another.

    The host's tiles are parts of these. Only widths whose signs fill whole bytes go on in the next
    tile, so that all signs have the host's places in the message.
    """
    runs: list[tuple[int, int, int]] = []
    for piece in pieces:
        for start, blocks, width in () if piece.small else blocks_of(piece):
            if runs:
                first, count, last = runs[-1]
                if last == width and first + count * width == start and width % _BYTE == 0:
                    runs[-1] = (first, count + blocks, width)
                    continue
            runs.append((start, blocks, width))
    return runs
