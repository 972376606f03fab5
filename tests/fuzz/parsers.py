"""Parsers of untrusted bytes, as functions of bytes: for hypothesis and atheris."""

import contextlib
import io
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from PIL import Image

from dlio.data.npy import read_npy_head
from dlio.data.schema import IMAGE_LABEL, Schema
from dlio.errors import DlioError
from dlio.image.decoder import decode_whole
from dlio.image.jpeg import IntervalRange, cut, interval_starts, parse_frame
from dlio.storage.block import ALIGN, ENTRY, HEADER, check_block, encode_block, read_info
from dlio.storage.manifest import Manifest
from dlio.storage.shard_file import ShardIndex, ShardWriter, read_footer
from dlio.storage.tier_spec import parse_tiers
from dlio.train.checkpoint.tensor_reader import CONTENTS, contents
from dlio.util.decompression_limits import CODECS, exceeds
from dlio.util.units import parse_bytes, parse_seconds
from tests.fuzz.datasets import DATASETS, seed
from tests.hostile.corpus import checkpoints
from tests.image.jpegs import drawn
from tests.image.test_native import outcome

FINGERPRINT: Final = "ab" * 16


def block(data: bytes) -> None:
    """A block in memory, payloads too."""
    check_block(memoryview(data), "fuzzed", 0)


def sealed_block(data: bytes) -> None:
    """A block whose header's checksum is made right."""
    made = bytearray(data)
    if len(made) >= HEADER.size:
        _, _, _, count, _, _, _, schema_bytes, _, _ = HEADER.unpack_from(made)
        rest = schema_bytes + -(HEADER.size + schema_bytes) % ALIGN + count * ENTRY.itemsize
        made[HEADER.size - 8 : HEADER.size] = bytes(8)
        digest = xxhash.xxh3_64_intdigest(bytes(made[: HEADER.size + rest]))
        struct.pack_into("<Q", made, HEADER.size - 8, digest)
    check_block(memoryview(bytes(made)), "fuzzed", 0)


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


def sealed_manifest(data: bytes) -> None:
    """A manifest whose checksum is made right."""
    manifest(data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8])))


def checkpoint_contents(data: bytes) -> None:
    """The metadata of a checkpoint, which is a pickle."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONTENTS).write_bytes(data)
        Path(folder, "__0_0.distcp").write_bytes(bytes(1 << 16))
        contents(folder)


def image(data: bytes) -> None:
    """A whole picture."""
    decoded = decode_whole(data, "fuzzed")
    assert decoded.shape[2] == 3


def crop(data: bytes) -> None:
    """A part of a JPEG, by dlio's own decoder: libjpeg-turbo's pixels, or none."""
    outcome(data, np.random.default_rng(len(data)))


def expanded(data: bytes) -> None:
    """Compressed data under a limit; the first byte chooses the codec."""
    if data:
        names = list(CODECS)
        exceeds(names[data[0] % len(names)], data[1:], 1 << 16)


def texts(data: bytes) -> None:
    """Texts for tiers, sizes and times."""
    text = data.decode(errors="replace")
    for parser in (parse_tiers, parse_bytes, parse_seconds):
        with contextlib.suppress(DlioError):
            parser(text)


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
        cut(data, frame, starts, IntervalRange(0, frame.rows, 0, frame.intervals_a_row))
        cut(
            data,
            frame,
            starts,
            IntervalRange(0, 1, frame.intervals_a_row - 1, frame.intervals_a_row),
        )


OF_BYTES: Final[dict[str, Callable[[bytes], None]]] = {
    each.__name__: each
    for each in (
        *(block, sealed_block, block_file, footer, manifest, sealed_manifest, schema, payload),
        *(npy, jpeg, image, crop, expanded, texts, checkpoint_contents),
    )
}
PARSERS: Final = {**OF_BYTES, **DATASETS}


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
            writer.write_blocks([[made]])
            writer.finish(
                ShardIndex(
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
                    names=np.frombuffer(b"abcd", np.uint8),
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
    picture = io.BytesIO()
    Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(picture, "JPEG")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.sound(Path(folder))
        table = next(Path(folder).glob("c/*2/.metadata")).read_bytes()
    return {
        "block": made,
        "sealed_block": made,
        "block_file": made,
        "footer": shard,
        "manifest": example.encode(),
        "sealed_manifest": example.encode(),
        "schema": Schema(fields).to_json().encode(),
        "payload": bytes(Schema(fields).join(values)),
        "npy": array,
        "jpeg": b"\xff\xd8" + bytes(40),
        "image": picture.getvalue(),
        "crop": drawn(np.random.default_rng(0), "lengths"),
        "expanded": b"\0" + zlib.compress(bytes(1000)),
        "texts": b"ram:1GiB,disk:/scratch:20GiB",
        "checkpoint_contents": table,
        **{name: seed(name) for name in DATASETS},
    }


def survives(parser: Callable[[bytes], None], data: bytes) -> None:
    """Run a parser, which may raise errors of dlio only."""
    try:
        parser(data)
    except DlioError:
        return
