"""`dlio pack`: write a data set as native shards, in a shuffled order."""

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import typer
import xxhash

from dlio.errors import DlioError, TierFull, UsageError
from dlio.order import Order
from dlio.reader import Layout, Reader, cut_blocks, open_reader
from dlio.storage.block import NO_ROOM, encode_block
from dlio.storage.folders import hold_shared, remove_if_unheld
from dlio.storage.shard import SUFFIX, Footer, ShardWriter
from dlio.units import format_bytes, parse_bytes

_COMPRESSED_KINDS = ("jpeg", "png", "image")
_LOCK = ".lock"

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What a packing wrote."""

    samples: int
    data_bytes: int
    shards: int
    file_bytes: int


def pack(
    source: str,
    destination: str,
    *,
    order: Literal["shuffled", "source"] = "shuffled",
    compress: Literal["auto", "lz4", "none"] = "auto",
    shard_bytes: int = 1 << 30,
    seed: int = 0,
    progress: Progress | None = None,
) -> Packed:
    """Write the data set at `source` as a folder of shards.

    The folder appears complete and verified, or not at all.

    Args:
        order: of the samples in the shards; shuffled, so that blocks mix classes.
        compress: LZ4 for each sample that it makes smaller; `auto` leaves images as they are.
        shard_bytes: payload bytes of a shard, about.

    Raises UsageError when `destination` exists, SourceError when a sample cannot be read,
    TierFull when the disk has no room.
    """
    destination = destination.rstrip("/")
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists: remove it, or name another destination")
    parent = os.path.dirname(os.path.abspath(destination))
    if not os.path.isdir(parent):
        raise UsageError(f"there is no folder {parent} to put {destination} in: create it")
    reader = open_reader(source)
    layout = cut_blocks(reader.sizes, Order(len(reader), seed, shuffled=order == "shuffled"))
    lz4 = compress == "lz4" or (
        compress == "auto"
        and not any(kind in _COMPRESSED_KINDS for _, kind in reader.schema.fields)
    )
    name = f".{os.path.basename(destination)}.packing-"
    try:
        folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{parent} cannot be opened: {error.strerror}") from error
    temporary = name + secrets.token_hex(4)
    try:
        for left in [entry for entry in os.listdir(folder) if entry.startswith(name)]:
            remove_if_unheld(folder, left, _LOCK)  # Of a packing that was killed.
        try:
            os.mkdir(temporary, dir_fd=folder)
        except OSError as error:
            raise UsageError(f"{parent} cannot be written: {error.strerror}") from error
        inside = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        held = hold_shared(inside, _LOCK)
        try:
            path = os.path.join(parent, temporary)
            done = _write(reader, layout, path, lz4, shard_bytes, progress)
            _check(path, reader, layout)
            os.unlink(_LOCK, dir_fd=inside)
            os.fsync(inside)
            os.rename(
                temporary, os.path.basename(destination), src_dir_fd=folder, dst_dir_fd=folder
            )
            os.fsync(folder)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise TierFull(
                    f"{destination} cannot be written, the disk is full ({error.strerror}): free "
                    f"space in {parent}, or name another destination"
                ) from error
            if isinstance(error, DlioError):
                raise
            raise UsageError(f"{destination} cannot be written: {error.strerror}") from error
        finally:
            os.close(held)
            os.close(inside)
            shutil.rmtree(os.path.join(parent, temporary), ignore_errors=True)
    finally:
        os.close(folder)
        reader.close()
    return done


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A data set of any format.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    order: Annotated[
        Literal["shuffled", "source"], typer.Option(help="Of samples in the shards.")
    ] = "shuffled",
    compress: Annotated[
        Literal["auto", "lz4", "none"], typer.Option(help="auto leaves images as they are.")
    ] = "auto",
    shard_size: Annotated[str, typer.Option(help="Of one shard, about.")] = "1GiB",
    seed: Annotated[int, typer.Option(help="Of the shuffled order.", min=0)] = 0,
) -> None:
    """Write a data set as native shards: few large files, checked, in a shuffled order."""
    from rich.progress import Progress as Bar

    limit = parse_bytes(shard_size)
    if limit < 1 << 16:
        raise UsageError(f"--shard-size {shard_size}: give at least 64KiB")
    with Bar(transient=True) as bar:
        task = bar.add_task("packing", total=None)
        done = pack(
            source,
            destination,
            order=order,
            compress=compress,
            shard_bytes=limit,
            seed=seed,
            progress=lambda at, of: bar.update(task, completed=at, total=of),
        )
    typer.echo(
        f"{destination}: {done.samples:,} samples, {format_bytes(done.data_bytes)} in "
        f"{done.shards} shard(s) of {format_bytes(done.file_bytes)} together, verified"
    )


def _write(
    reader: Reader,
    layout: Layout,
    folder: str,
    lz4: bool,
    shard_bytes: int,
    progress: Progress | None,
) -> Packed:
    sizes = reader.sizes[layout.order.samples(np.arange(len(reader), dtype=np.int64))]
    ends = np.cumsum(sizes)
    block_ends = ends[layout.starts[1:] - 1]
    shard_of = (block_ends - 1) // shard_bytes
    _, shard_of = np.unique(shard_of, return_inverse=True)
    shards = int(shard_of[-1]) + 1
    fingerprint = _fingerprint(reader, layout, lz4, shards)
    file_bytes = 0
    for shard in range(shards):
        blocks = np.flatnonzero(shard_of == shard).tolist()
        path = os.path.join(folder, f"shard-{shard:05d}{SUFFIX}")
        with ShardWriter(path) as writer:
            for block in blocks:
                payloads = reader.read(layout.samples_of(block))
                writer.write_block(
                    encode_block(
                        payloads,
                        block=block,
                        fingerprint=fingerprint,
                        schema=reader.schema,
                        compress=lz4,
                    )
                )
                if progress is not None:
                    progress(int(block_ends[block]), int(ends[-1]))
            writer.finish(
                _footer(reader, layout, sizes, blocks, shard, shards, fingerprint, writer.offsets)
            )
        file_bytes += os.path.getsize(path)
    return Packed(len(reader), int(ends[-1]), shards, file_bytes)


def _footer(
    reader: Reader,
    layout: Layout,
    sizes: npt.NDArray[np.int64],
    blocks: list[int],
    shard: int,
    shards: int,
    fingerprint: str,
    offsets: list[int],
) -> Footer:
    first, last = int(layout.starts[blocks[0]]), int(layout.starts[blocks[-1] + 1])
    samples = layout.order.samples(np.arange(first, last, dtype=np.int64))
    names = [reader.name(int(sample)).encode("utf-8", "replace") for sample in samples]
    return Footer(
        fingerprint=fingerprint,
        schema=reader.schema,
        classes=tuple(reader.classes),
        shard=shard,
        shards=shards,
        first=first,
        total=len(reader),
        offsets=np.array(offsets, np.uint64),
        counts=np.diff(layout.starts[blocks[0] : blocks[-1] + 2]).astype(np.uint32),
        sizes=sizes[first:last].astype(np.uint32),
        labels=reader.labels[samples],
        names=b"".join(names),
        name_ends=np.cumsum([len(name) for name in names]).astype(np.uint64),
    )


def _fingerprint(reader: Reader, layout: Layout, lz4: bool, shards: int) -> str:
    """Of what is written: the source's, and how it is cut and ordered."""
    text = f"shard {reader.fingerprint} {layout.order} {lz4} {shards}"
    digest = xxhash.xxh3_128(text.encode())
    digest.update(layout.starts.astype("<i8").tobytes())
    return digest.hexdigest()


def _check(folder: str, reader: Reader, layout: Layout) -> None:
    """Read back every block, and compare the index. Raises what is wrong with it."""
    written = open_reader(folder)
    positions = np.arange(len(reader), dtype=np.int64)
    samples = layout.order.samples(positions)
    assert (written.sizes == reader.sizes[samples]).all()
    assert (written.labels == reader.labels[samples]).all()
    for block in range(written.layout.blocks):
        written.read(written.layout.samples_of(block))
    written.close()
