"""The manifest of a staged data set: which blocks one node's tier is to hold, and their digests.

Written when staging is done, beside the blocks. With it a tier is verified without the source:
what is missing is told from what was never there, and an old block from the right one.

    magic `DLIOMFST`, u64 length of the JSON, JSON, u64 block numbers, u64 digests, u64 xxh3 of all
"""

import json
import os
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import CorruptBlock

NAME: Final = "manifest"
_MAGIC: Final = b"DLIOMFST"
_HEAD: Final = struct.Struct("<8sQ")
_TAIL: Final = struct.Struct("<Q")
_MAX_BYTES: Final = 1 << 30
_MAX_JSON: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a node's folder in a tier is to hold."""

    about: dict[str, Any]
    """`source`, `format`, `fingerprint`."""
    blocks: npt.NDArray[np.uint64]
    """Their numbers, rising; shape (blocks,)."""
    digests: npt.NDArray[np.uint64]
    """Of each block's header and table."""

    def encode(self) -> bytes:
        text = json.dumps({**self.about, "blocks": len(self.blocks)}).encode()
        body = _HEAD.pack(_MAGIC, len(text)) + text
        body += self.blocks.astype("<u8").tobytes() + self.digests.astype("<u8").tobytes()
        return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, data: bytes, path: str) -> "Manifest":
        """Raises CorruptBlock for anything that `encode` did not make."""
        wrong = CorruptBlock(f"{path} is damaged: remove it, and stage again")
        if len(data) < _HEAD.size + _TAIL.size:
            raise wrong
        magic, length = _HEAD.unpack_from(data)
        (digest,) = _TAIL.unpack_from(data, len(data) - _TAIL.size)
        if magic != _MAGIC or length > min(_MAX_JSON, len(data) - _HEAD.size - _TAIL.size):
            raise wrong
        if xxhash.xxh3_64_intdigest(memoryview(data)[: -_TAIL.size]) != digest:
            raise wrong
        try:
            about = json.loads(data[_HEAD.size : _HEAD.size + length])
            count = about.pop("blocks")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise wrong from None
        arrays = data[_HEAD.size + length : len(data) - _TAIL.size]
        if not isinstance(count, int) or count < 0 or len(arrays) != 16 * count:
            raise wrong
        numbers = np.frombuffer(arrays, "<u8", count)
        return cls(about, numbers, np.frombuffer(arrays, "<u8", count, 8 * count))


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Put it in place, whole. Raises OSError."""
    temporary = os.path.join(folder, f".{NAME}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600)
    try:
        try:
            left = memoryview(manifest.encode())
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, os.path.join(folder, NAME))
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_manifest(folder: str) -> Manifest | None:
    """The manifest of a node's folder; None when it has none. Raises CorruptBlock, OSError."""
    path = os.path.join(folder, NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise CorruptBlock(f"{path} is larger than {_MAX_BYTES} bytes: remove it, and stage again")
    return Manifest.decode(data, path)
