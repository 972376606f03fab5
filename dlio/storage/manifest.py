"""The manifest of a staged data set: the blocks that one node's tier should hold.

It is written next to the blocks when staging is done. With it a tier can be verified without the
source: it lists the blocks that should exist and their digests, so that a missing block is
distinguished from one of another node, and an outdated block from the right one.

FORMAT.md in this folder specifies the format.
"""

import errno
import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import CorruptBlock
from dlio.util.trusted_files import UntrustedFile, read_small
from dlio.util.whole_files import write_whole_at

NAME: Final = "manifest"
"""Name of the file in a node's folder."""
_MAGIC: Final = b"DLIOMFST"
_HEAD: Final = struct.Struct("<8sQ")
_TAIL: Final = struct.Struct("<Q")
_MAX_BYTES: Final = 128 << 20
_MAX_JSON: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The blocks that a node's folder in a tier should hold."""

    about: dict[str, Any]
    """Fields `source`, `format` and `fingerprint`, all strings."""
    blocks: npt.NDArray[np.uint64]
    """Numbers of the blocks, ascending; shape (blocks,)."""
    digests: npt.NDArray[np.uint64]
    """xxh3_64 of each block's header and table; shape (blocks,)."""

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        text = json.dumps({**self.about, "blocks": len(self.blocks)}).encode()
        body = _HEAD.pack(_MAGIC, len(text)) + text
        body += self.blocks.astype("<u8").tobytes() + self.digests.astype("<u8").tobytes()
        return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, data: bytes, path: str) -> "Manifest":
        """Parse the bytes of the file at `path`. Raises CorruptBlock when they are damaged."""
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


def write_manifest(folder: int, manifest: Manifest) -> None:
    """Write the manifest of a node's folder; it appears whole or not at all. Raises OSError.
    `folder` is a descriptor."""
    data = manifest.encode()
    write_whole_at(folder, NAME, lambda file: file.write(data))


def read_manifest(folder: int, shown: str) -> Manifest | None:
    """Read the manifest of a node's folder, None if there is none. Raises CorruptBlock, OSError.
    `folder` is a descriptor, `shown` the path for errors."""
    path = os.path.join(shown, NAME)
    try:
        data = read_small(folder, NAME, _MAX_BYTES, owners=(os.fstat(folder).st_uid,))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not isinstance(error, UntrustedFile) and error.errno != errno.EFBIG:
            raise
        raise CorruptBlock(f"{shown}: {error.strerror}: remove it, and stage again") from error
    return Manifest.decode(data, path)
