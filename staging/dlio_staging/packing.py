"""Packing: write the samples of a data set, in a new order, into a folder of files.

The files are made in a folder next to the destination DST, which is renamed at the end:

    .DST.packing/lock            locked by the process that packs there
                 plan.json       key of the source and options
                 data/           becomes DST
                 done/           one record for each shard that is complete and verified

A packing that was killed continues if the source and options are the same.
"""

import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Any, Final

from dlio.comm import Communicator, world
from dlio.data.reader import open_reader
from dlio.errors import DlioError, SourceError, TierFull, UsageError
from dlio.storage.block import NO_ROOM
from dlio.util.files import take_lock
from dlio.util.units import format_bytes
from dlio_staging.packplan import VERSION, PackOptions, PackPlan
from dlio_staging.packshard import TEMPORARY, find_record, read_record, remove, write_shard
from dlio_staging.writers import WRITERS

__all__ = ["Packed", "Progress", "describe", "pack", "packed_path", "summary"]

_SAFE_PATH: Final = "PYTHONSAFEPATH"
Progress = Callable[[int, int], None]
"""Function called with (bytes done, bytes in total)."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Result of packing."""

    samples: int
    data_bytes: int
    shards: int
    file_bytes: int
    kept_shards: int = 0
    """Shards that an interrupted earlier run has written."""


def pack(
    source: object,
    destination: str,
    *,
    progress: Progress | None = None,
    options: PackOptions | None = None,
    **changes: object,
) -> Packed:
    """Write the data set at `source` as a folder of files. Collective under MPI.

    The folder appears complete and verified, or not at all. A packing that was killed continues
    when it is called again with the same arguments; after an error nothing is left.

    Args:
        source: path, URL or reader, as for `open_reader`.
        options: how to pack; the defaults if omitted.
        changes: single fields of PackOptions that override `options`.

    Raises UsageError when `destination` exists, SourceError when a sample cannot be read,
    TierFull when the disk has no room.
    """
    changed: dict[str, Any] = changes
    options = replace(options or PackOptions(), **changed)
    destination = destination.rstrip("/")
    parent = os.path.dirname(os.path.abspath(destination))
    _check(source, destination, parent, options)
    comm = world()
    plan = PackPlan(source, options)
    folder = os.path.join(parent, f".{os.path.basename(destination)}.packing")
    try:
        with _lock(folder, destination, comm):
            try:
                if comm.rank == 0:
                    _prepare(folder, plan)
                comm.barrier()
                done = _write_shards(source, folder, plan, comm, progress)
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
    """Raise UsageError if the destination or an option is invalid."""
    if options.format not in WRITERS:
        raise UsageError(f"--format {options.format}: choose {', '.join(WRITERS)}")
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists: remove it, or name another destination")
    if not os.path.isdir(parent):
        raise UsageError(f"{destination}: its folder {parent} does not exist: create it")
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
        raise UsageError(f"--split: the shares add up to {sum(shares):g}, which should be 1")
    if len(set(names)) != len(names) or any("/" in n or n.startswith(".") or not n for n in names):
        raise UsageError(f"--split: {', '.join(names)} must differ, and be names of folders")


@contextlib.contextmanager
def _lock(folder: str, destination: str, comm: Communicator) -> Iterator[None]:
    """Create the packing folder and keep it locked. Raises UsageError if another process does."""
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


def _prepare(folder: str, plan: PackPlan) -> None:
    """Keep the shards of an interrupted packing of the same source and options; remove others."""
    path = os.path.join(folder, "plan.json")
    known = None
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        known = json.load(file).get("key")
    if known != plan.key:
        for name in os.listdir(folder):
            if name != "lock":
                remove(os.path.join(folder, name))
    for name in ("data", "done"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    for part in plan.parts:
        inside = plan.path(os.path.join(folder, "data"), part)
        os.makedirs(inside, exist_ok=True)
        for name in os.listdir(inside):
            if name.startswith(TEMPORARY):
                remove(os.path.join(inside, name))
    if known != plan.key:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"key": plan.key, "version": VERSION}, file)


def _workers_context() -> ForkServerContext:
    """Return the context of worker processes.

    Their server is started here, such that it imports nothing from the current folder.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
    return multiprocessing.get_context("forkserver")


def _write_shards(
    source: object, folder: str, plan: PackPlan, comm: Communicator, progress: Progress | None
) -> Packed:
    """Write this rank's shards; return the totals of all ranks. Collective."""
    tasks = [(p, s) for p, part in enumerate(plan.parts) for s in range(part.shards)]
    mine = tasks[comm.rank :: comm.size]
    total = sum(int(plan.reader.sizes[part.samples].sum()) for part in plan.parts)
    kept = [task for task in mine if find_record(folder, *task) is not None]
    left = [task for task in mine if task not in kept]
    finished = sum(read_record(folder, task)["data_bytes"] for task in kept)
    workers = min(plan.options.workers, len(left)) if comm.size == 1 else 1
    if workers > 1 and isinstance(source, str):
        context = _workers_context()
        with ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts) as pool:
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

            def report(count: int, before: int = finished) -> None:
                if progress is not None:
                    progress(before + count, total)

            finished += write_shard(folder, plan, part, shard, report)
    records = [read_record(folder, task) for task in mine]
    everyone = comm.allgather(
        [
            len(records),
            sum(record["data_bytes"] for record in records),
            sum(record["file_bytes"] for record in records),
            len(kept),
        ]
    )
    shards, data_bytes, file_bytes, again = (sum(column) for column in zip(*everyone, strict=True))
    return Packed(len(plan.reader), data_bytes, shards, file_bytes, again)


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C in a worker: the main process handles it and ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.lru_cache(maxsize=1)
def _plan_in_worker(source: str, options: PackOptions) -> PackPlan:
    return PackPlan(source, options)


def _write_in_worker(source: str, folder: str, options: PackOptions, part: int, shard: int) -> int:
    return write_shard(folder, _plan_in_worker(source, options), part, shard, lambda _: None)


def _publish(folder: str, destination: str, plan: PackPlan) -> None:
    """Open the packed data as a reader does, check its size and move it to the destination."""
    data = os.path.join(folder, "data")
    for part in plan.parts:
        path = plan.path(data, part)
        with contextlib.closing(open_reader(packed_path(path, plan.options.format))) as reader:
            if len(reader) != len(part.samples) or reader.schema != plan.schema:
                raise SourceError(f"{path} differs from the plan of the packing: pack it again")
    for inside, _, _ in os.walk(data):
        _fsync(inside)
    parent = os.path.dirname(folder)
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists now: remove it, or name another destination")
    os.rename(data, destination)
    _fsync(parent)
    shutil.rmtree(folder, ignore_errors=True)


def packed_path(path: str, format_: str) -> str:
    """Return the path to open in a packed folder."""
    return os.path.join(path, "data.zarr") if format_ == "zarr" else path


def describe(source: object, options: PackOptions) -> dict[str, object]:
    """Return the plan as a JSON object, for `dlio pack --dry-run`."""
    plan = PackPlan(source, options)
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


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def summary(destination: str, done: Packed) -> str:
    """Return a line about the result of a packing."""
    kept = f", {done.kept_shards} of them by an earlier run" if done.kept_shards else ""
    return (
        f"{destination}: {done.samples:,} samples, {format_bytes(done.data_bytes)} in "
        f"{done.shards} shard(s) of {format_bytes(done.file_bytes)} together{kept}, verified"
    )
