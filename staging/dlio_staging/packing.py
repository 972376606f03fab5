"""Packing: samples of a data set, in a new order, into files that appear whole.

    DST's folder/.DST.packing/lock            held by the one that packs there
                              plan.json       of what is being packed, and how
                              data/           becomes DST
                              done/           a file for each shard that is written and checked

A packing that was killed is gone on with, if source and options are the same: each shard is written
under another name, read back, compared, and renamed.
"""

import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import xxhash

from dlio.comm import Communicator, world
from dlio.data.reader import open_reader
from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock, DlioError, SourceError, TierFull, UsageError
from dlio.storage.block import NO_ROOM
from dlio.util.files import take_lock
from dlio.util.units import format_bytes
from dlio_staging.packplan import VERSION, PackOptions, Plan
from dlio_staging.writers import WRITERS, Shard, file_name

__all__ = ["Packed", "Progress", "describe", "pack", "packed_path", "tell"]

_TEMPORARY: Final = ".tmp-"

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Result of packing."""

    samples: int
    data_bytes: int
    shards: int
    file_bytes: int
    kept_shards: int = 0
    """Written by an earlier run that was interrupted."""


def pack(
    source: object,
    destination: str,
    *,
    progress: Progress | None = None,
    options: PackOptions | None = None,
    **changes: object,
) -> Packed:
    """Write the data set at `source` as a folder of files. Collective under MPI.

    The folder appears complete and verified, or not at all. A packing that was killed is gone on
    with when the same is asked for again; after an error nothing is left.

    Args:
        source: what `open_reader` takes.
        options: see PackOptions; `changes` are single ones of them.

    Raises UsageError when `destination` exists, SourceError when a sample cannot be read,
    TierFull when the disk has no room.
    """
    changed: dict[str, Any] = changes
    options = replace(options or PackOptions(), **changed)
    destination = destination.rstrip("/")
    parent = os.path.dirname(os.path.abspath(destination))
    _check(source, destination, parent, options)
    comm = world()
    plan = Plan(source, options)
    folder = os.path.join(parent, f".{os.path.basename(destination)}.packing")
    try:
        with _held(folder, destination, comm):
            try:
                if comm.rank == 0:
                    _prepare(folder, plan)
                comm.barrier()
                done = _write_all(source, folder, plan, comm, progress)
                comm.barrier()
                if comm.rank == 0:
                    _publish(folder, destination, plan)
                comm.barrier()
            except Exception:
                if comm.rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        if isinstance(error, DlioError):
            raise
        if error.errno in NO_ROOM:
            raise TierFull(
                f"{destination} cannot be written, the disk is full ({error.strerror}): free "
                f"space in {parent}, or name another destination"
            ) from error
        raise UsageError(f"{destination} cannot be written: {error.strerror}") from error
    finally:
        plan.reader.close()
    return done


def _check(source: object, destination: str, parent: str, options: PackOptions) -> None:
    if options.format not in WRITERS:
        raise UsageError(f"--format {options.format}: choose {', '.join(WRITERS)}")
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists: remove it, or name another destination")
    if not os.path.isdir(parent):
        raise UsageError(f"there is no folder {parent} to put {destination} in: create it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{parent} cannot be written: Permission denied")
    folder = os.path.abspath(source) if isinstance(source, str) else ""
    if os.path.isdir(folder) and (parent + "/").startswith(folder + "/"):
        raise UsageError(f"{destination} would lie in {source}: name a place outside of it")
    if options.resize is not None and options.resize < 1:
        raise UsageError(f"--resize {options.resize}: give the short side in pixels")
    if not 1 <= options.quality <= 100:
        raise UsageError(f"--quality {options.quality}: choose 1 to 100")
    shares = [share for _, share in options.split]
    names = [name for name, _ in options.split]
    if options.split and (abs(sum(shares) - 1) > 1e-6 or min(shares) <= 0):
        raise UsageError(f"--split: shares of {sum(shares):g} in all, which should be 1")
    if len(set(names)) != len(names) or any("/" in n or n.startswith(".") or not n for n in names):
        raise UsageError(f"--split: {', '.join(names)} must differ, and be names of folders")


@contextlib.contextmanager
def _held(folder: str, destination: str, comm: Communicator) -> Iterator[None]:
    """Hold the staging folder, alone."""
    lock = -1
    if comm.rank == 0:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        lock = os.open(
            f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        if not take_lock(lock, fcntl.LOCK_EX):
            os.close(lock)
            raise UsageError(f"{destination} is being packed by another process")
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _prepare(folder: str, plan: Plan) -> None:
    """Keep what an interrupted packing of the same has written; begin afresh otherwise."""
    path = os.path.join(folder, "plan.json")
    known = None
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        known = json.load(file).get("key")
    if known != plan.key:
        for name in os.listdir(folder):
            if name != "lock":
                _remove(os.path.join(folder, name))
    for name in ("data", "done"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    for part in plan.parts:
        inside = plan.path(os.path.join(folder, "data"), part)
        os.makedirs(inside, exist_ok=True)
        for name in os.listdir(inside):
            if name.startswith(_TEMPORARY):
                _remove(os.path.join(inside, name))
    if known != plan.key:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"key": plan.key, "version": VERSION}, file)


def _write_all(
    source: object, folder: str, plan: Plan, comm: Communicator, progress: Progress | None
) -> Packed:
    """Write the shards of this rank; returns what all wrote."""
    tasks = [(p, s) for p, part in enumerate(plan.parts) for s in range(part.shards)]
    mine = tasks[comm.rank :: comm.size]
    total = sum(int(plan.reader.sizes[part.samples].sum()) for part in plan.parts)
    kept = [task for task in mine if _read_done(folder, *task) is not None]
    left = [task for task in mine if task not in kept]
    finished = sum(_told(folder, task)["data_bytes"] for task in kept)
    workers = min(plan.options.workers, len(left)) if comm.size == 1 else 1
    if workers > 1 and isinstance(source, str):
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(workers, context, initializer=_leave_interrupts) as pool:
            futures = [
                pool.submit(_write_in_worker, source, folder, plan.options, *task) for task in left
            ]
            try:
                for future in as_completed(futures):
                    finished += future.result()
                    if progress is not None:
                        progress(finished, total)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    else:
        for part, shard in left:

            def tell(count: int, before: int = finished) -> None:
                if progress is not None:
                    progress(before + count, total)

            finished += _write_shard(folder, plan, part, shard, tell)
    told = [_told(folder, task) for task in mine]
    everyone = comm.allgather(
        [
            len(told),
            sum(each["data_bytes"] for each in told),
            sum(each["file_bytes"] for each in told),
            len(kept),
        ]
    )
    shards, data_bytes, file_bytes, again = (sum(column) for column in zip(*everyone, strict=True))
    return Packed(len(plan.reader), data_bytes, shards, file_bytes, again)


def _leave_interrupts() -> None:
    """Ctrl-C ends the packing in the process that the user started; it ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.lru_cache(maxsize=1)
