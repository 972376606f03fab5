"""Parsers of untrusted bytes, as functions of bytes: for hypothesis and atheris."""

import os
import tempfile
from collections.abc import Callable
from typing import Final

import numpy as np

from dlio.data.schema import IMAGE_LABEL, Schema
from dlio.errors import DlioError
from dlio.image.jpeg import Part, cut, interval_starts, parse_frame
from dlio.storage.block import check_block, encode_block, read_info
from dlio.storage.manifest import Manifest
from dlio.storage.shard import Footer, ShardWriter, read_footer
from dlio_readers.npy import read_npy_head

FINGERPRINT: Final = "ab" * 16


def block(data: bytes) -> None:
    """A block in memory, payloads too."""
    check_block(memoryview(data), "fuzzed", 0)


def block_file(data: bytes) -> None:
    """A block in a file: header and table, then each payload."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        info = read_info(file.fileno(), "fuzzed")
        for place in range(len(info)):
            info.read(file.fileno(), place)


def footer(data: bytes) -> None:
    """The end of a shard file."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        parsed = read_footer(file.fileno(), "fuzzed")
        assert len(parsed.sizes) == len(parsed.labels) == len(parsed.name_ends)


def manifest(data: bytes) -> None:
    parsed = Manifest.decode(data, "fuzzed")
    assert len(parsed.blocks) == len(parsed.digests)


def schema(data: bytes) -> None:
    parsed = Schema.from_json(data)
    assert Schema.from_json(parsed.to_json()) == parsed


def payload(data: bytes) -> None:
    fields = (("a", "float32[?,3]"), ("b", "int64"), ("c", "bytes"), ("d", "uint8[2]"))
    Schema(fields).split(data)


def npy(data: bytes) -> None:
    head = read_npy_head(memoryview(data))
    assert head.array(memoryview(data)).nbytes <= len(data)


def jpeg(data: bytes) -> None:
    frame = parse_frame(data)
    starts = None if frame is None else interval_starts(data, frame)
    if frame is not None and starts is not None:
        cut(data, frame, starts, Part(0, frame.rows, 0, frame.intervals_a_row))
        cut(data, frame, starts, Part(0, 1, frame.intervals_a_row - 1, frame.intervals_a_row))


PARSERS: Final[dict[str, Callable[[bytes], None]]] = {
    each.__name__: each
    for each in (block, block_file, footer, manifest, schema, payload, npy, jpeg)
}


def sound() -> dict[str, bytes]:
    """Valid input of each parser, to be damaged."""
    payloads = [IMAGE_LABEL.join({"image": bytes([k]) * (50 + k), "label": k}) for k in range(4)]
    made = b"".join(
        bytes(piece)
        for piece in encode_block(
            payloads, block=3, fingerprint=FINGERPRINT, schema=IMAGE_LABEL, compress=True
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.dlio")
        with ShardWriter(path) as writer:
            writer.write_block([made])
            writer.finish(
                Footer(
                    fingerprint=FINGERPRINT,
                    schema=IMAGE_LABEL,
                    classes=("a", "b"),
                    shard=0,
                    shards=1,
                    first=0,
                    total=4,
                    offsets=np.array(writer.offsets, np.uint64),
                    counts=np.array([4], np.uint32),
                    sizes=np.array([len(each) for each in payloads], np.uint32),
                    labels=np.zeros(4, np.int64),
                    names=b"abcd",
                    name_ends=np.arange(1, 5, dtype=np.uint64),
                )
            )
        with open(path, "rb") as file:
            shard = file.read()
    example = Manifest(
        {"source": "x"}, np.arange(3, dtype=np.uint64), np.arange(3, dtype=np.uint64)
    )
    fields = (("a", "float32[?,3]"), ("b", "int64"), ("c", "bytes"), ("d", "uint8[2]"))
    values = {
        "a": np.zeros((2, 3), np.float32),
        "b": 1,
        "c": b"abc",
        "d": np.zeros(2, np.uint8),
    }
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"
    array = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(12)
    return {
        "block": made,
        "block_file": made,
        "footer": shard,
        "manifest": example.encode(),
        "schema": Schema(fields).to_json().encode(),
        "payload": Schema(fields).join(values),
        "npy": array,
        "jpeg": b"\xff\xd8" + bytes(40),
    }


def survives(parser: Callable[[bytes], None], data: bytes) -> None:
    """Run a parser, which may raise errors of dlio only."""
    try:
        parser(data)
    except DlioError:
        return
