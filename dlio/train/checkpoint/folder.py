"""A folder of checkpoints: one is written while training goes on, and appears when it is whole.

    FOLDER/step-00000312/about.json     what it is of, and a checksum of each rank's tensors
    FOLDER/step-00000312/.metadata ...  tensors, as torch.distributed.checkpoint writes them

A checkpoint is written under another name and renamed when all ranks' files are on the disk, so a
run that is killed at any time leaves whole ones; what it was writing, the next run removes.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from dlio.comm import Communicator
from dlio.comm.environment import under_mpi
from dlio.errors import SourceError, UsageError
from dlio.train.checkpoint.reader import contents, quiet, read_tensors
from dlio.util.files import take_lock, unwritable, write_json
from dlio.util.threads import Workers

_NAME: Final = re.compile(r"step-(\d{8,})")
_UNFINISHED: Final = ".unfinished-"
_LOCK: Final = ".lock"
_FORMAT: Final = 1
_WRITE_TIMEOUT_S: Final = 1800.0
_LOCK_TIMEOUT_S: Final = 2.0
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A whole checkpoint."""

    path: str
    about: dict[str, Any]
    """As `save` was given it."""
    names: frozenset[str]
    """Of its tensors."""

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors whose names begin so, without it. Raises SourceError."""
        found = read_tensors(self.path, [name for name in self.names if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


class Checkpoints:
    """One run's folder. Owns a thread while a checkpoint is being written, and a lock.

    Args:
        keep: how many stay; older ones are removed when another one is whole.

    Raises UsageError when the folder cannot be written, or another run writes to it.
    """

    def __init__(self, folder: str, comm: Communicator, keep: int = 2) -> None:
        self.folder, self._comm, self._keep = os.path.abspath(folder), comm, keep
        self._group: Any = None
        self._staged: dict[str, torch.Tensor] = {}
        self._writer: Workers | None = None
        self._failed: BaseException | None = None
        self._lock: int | None = None
        self.written: list[str] = []
        """Names of this run's checkpoints, on rank 0."""
        self.failures: list[str] = []
        self.wait_s = 0.0
        """Seconds that training has waited: for copies, and for the last checkpoint to be done."""
        if comm.rank == 0:
            self._lock = _lock(self.folder)
            for name in os.listdir(self.folder):
                if name.startswith(_UNFINISHED):
                    shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            # After an error of this rank's others may be gone: not waited for long.
            self._writer.close(_WRITE_TIMEOUT_S if kind is None else 5.0)
        if kind is None and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def paths(self) -> list[str]:
        """Paths of whole checkpoints, the newest first."""
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in os.listdir(self.folder) if _NAME.fullmatch(name)]
            return [os.path.join(self.folder, name) for name in sorted(names, reverse=True)]
        return []

    def newest(self) -> StoredCheckpoint | None:
        """The newest one that is not damaged, checked by all ranks; damaged ones are told of on
        standard error. Collective."""
        paths = self._comm.tell(self.paths() if self._comm.rank == 0 else [])
        for path in paths:
            found, wrong = None, ""
            try:
                found = open_checkpoint(path)
                _verify(found, self._comm.rank, self._comm.size)
            except SourceError as error:
                wrong = str(error)
            said = [text for text in self._comm.allgather(wrong) if text]
            if not said:
                return found
            if self._comm.rank == 0:
                sys.stderr.write(f"dlio: {said[0]}; an older checkpoint is taken\n")
        return None

    def save(self, step: int, tensors: Tensors, about: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; returns when `tensors` have been copied. Collective.

        Waits for the one before. That one cannot be written is told on standard error and in
        `failures`, and the run goes on.

        Args:
            tensors: of this rank, named `rank<its number>/...`; or `all/...`, which all ranks have
                alike, and share the writing of.
            about: of JSON's types; rank 0's is kept.
        """
        began = time.perf_counter()
        self.wait()
        self._join_group()
        self._stage(tensors)
        self.wait_s += time.perf_counter() - began
        known = {**about, "format": _FORMAT, "step": step, "ranks": self._comm.size}
        self._writer = Workers(
            "dlio-checkpoint",
            lambda _: self._write(step, known),
            stop_timeout_s=_WRITE_TIMEOUT_S,
        ).start()

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole, or has failed."""
        if self._writer is None:
            return
        if not self._writer.wait(_WRITE_TIMEOUT_S):
            raise UsageError(
                f"{self.folder}: a checkpoint has not been written in {_WRITE_TIMEOUT_S:.0f} s: "
                "does the file system answer?"
            )
        self._writer = None
        if self._failed is not None:
            text = f"no checkpoint: {_first_line(self._failed)}"
            self._failed = None
            self.failures.append(text)
            if self._comm.rank == 0:
                sys.stderr.write(f"dlio: {text}\n")

    def statistics(self) -> dict[str, Any]:
        """Of this run and rank: names `written`, `failures` in words, `wait_s` seconds waited."""
        return {"written": self.written, "failures": self.failures, "wait_s": self.wait_s}

    def _write(self, step: int, about: dict[str, Any]) -> None:
        """In the thread: what can fail, fails here."""
        hidden = os.path.join(self.folder, f"{_UNFINISHED}{step:08d}")
        try:
            tensors = {**self._staged, _sum_name(self._comm.rank): _checksum(self._staged)}
            writer = FileSystemWriter(hidden, sync_files=True, overwrite=True)
            alone = self._group is None
            quiet()
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=alone)
            if self._comm.rank == 0:
                write_json(os.path.join(hidden, "about.json"), about)
                self._publish(hidden, f"step-{step:08d}")
        except BaseException as error:
            self._failed = error
            if self._comm.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)

    def _publish(self, hidden: str, name: str) -> None:
        path = os.path.join(self.folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path)  # Of a run that went on from an older one.
        _sync(hidden)
        os.rename(hidden, path)
        _sync(self.folder)
        self.written.append(name)
        for old in self.paths()[self._keep :]:
            # Not there any more, before it is not whole any more.
            doomed = os.path.join(self.folder, f"{_UNFINISHED}{os.path.basename(old)}")
            os.rename(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _stage(self, tensors: Tensors) -> None:
        """Copy what this rank writes to the host, into the same memory each time."""
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        mine = _written_by(sizes, self._comm.rank, self._comm.size)
        for name in self._staged.keys() - mine:
            del self._staged[name]
        for name in mine:
            tensor = tensors[name]
            held = self._staged.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = self._staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            held.copy_(tensor.detach())

    def _join_group(self) -> None:
        """The process group that torch's writer coordinates with. Collective, once."""
        if self._comm.size == 1 or self._group is not None:
            return
        if dist.is_initialized():
            # Not the default one: its messages are the script's.
            backend = None if under_mpi() and dist.get_backend() == "dlio-mpi" else "gloo"
            self._group = dist.new_group(backend=backend)
            return
        from dlio.comm.process_group import init_process_group

        init_process_group()
        self._group = dist.group.WORLD


def open_checkpoint(path: str) -> StoredCheckpoint:
    """Raises SourceError when it is none, or not whole."""
    try:
        with open(os.path.join(path, "about.json"), encoding="utf-8") as file:
            about = json.load(file)
        if about["format"] != _FORMAT:
            raise SourceError(f"{path}: of format {about['format']}; this version reads {_FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}: is no whole checkpoint: {error}") from error
    return StoredCheckpoint(path, about, frozenset(contents(path)))


def _verify(found: StoredCheckpoint, rank: int, ranks: int) -> None:
    """Compare the checksums of what was some rank's; ranks share in it. Raises SourceError."""
    sizes = {name: entry.size.numel() for name, entry in contents(found.path).items()}
    for saved in range(rank, int(found.about["ranks"]), ranks):
        name = _sum_name(saved)
        if name not in found.names:
            raise SourceError(f"{found.path}: the checkpoint has nothing of rank {saved}")
        names = _written_by(sizes, saved, int(found.about["ranks"]))
        tensors = read_tensors(found.path, [*names, name])
        if not torch.equal(tensors.pop(name), _checksum(tensors)):
            raise SourceError(f"{found.path}: the checkpoint is damaged: its checksum differs")


def _written_by(sizes: Mapping[str, int], rank: int, ranks: int) -> set[str]:
    """Names of the tensors that a rank writes: its own, and its part of what all have.

    Args:
        sizes: numbers of entries, by name.
    """
    shared = sorted((n for n in sizes if n.startswith("all/")), key=lambda n: (-sizes[n], n))
    loads = [0] * ranks
    mine = {name for name in sizes if name.startswith(f"rank{rank}/")}
    for name in shared:
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1
        if least == rank:
            mine.add(name)
    return mine


def _checksum(tensors: Tensors) -> torch.Tensor:
    """Of names and bytes; int64 (1,)."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        flat = tensors[name].contiguous().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return torch.tensor([np.uint64(digest.intdigest()).astype(np.int64)])


def _sum_name(rank: int) -> str:
    return f"checksum/rank{rank}"


def _lock(folder: str) -> int | None:
    """Make the folder, and keep other runs out; None where the file system has no locks."""
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(f"--checkpoint {folder}", error) from error
    try:
        # A run that was killed a moment ago may not have let go yet.
        free = take_lock(lock, fcntl.LOCK_EX, _LOCK_TIMEOUT_S)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            return None
        raise
    if not free:
        who = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        raise UsageError(
            f"--checkpoint {folder}: another run ({who}) writes there; wait for it, or name "
            "another folder"
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """torch wraps what happened on each rank; the cause is what a user can act on."""
    causes = getattr(error, "failures", None)
    if causes:
        rank, wrapped = next(iter(causes.items()))
        error = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {error}"
    return f"{error}".strip().splitlines()[0] if f"{error}".strip() else type(error).__name__