def _plan_in_worker(source: str, options: PackOptions) -> Plan:
    return Plan(source, options)


def _write_in_worker(source: str, folder: str, options: PackOptions, part: int, shard: int) -> int:
    return _write_shard(folder, _plan_in_worker(source, options), part, shard, lambda _: None)


def _write_shard(
    folder: str, plan: Plan, number: int, shard: int, tell: Callable[[int], None]
) -> int:
    """Write one file, read it back, and give it its name; returns its payload bytes."""
    part, options, reader = plan.parts[number], plan.options, plan.reader
    blocks = np.flatnonzero(part.shard_of == shard)
    first, last = int(part.starts[blocks[0]]), int(part.starts[blocks[-1] + 1])
    about = Shard(
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
    inside = plan.path(os.path.join(folder, "data"), part)
    name = file_name(options.format, shard, options.compress)
    temporary = os.path.join(inside, _TEMPORARY + name)
    _remove(temporary)
    digests: list[int] = []
    written = read = 0
    writer = WRITERS[options.format](temporary, about)
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
            tell(read)
        writer.finish()
    finally:
        writer.close()
    _read_back(temporary, plan.schema, digests, about)
    os.rename(temporary, os.path.join(inside, name))
    size = _file_bytes(os.path.join(inside, name))
    _write_done(folder, number, shard, {"data_bytes": written, "file_bytes": size})
    return read


def _changed(plan: Plan, payloads: Sequence[Buffer], names: Sequence[str]) -> list[Buffer]:
    """The payloads with their images resized, or restarting at rows, as asked for."""
    options = plan.options
    if not plan.images or (options.resize is None and not options.restart_rows):
        return list(payloads)
    from dlio.image.decode import decode_whole
    from dlio.image.encode import encode_with_restarts, resized
    from dlio.image.jpeg import with_restarts

    changed: list[Buffer] = []
    for payload, name in zip(payloads, names, strict=True):
        values = plan.reader.schema.split(payload)
        same = True
        for field in plan.images:
            made: bytes | None
            if options.resize is not None:
                pixels = resized(decode_whole(values[field], name), options.resize)
                made = encode_with_restarts(pixels, options.quality)
            else:
                made = with_restarts(values[field])
            if made is not None:
                values[field], same = made, False
        changed.append(payload if same else plan.schema.join(values))
    return changed


def _read_back(path: str, schema: Schema, digests: Sequence[int], about: Shard) -> None:
    """Compare a file with what was written into it. Raises CorruptBlock."""
    if path.endswith(".dlio"):
        _read_back_native(path, digests, about)
        return
    named = path.replace(_TEMPORARY, "")
    os.rename(path, named)  # Readers go by suffixes, and some by what is left of names.
    try:
        with contextlib.closing(open_reader(named)) as reader:
            same = reader.schema == schema and len(reader) == len(digests)
            for start in range(0, len(reader) if same else 0, 256):
                samples = np.arange(start, min(start + 256, len(reader)), dtype=np.int64)
                found = [xxhash.xxh3_64_intdigest(payload) for payload in reader.read(samples)]
                same = same and found == digests[start : start + len(found)]
    finally:
        os.rename(named, path)
    if not same:
        raise CorruptBlock(f"{named} reads back otherwise than it was written: check the disk")


def _read_back_native(path: str, digests: Sequence[int], about: Shard) -> None:
    from dlio.storage.block import check_block
    from dlio.storage.shard import read_footer

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        footer = read_footer(descriptor, path)
        found: list[int] = []
        for k, block in enumerate(about.blocks):
            start, end = int(footer.offsets[k]), int(footer.offsets[k + 1])
            memory = memoryview(os.pread(descriptor, end - start, start))
            info = check_block(memory, path, start)
            if info.block != block:
                raise CorruptBlock(f"{path}: block {info.block} lies where {block} should")
            found += info.table["xxh3"].tolist()
        if found != list(digests):
            raise CorruptBlock(f"{path} reads back otherwise than it was written: check the disk")
    finally:
        os.close(descriptor)


def _publish(folder: str, destination: str, plan: Plan) -> None:
    """Look at it as a reader does, and put it in place."""
    data = os.path.join(folder, "data")
    for part in plan.parts:
        path = plan.path(data, part)
        with contextlib.closing(open_reader(packed_path(path, plan.options.format))) as reader:
            if len(reader) != len(part.samples) or reader.schema != plan.schema:
                raise SourceError(f"{path} is not what was to be packed: pack it again")
    for inside, _, _ in os.walk(data):
        _fsync(inside)
    parent = os.path.dirname(folder)
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists now: remove it, or name another destination")
    os.rename(data, destination)
    _fsync(parent)
    shutil.rmtree(folder, ignore_errors=True)


def packed_path(path: str, format_: str) -> str:
    """Path to open in a packed folder."""
    return os.path.join(path, "data.zarr") if format_ == "zarr" else path


def describe(source: object, options: PackOptions) -> dict[str, object]:
    """Describe the plan, for `dlio pack --dry-run`."""
    plan = Plan(source, options)
    parts = [
        {
            "name": part.name,
            "samples": len(part.samples),
            "shards": part.shards,
            "bytes": int(plan.reader.sizes[part.samples].sum()),
        }
        for part in plan.parts
    ]
    plan.reader.close()
    return {"format": options.format, "schema": json.loads(plan.schema.to_json()), "parts": parts}


def _done_path(folder: str, part: int, shard: int) -> str:
    return os.path.join(folder, "done", f"{part}-{shard}.json")


def _write_done(folder: str, part: int, shard: int, told: dict[str, int]) -> None:
    path = _done_path(folder, part, shard)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(told, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".tmp", path)


def _read_done(folder: str, part: int, shard: int) -> dict[str, int] | None:
    with contextlib.suppress(OSError, ValueError):
        with open(_done_path(folder, part, shard), encoding="utf-8") as file:
            told: dict[str, int] = json.load(file)
        return told
    return None


def _told(folder: str, task: tuple[int, int]) -> dict[str, int]:
    told = _read_done(folder, *task)
    if told is None:
        raise SourceError(f"{folder} was changed while packing: pack it again")
    return told


def _file_bytes(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
    )


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tell(destination: str, done: Packed) -> str:
    """One line about a packing."""
    kept = f", {done.kept_shards} of them from before" if done.kept_shards else ""
    return (
        f"{destination}: {done.samples:,} samples, {format_bytes(done.data_bytes)} in "
        f"{done.shards} shard(s) of {format_bytes(done.file_bytes)} together{kept}, verified"
    )
