"""Packing: write the samples of a data set, in a new order, into a folder of files.

The files are made in a folder next to the destination DST, which is renamed at the end:

    .DST.packing/.dlio           marks the folder as dlio's; names the process that made it
                 lock            locked by the process that packs there
                 plan.json       key of the source and options
                 data/           becomes DST
                 done/           one record for each shard that is complete and verified

A packing that was killed continues if the source and options are the same, and if the folder is
private to this user and has the mark. All paths in it begin with a descriptor of the folder.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Any, Final, TypeVarTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.comm import Communicator, world
from dlio.data.agreement import check_same_data
from dlio.data.reader import open_reader
from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock, DlioError, SourceError, TierFull, UsageError, redact
from dlio.plan.layout import MAX_BLOCK_BYTES
from dlio.storage.block import NO_ROOM, PayloadScratch, check_block, read_exactly
from dlio.storage.shard_file import read_footer
from dlio.util.arguments import path_in
from dlio.util.child_processes import variable
from dlio.util.folders import (
    MARK,
    empty_folder,
    mark_of,
    open_below,
    open_working,
    remove_entry,
    remove_marked,
    remove_path,
    rename,
    same_folder,
    seal,
)
from dlio.util.limits import open_regular
from dlio.util.parallel import SourceThread
from dlio.util.trusted_files import (
    UntrustedFile,
    closing_descriptor,
    open_file,
    path_of,
    read_small,
    shown_as,
)
from dlio.util.units import counted, format_bytes
from dlio.util.user_folders import make_folders, open_folder, parent_of
from dlio.util.whole_files import check_folder, not_written, take_lock, unwritable, write_whole_at
from dlio_staging.pack_plan import VERSION, PackOptions, PackPlan
from dlio_staging.pack_writers import WRITERS, PackedRows, ShardRequest, file_name
from dlio_staging.sample_check import SampleCheck

# Worker processes that share nothing but pipes
#
# Executors and queues of Python's library have named semaphores in shared memory, which stay there
# when a whole job is killed at once, as by the memory limit of its control group.

Arguments = TypeVarTuple("Arguments")


def in_processes(
    function: Callable[[*Arguments], int], tasks: Sequence[tuple[*Arguments]], workers: int
) -> Iterator[int]:
    """Call `function`, of a module, in worker processes with the arguments of each task; yield the
    results as they come, in any order.

    Raises what `function` raises, SourceError if a worker dies. No process is left then.
    """
    context = _context()
    left = list(reversed(tasks))
    processes = {}
    try:
        for _ in range(min(workers, len(left))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
            ours.send(left.pop())
        busy = list(processes)
        while busy:
            ready = wait(busy)
            for each in [each for each in busy if each in ready]:
                yield _result(each)
                if left:
                    each.send(left.pop())
                else:
                    busy.remove(each)
                    each.close()
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for ours, process in processes.items():
            ours.close()
            process.join()


def _result(ours: Connection) -> int:
    try:
        error, result = ours.recv()
    except (EOFError, ConnectionError) as lost:
        raise SourceError(
            "a worker process was killed: is there enough memory? Run again with fewer --workers"
        ) from lost
    if error is not None:
        raise error
    return int(result)


def _serve(theirs: Connection, function: Callable[..., int]) -> None:
    """Run in a worker: do one task after another, until the pipe is closed."""
    # The main process handles Ctrl-C, and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = theirs.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer: tuple[Exception | None, int] = (None, function(*task))
        except Exception as error:
            answer = (error, 0)
        try:
            theirs.send(answer)
        except ConnectionError:
            return


def _context() -> ForkServerContext:
    """Return the context of worker processes.

    Their server is started here, such that it imports nothing from the current folder.
    """
    with variable("PYTHONSAFEPATH", "1"):
        ensure_running()
    return multiprocessing.get_context("forkserver")


# Writing one shard of a packing: under a temporary name, read back, compared and renamed

_DONE: Final = "done"
_MOST_RECORD: Final = 1 << 12
TEMPORARY: Final = ".tmp-"
"""Prefix of the names of shards that are not complete and verified."""


def write_shard(
    folder: int, plan: PackPlan, number: int, shard: int, report: Callable[[int], None]
) -> int:
    """Write a shard, verify it and record it as done; return the payload bytes that were read.

    Nobody else can write in the `folder` of the packing, a descriptor. The shard's part is the
    `number`-th of the plan. `report` is called with the payload bytes so far after each block.

    Raises SourceError when a sample cannot be read, CorruptBlock when the file reads back
    differently.
    """
    part, options, reader = plan.parts[number], plan.options, plan.reader
    blocks = np.flatnonzero(part.shard_of == shard)
    description = ShardRequest(
        schema=plan.schema,
        classes=tuple(reader.classes),
        fingerprint=part.fingerprint,
        number=shard,
        shards=part.shards,
        first=int(part.starts[blocks[0]]),
        total=len(part.samples),
        blocks=tuple(blocks.tolist()),
        compress=options.compress,
    )
    inside = plan.path(os.path.join(path_of(folder), "data"), part)
    name = file_name(options.format, shard, options.compress)
    temporary = os.path.join(inside, TEMPORARY + name)
    remove_path(temporary)
    digests: list[int] = []
    written = read = undecodable = 0
    check = _check_of(plan)
    writer = WRITERS[options.format](temporary, description)
    runs = _runs(reader.sizes[part.samples], part.starts[blocks[0] : blocks[-1] + 2])
    calls = [functools.partial(reader.read, part.samples[run[0] : run[-1]]) for run in runs]
    block = int(blocks[0])
    thread = SourceThread(redact(reader.path))
    try:
        wait = thread.start(calls[0])
        for run, following in zip(runs, [*calls[1:], None], strict=True):
            payloads, samples = wait(), part.samples[run[0] : run[-1]]
            if following is not None:  # It is read while this one is written.
                wait = thread.start(following)
            read += sum(len(payload) for payload in payloads)
            names = [reader.name(sample) for sample in samples.tolist()]
            changed = _changed(plan, payloads, names)
            undecodable += 0 if check is None else check.refused(changed, names)
            sums = [xxhash.xxh3_64_intdigest(payload) for payload in changed]
            rows = PackedRows(changed, names, reader.labels[samples].tolist(), sums)
            writer.write(block, rows, (run - run[0]).tolist())
            block += len(run) - 1
            digests += sums
            written += sum(len(payload) for payload in changed)
            report(read)
        writer.finish()
    finally:
        thread.close()
        writer.close()
    _read_back(temporary, plan.schema, digests, description)
    rename(temporary, os.path.join(inside, name))
    size = _file_bytes(os.path.join(inside, name))
    totals = {"data_bytes": written, "file_bytes": size, "undecodable": undecodable}
    record = json.dumps(totals).encode()
    with closing_descriptor(open_below(folder, _DONE, private=False)) as done:
        write_whole_at(done, f"{number}-{shard}.json", lambda file: file.write(record))
    return read


def _runs(
    sizes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Cut blocks into runs of about the largest block's bytes: a data set of few bytes has small
    blocks, each of which would cost two changes of threads.

    `sizes` has the payload bytes of the part's samples, and `starts` the first position of each of
    the blocks, and the end. Returns the same of each run.
    """
    ends = np.cumsum(sizes)[starts[1:] - 1]
    cuts = np.flatnonzero(np.diff((ends - 1) // MAX_BLOCK_BYTES)) + 1
    bounds = [0, *cuts.tolist(), len(ends)]
    return [starts[first : last + 1] for first, last in itertools.pairwise(bounds)]


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


def _check_of(plan: PackPlan) -> SampleCheck | None:
    """Return the check of samples that are packed as they are; None if nothing can be refused."""
    if not plan.images or plan.options.resize is not None:
        return None  # Those that were resized have been decoded, and encoded again.
    from dlio.image.decoder import check_image

    return SampleCheck(plan.schema, check_image)


def _read_back(path: str, schema: Schema, digests: Sequence[int], shard: ShardRequest) -> None:
    """Read a file, by its temporary name, and compare the xxh3_64 of its payloads with those that
    were written. Raises CorruptBlock.
    """
    if path.endswith(".dlio"):
        _read_back_native(path, digests, shard)
        return
    named = path.replace(TEMPORARY, "")
    rename(path, named)  # Readers recognise formats and groups of files by their names.
    try:
        with contextlib.closing(open_reader(named, trust=True)) as reader:
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
    with closing_descriptor(open_regular(path)) as descriptor:
        footer = read_footer(descriptor, path)
        actual: list[int] = []
        scratch = PayloadScratch()  # Fresh memory for each block takes as long as reading it.
        for k, block in enumerate(shard.blocks):
            start, end = int(footer.offsets[k]), int(footer.offsets[k + 1])
            memory = scratch.view(end - start)
            read_exactly(descriptor, memory, start, path)
            info = check_block(memory, path, start)
            if info.block != block:
                raise CorruptBlock(f"{path}: block {info.block} is in the place of {block}")
            actual += info.table["xxh3"].tolist()
        if actual != list(digests):
            raise CorruptBlock(f"{path} differs from the data written to it: check the disk")


def find_record(folder: int, part: int, shard: int) -> dict[str, int] | None:
    """Return the record of a complete shard (`data_bytes`, `file_bytes`, `undecodable`); None
    without one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with closing_descriptor(open_below(folder, _DONE, private=False)) as done:
            text = read_small(done, f"{part}-{shard}.json", _MOST_RECORD)
        record: dict[str, int] = json.loads(text)
        return record
    return None


def read_record(folder: int, task: tuple[int, int]) -> dict[str, int]:
    """Return the record of a complete shard: (position of its part, its number).

    Raises SourceError without one.
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


# The folder

_LOCK: Final = "lock"
_PLAN: Final = "plan.json"
_MOST_PLAN: Final = 1 << 16
Progress = Callable[[int, int], None]
"""Function called with (bytes done, bytes in total)."""


@dataclass(frozen=True, slots=True)
class PackResult:
    """Result of packing."""

    samples: int
    data_bytes: int
    shards: int
    file_bytes: int
    kept_shards: int = 0
    """Shards that an interrupted earlier run has written."""
    undecodable: int = 0
    """Samples with images that loaders refuse, which were packed as they are."""


def pack(
    source: object,
    destination: str,
    *,
    progress: Progress | None = None,
    options: PackOptions | None = None,
    **changes: object,
) -> PackResult:
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
    source = path_in("source", source) if isinstance(source, os.PathLike) else source
    destination = path_in("destination", destination, "packed").rstrip("/")
    parent = os.path.dirname(os.path.abspath(destination))
    _check(source, destination, parent, options)
    comm = world()
    plan = PackPlan(source, options)
    folder = os.path.join(parent, f".{os.path.basename(destination)}.packing")
    try:
        check_same_data(plan.reader, comm)
        with _working(folder, destination, comm) as work:
            try:
                if comm.rank == 0:
                    _prepare(work, plan)
                comm.barrier()
                done = _write_shards(source, work, plan, comm, progress)
                comm.barrier()
                if comm.rank == 0:
                    _publish(work, destination, plan)
                comm.barrier()
            except Exception:
                if comm.rank == 0:
                    remove_marked(work.parent, work.name)
                raise
    except OSError as error:
        if isinstance(error, DlioError):
            raise
        if error.errno in NO_ROOM:
            raise TierFull(not_written(destination, error)) from error
        raise unwritable(destination, error) from error
    finally:
        plan.reader.close()
    return done


def _check(source: object, destination: str, parent: str, options: PackOptions) -> None:
    """Raise UsageError if the destination or an option is invalid."""
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists: remove it, or name another destination")
    if not os.path.isdir(parent):
        raise UsageError(f"{destination}: its folder {parent} does not exist: create it")
    check_folder(parent)
    folder = os.path.abspath(source) if isinstance(source, str) else ""
    if os.path.isdir(folder) and (parent + "/").startswith(folder + "/"):
        raise UsageError(f"{destination} would lie in {source}: name a place outside of it")
    shares = [share for _, share in options.split]
    names = [name for name, _ in options.split]
    if options.split and (abs(sum(shares) - 1) > 1e-6 or min(shares) <= 0):
        raise UsageError(f"--split: the shares add up to {sum(shares):g}, which should be 1")
    if len(set(names)) != len(names) or any("/" in n or n.startswith(".") or not n for n in names):
        raise UsageError(f"--split: {', '.join(names)} must differ, and be names of folders")


@dataclass(frozen=True, slots=True)
class _PackFolder:
    parent: int
    """Descriptor of the folder that contains it."""
    name: str
    folder: int
    """Descriptor."""
    shown: str
    """Path, for errors and for other processes."""
    token: str
    """Text of the folder's mark."""

    @property
    def path(self) -> str:
        """Path by way of the descriptor, in this process."""
        return path_of(self.folder)


@contextlib.contextmanager
def _working(shown: str, destination: str, comm: Communicator) -> Iterator[_PackFolder]:
    """Create the folder of the packing; keep it open, and on rank 0 locked. Collective.

    Raises UsageError if another process packs there, or if the folder is not dlio's.
    """
    with contextlib.ExitStack() as stack:
        above, name = os.path.split(shown)
        parent = open_folder(above)
        stack.callback(os.close, parent)
        token = ""
        if comm.rank == 0:
            new = f"dlio packing {secrets.token_hex(8)}\n"
            try:
                folder = open_working(parent, name, text=new)
            except (UntrustedFile, NotADirectoryError) as error:
                raise UsageError(
                    f"{shown} {error.strerror}: remove it, or name another destination"
                ) from error
            stack.callback(os.close, folder)
            lock = open_file(folder, _LOCK, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock)
            if not take_lock(lock, fcntl.LOCK_EX) or not same_folder(parent, name, folder):
                raise UsageError(
                    f"{destination} is being packed by another process: wait for its end, or name "
                    "another place"
                )
            token = mark_of(folder) or ""
        token = comm.tell(token)
        if comm.rank:
            folder = stack.enter_context(_opened(shown, token))
        work = _PackFolder(parent, name, folder, shown, token)
        with shown_as(work.path, shown):
            yield work


@contextlib.contextmanager
def _opened(shown: str, token: str) -> Iterator[int]:
    """Open the folder that another process of this packing has made; yields the descriptor."""
    with parent_of(shown) as (parent, name):
        opened = open_below(parent, name)
    with closing_descriptor(opened) as folder:
        if mark_of(folder) != token:
            raise UsageError(f"{shown} was exchanged while packing: pack it again")
        yield folder


def _prepare(work: _PackFolder, plan: PackPlan) -> None:
    """Keep the shards of an interrupted packing of the same source and options; remove others."""
    known = None
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        known = json.loads(read_small(work.folder, _PLAN, _MOST_PLAN)).get("key")
    if known != plan.key:
        empty_folder(work.folder, keep=(_LOCK, MARK))
    for name in ("data", "done"):
        os.close(make_folders(os.path.join(work.path, name)))
    for part in plan.parts:
        made = make_folders(plan.path(os.path.join(work.path, "data"), part))
        with closing_descriptor(made) as inside:
            for name in os.listdir(inside):
                if name.startswith(TEMPORARY):
                    remove_entry(inside, name)
    if known != plan.key:
        text = json.dumps({"key": plan.key, "version": VERSION}).encode()
        write_whole_at(work.folder, _PLAN, lambda file: file.write(text))


def _write_shards(
    source: object, work: _PackFolder, plan: PackPlan, comm: Communicator, progress: Progress | None
) -> PackResult:
    """Write this rank's shards; return the totals of all ranks. Collective."""
    tasks = [(p, s) for p, part in enumerate(plan.parts) for s in range(part.shards)]
    mine = tasks[comm.rank :: comm.size]
    total = sum(int(plan.reader.sizes[part.samples].sum()) for part in plan.parts)
    kept = [task for task in mine if find_record(work.folder, *task) is not None]
    left = [task for task in mine if task not in kept]
    finished = sum(read_record(work.folder, task)["data_bytes"] for task in kept)
    workers = min(plan.options.workers, len(left)) if comm.size == 1 else 1
    if workers > 1 and isinstance(source, str):
        arguments = [(source, work.shown, work.token, plan.options, *task) for task in left]
        for count in in_processes(_write_in_worker, arguments, workers):
            finished += count
            if progress is not None:
                progress(finished, total)
    else:
        for part, shard in left:

            def report(count: int, before: int = finished) -> None:
                if progress is not None:
                    progress(before + count, total)

            finished += write_shard(work.folder, plan, part, shard, report)
    records = [read_record(work.folder, task) for task in mine]
    everyone = comm.allgather(
        [
            len(records),
            sum(record["data_bytes"] for record in records),
            sum(record["file_bytes"] for record in records),
            len(kept),
            sum(record["undecodable"] for record in records),
        ]
    )
    sums = (sum(column) for column in zip(*everyone, strict=True))
    shards, data_bytes, file_bytes, again, refused = sums
    return PackResult(len(plan.reader), data_bytes, shards, file_bytes, again, refused)


_plan_in_worker = functools.lru_cache(maxsize=1)(PackPlan)


def _write_in_worker(
    source: str, shown: str, token: str, options: PackOptions, part: int, shard: int
) -> int:
    with _opened(shown, token) as folder, shown_as(path_of(folder), shown):
        return write_shard(folder, _plan_in_worker(source, options), part, shard, lambda _: None)


def _publish(work: _PackFolder, destination: str, plan: PackPlan) -> None:
    """Open the packed data as a reader does, check its size and move it to the destination."""
    data = os.path.join(work.path, "data")
    for part in plan.parts:
        path = plan.path(data, part)
        packed = packed_path(path, plan.options.format)
        with contextlib.closing(open_reader(packed, trust=True)) as reader:
            if len(reader) != len(part.samples) or reader.schema != plan.schema:
                raise SourceError(f"{path} differs from the plan of the packing: pack it again")
    seal(work.folder, "data")
    if os.path.lexists(destination):
        raise UsageError(f"{destination} exists now: remove it, or name another destination")
    rename("data", os.path.basename(destination), work.folder, work.parent)
    os.fsync(work.parent)
    remove_marked(work.parent, work.name)


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


def summary(destination: str, done: PackResult) -> str:
    """Return the lines about the result of a packing."""
    refused = (
        f"\n{counted(done.undecodable, 'sample')} packed with an image that cannot be decoded: "
        f"`dlio verify {destination}` lists them"
        if done.undecodable
        else ""
    )
    kept = f", {done.kept_shards} of them by an earlier run" if done.kept_shards else ""
    return (
        f"{destination}: {counted(done.samples, 'sample')}, {format_bytes(done.data_bytes)} in "
        f"{counted(done.shards, 'shard')} of {format_bytes(done.file_bytes)} together{kept}, "
        "verified"
        f"{refused}"
    )
