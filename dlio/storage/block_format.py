"""Layout and encoding of blocks; FORMAT.md in this folder specifies the format."""

import struct
from collections.abc import Sequence
from typing import Final

import lz4.block
import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.schema import Buffer, Schema

MAGIC: Final = b"DLIOBLK1"
MAGIC_PART: Final = b"DLIOPCE2"
"""Of a block that lacks samples, in a tier."""
VERSION: Final = 1
MAX_SAMPLE_BYTES: Final = 2**31 - 1
"""Raw bytes of one sample: the limit of one LZ4 call."""
MAX_SCHEMA_BYTES: Final = 1 << 16
MAX_SAMPLES: Final = 1 << 24
"""Samples in one block."""
HEADER: Final = struct.Struct("<8sHHIQQ16sII Q")
"""Magic, version, flags, samples, number, bytes, fingerprint, bytes of schema, 0, checksum."""
ENTRY: Final = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("xxh3", "<u8")])
"""Entry of the table of samples; `offset` is from the start of the block."""
ALIGN: Final = 8
"""Alignment of payloads in a block, in bytes."""


def encode_block(
    payloads: Sequence[Buffer],
    *,
    block: int,
    fingerprint: str,
    schema: Schema,
    compress: bool = False,
) -> list[Buffer]:
    """Make a block, as pieces to be written one after another; payloads are not copied.

    Args:
        payloads: raw bytes of the samples.
        block: number of the block.
        fingerprint: of the data set, 32 hex digits.
        compress: compress with LZ4 each sample for which that saves a sixteenth.

    Raises ValueError when a payload is too large for the format.
    """
    table = np.zeros(len(payloads), ENTRY)
    at = table_offset(len(schema.to_json().encode())) + table.nbytes
    pieces: list[Buffer] = []
    for place, payload in enumerate(payloads):
        if len(payload) > MAX_SAMPLE_BYTES:
            raise ValueError(f"sample {place} of block {block} has {len(payload)} bytes")
        stored = payload
        if compress:
            packed = lz4.block.compress(payload, store_size=False)
            if len(packed) <= len(payload) - len(payload) // 16 - 1:
                stored = packed
        table[place] = (at, len(stored), len(payload), xxhash.xxh3_64_intdigest(payload))
        gap = -len(stored) % ALIGN
        pieces.append(stored)
        if gap:
            pieces.append(bytes(gap))
        at += len(stored) + gap
    head = complete_head(table, block=block, length=at, fingerprint=fingerprint, schema=schema)
    return [head, *pieces]


def table_offset(schema_bytes: int) -> int:
    """Return the offset of the table in a block whose schema has so many bytes."""
    head = HEADER.size + schema_bytes
    return head + -head % ALIGN


def complete_head(
    table: npt.NDArray[np.void], *, block: int, length: int, fingerprint: str, schema: Schema
) -> bytes:
    """Return all that comes before the payloads of a block: header, schema and table.

    Args:
        table: of its samples; dtype ENTRY, shape (samples,).
        block: number of the block.
        length: bytes of the block.
        fingerprint: of the data set, 32 hex digits.
    """
    text = schema.to_json().encode()
    padding = table_offset(len(text)) - HEADER.size - len(text)
    fields = (
        MAGIC,
        VERSION,
        0,
        len(table),
        block,
        length,
        bytes.fromhex(fingerprint),
        len(text),
        0,
    )
    rest = text + bytes(padding) + table.tobytes()
    digest = xxhash.xxh3_64_intdigest(HEADER.pack(*fields, 0) + rest)
    return HEADER.pack(*fields, digest) + rest


def aligned(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round sizes of payloads up to the bytes that they take in a block."""
    return (sizes + ALIGN - 1) // ALIGN * ALIGN


def block_sizes(
    counts: npt.NDArray[np.int64], payloads: npt.NDArray[np.int64], schema: Schema
) -> npt.NDArray[np.int64]:
    """Return the bytes of uncompressed blocks, which compression only makes smaller.

    Args:
        counts: samples of each block; shape (blocks,).
        payloads: sum of the aligned payload bytes of each block; shape (blocks,).
    """
    head = table_offset(len(schema.to_json().encode()))
    return head + ENTRY.itemsize * counts + payloads
