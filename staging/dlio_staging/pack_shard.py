"""Writing one shard of a packing: under a temporary name, read back, compared and renamed."""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import xxhash

from dlio.data.reader import open_reader
from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock, SourceError
from dlio.util.folders import open_below, remove_path, rename
from dlio.util.trusted_files import closing_descriptor, path_of, read_small
from dlio.util.whole_files import write_whole_at
from dlio_staging.pack_plan import PackPlan
from dlio_staging.pack_writers import WRITERS, ShardRequest, file_name

_DONE: Final = "done"
_MOST_RECORD: Final = 1 << 12
TEMPORARY: Final = ".tmp-"
"""Prefix of the names of shards that are not complete and verified."""


def write_shard(
    folder: int, plan: PackPlan, number: int, shard: int, report: Callable[[int], None]
) -> int:
    """Write a shard, verify it and record it as done; return the payload bytes that were read.

    Args:
        folder: descriptor of the folder of the packing, in which nobody else can write.
        number: position of the shard's part in the plan.
        shard: number of the shard in its part.
        report: called with the payload bytes read so far after each block.

    Raises SourceError when a sample cannot be read, CorruptBlock when the file reads back
    differently.
    """
    part, options, reader = plan.parts[number], plan.options, plan.reader
    blocks = np.flatnonzero(part.shard_of == shard)
    first, last = int(part.starts[blocks[0]]), int(part.starts[blocks[-1] + 1])
    description = ShardRequest(
        schema=plan.schema,
        classes=tuple(reader.classes),
        fingerprint=part.fingerprint,
        number=shard,
        shards=part.shards,
        first=first,
        total=len(part.samples),
        blocks=tuple(blocks.tolist()),
        samples=last - first,
        compress=options.compress,
    )
    inside = plan.path(os.path.join(path_of(folder), "data"), part)
    name = file_name(options.format, shard, options.compress)
    temporary = os.path.join(inside, TEMPORARY + name)
    remove_path(temporary)
    digests: list[int] = []
    written = read = 0
    writer = WRITERS[options.format](temporary, description)
    try:
        for block in blocks.tolist():
            samples = part.samples[part.starts[block] : part.starts[block + 1]]
            payloads = reader.read(samples)
            read += sum(len(payload) for payload in payloads)
            names = [reader.name(sample) for sample in samples.tolist()]
            changed = _changed(plan, payloads, names)
            digests += [xxhash.xxh3_64_intdigest(payload) for payload in changed]
            labels = reader.labels[samples].tolist()
            writer.write(block, changed, names, labels)
            written += sum(len(payload) for payload in changed)
            report(read)
        writer.finish()
    finally:
        writer.close()
    _read_back(temporary, plan.schema, digests, description)
    rename(temporary, os.path.join(inside, name))
    size = _file_bytes(os.path.join(inside, name))
    _write_record(folder, number, shard, {"data_bytes": written, "file_bytes": size})
    return read


def _changed(plan: PackPlan, payloads: Sequence[Buffer], names: Sequence[str]) -> list[Buffer]:
    """Return the payloads, their images resized or with restart markers if the options say so."""
    options = plan.options
    if not plan.images or (options.resize is None and not options.restart_rows):
        return list(payloads)
    from dlio.image.decoder import decode_whole, encode_with_restarts, resized
    from dlio.image.jpeg import with_restarts

    changed: list[Buffer] = []
    for payload, name in zip(payloads, names, strict=True):
        values = plan.reader.schema.split(payload)
        same = True
        for field in plan.images:
            encoded: bytes | None
            if options.resize is not None:
                pixels = resized(decode_whole(values[field], name), options.resize)
                encoded = encode_with_restarts(pixels, options.quality)
            else:
                encoded = with_restarts(values[field])
            if encoded is not None:
                values[field], same = encoded, False
        changed.append(payload if same else plan.schema.join(values))
    return changed


def _read_back(path: str, schema: Schema, digests: Sequence[int], shard: ShardRequest) -> None:
    """Read a file and compare it with the payloads that were written. Raises CorruptBlock.

    Args:
        path: temporary name of the file.
        digests: xxh3_64 of the payloads, in the order of the file.
    """
    if path.endswith(".dlio"):
        _read_back_native(path, digests, shard)
        return
    named = path.replace(TEMPORARY, "")
    rename(path, named)  # Readers recognise formats and groups of files by their names.
    try:
        with contextlib.closing(open_reader(named)) as reader:
            same = reader.schema == schema and len(reader) == len(digests)
            for start in range(0, len(reader) if same else 0, 256):
                samples = np.arange(start, min(start + 256, len(reader)), dtype=np.int64)
                actual = [xxhash.xxh3_64_intdigest(payload) for payload in reader.read(samples)]
                same = same and actual == digests[start : start + len(actual)]
    finally:
        rename(named, path)
    if not same:
        raise CorruptBlock(f"{named} differs from the data written to it: check the disk")


def _read_back_native(path: str, digests: Sequence[int], shard: ShardRequest) -> None:
    """Verify the blocks of a native shard and compare their checksums. Raises CorruptBlock."""
    from dlio.storage.block import check_block
    from dlio.storage.shard_file import read_footer

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        footer = read_footer(descriptor, path)
        actual: list[int] = []
        for k, block in enumerate(shard.blocks):
            start, end = int(footer.offsets[k]), int(footer.offsets[k + 1])
            memory = memoryview(os.pread(descriptor, end - start, start))
            info = check_block(memory, path, start)
            if info.block != block:
                raise CorruptBlock(f"{path}: block {info.block} is in the place of {block}")
            actual += info.table["xxh3"].tolist()
        if actual != list(digests):
            raise CorruptBlock(f"{path} differs from the data written to it: check the disk")
    finally:
        os.close(descriptor)


def _record_name(part: int, shard: int) -> str:
    return f"{part}-{shard}.json"


def _write_record(folder: int, part: int, shard: int, record: dict[str, int]) -> None:
    """Record a shard as complete, durably."""
    text = json.dumps(record).encode()
    with closing_descriptor(open_below(folder, _DONE, private=False)) as done:
        write_whole_at(done, _record_name(part, shard), lambda file: file.write(text))


def find_record(folder: int, part: int, shard: int) -> dict[str, int] | None:
    """Return the record of a complete shard (`data_bytes`, `file_bytes`); None without one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with closing_descriptor(open_below(folder, _DONE, private=False)) as done:
            text = read_small(done, _record_name(part, shard), _MOST_RECORD)
        record: dict[str, int] = json.loads(text)
        return record
    return None


def read_record(folder: int, task: tuple[int, int]) -> dict[str, int]:
    """Return the record of a complete shard. Raises SourceError without one.

    Args:
        task: (position of the part, number of the shard).
    """
    record = find_record(folder, *task)
    if record is None:
        path = os.readlink(path_of(folder))
        raise SourceError(f"{path} was changed while packing: pack it again")
    return record


def _file_bytes(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
    )
