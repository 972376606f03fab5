"""Messages of another compressor, entropy-coded by zlib's Huffman codes.

A dense ternary message in which few entries are sent has five of them per byte, and the byte of
five zeros in about half of its places: of a seventh of the entries, 0.75 bits per entry are left.
"""

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import CommError
from dlio.train.exchange.compress import Compressor

__all__ = ["Huffman"]

_HEAD: Final = 4
"""Bytes before the coded message: its length."""
_LEVEL: Final = 1
_WINDOW: Final = -9
"""Raw, with the smallest window: nothing is searched for."""


class Huffman:
    """Another compressor with shorter messages. Owns it."""

    def __init__(self, inner: Compressor) -> None:
        self._inner = inner
        self.entries = inner.entries
        self._plain = np.empty(inner.max_bytes, np.uint8)
        # zlib stores what it cannot shorten, in blocks with five bytes more.
        more = _HEAD + inner.max_bytes // 64 + 64
        self.max_bytes = inner.max_bytes + more if inner.max_bytes else 0

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        if not self.max_bytes:
            return 0
        used = self._inner.encode(values, residual, self._plain)
        coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW, strategy=zlib.Z_HUFFMAN_ONLY)
        coded = coder.compress(self._plain[:used]) + coder.flush()
        message[:_HEAD].view(np.uint32)[0] = len(coded)
        message[_HEAD : _HEAD + len(coded)] = np.frombuffer(coded, np.uint8)
        return _HEAD + len(coded)

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        if not self.max_bytes:
            return
        length = int(message[:_HEAD].view(np.uint32)[0]) if len(message) >= _HEAD else -1
        if not 0 <= length <= len(message) - _HEAD:
            raise CommError(f"a message of {len(message)} bytes is damaged: its head is wrong")
        decoder = zlib.decompressobj(_WINDOW)
        try:
            plain = decoder.decompress(message[_HEAD : _HEAD + length], len(self._plain))
        except zlib.error as error:
            raise CommError(f"a message is damaged: {error}") from None
        if not decoder.eof:
            raise CommError("a message is damaged: it is incomplete, or too long")
        self._inner.add(np.frombuffer(plain, np.uint8), into)

    def state(self) -> npt.NDArray[np.int64]:
        return self._inner.state()

    def load_state(self, state: npt.NDArray[np.int64]) -> None:
        self._inner.load_state(state)
