"""A folder of checkpoints, each written in the background and published when complete.

    FOLDER/step-00000312/about.json     the run's state apart from tensors, as JSON
    FOLDER/step-00000312/.metadata ...  tensors and their checksums, in the format of
                                        torch.distributed.checkpoint

A checkpoint is written under a temporary name, and renamed when the files of all ranks are on disk.
A run that is killed at any time therefore leaves only complete checkpoints; the next run removes
the unfinished one. If a rank is lost meanwhile and the others go on, they complete the checkpoint
if the lost one had written its part, and remove it otherwise.
"""

import json
import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, cast

import numpy as np
import torch
import xxhash

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import wait_all
from dlio.comm.survival.membership import RankMessages, messages_of
from dlio.comm.survival.recovery import RecoveryPart, recovery_of, uniform
from dlio.comm.survival.reports import Report
from dlio.errors import PeerLost, SourceError, UsageError
from dlio.train.checkpoint.checkpoint_folder import CheckpointFolder
from dlio.train.checkpoint.host_copies import HostCopies
from dlio.train.checkpoint.rank_parts import agree, complete, has_part, write_part
from dlio.train.checkpoint.state import SavedState
from dlio.train.checkpoint.tensor_reader import (
    CONTENTS,
    cause_of,
    contents,
    read_small,
    read_tensors,
)
from dlio.train.report import CheckpointReport
from dlio.util.limits import parsing
from dlio.util.printable import print_line
from dlio.util.threads import Workers
from dlio.util.trusted_files import UntrustedFile
from dlio.util.units import counted
from dlio.util.whole_files import not_written, write_whole

_NAME: Final = re.compile(r"step-(\d{8,})")
_UNFINISHED: Final = ".unfinished-"
_ABOUT: Final = "about.json"
_SUMS: Final = "checksums"
_BOUND: Final = "parts_of_step"
"""Key of the step that the checksums of the ranks' parts are of, too; earlier versions lack it."""
_FORMAT: Final = 1
_WRITE_TIMEOUT_S: Final = 1800.0
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _PendingCheckpoint:
    """A checkpoint that is being written by all ranks of one generation."""

    hidden: str
    """Name while it is written."""
    name: str
    about: Mapping[str, object]
    rank: int
    ranks: int
    messages: RankMessages


@dataclass(frozen=True, slots=True)
class CheckpointStanding(Report):
    """The checkpoints of this run as a rank knows them, for ranks that join it."""

    pending: Mapping[str, object] | None
    """State of the one that is being written, apart from tensors; None if there is none."""
    last: int
    """Optimizer step of the newest one; -1 if there is none."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint(SavedState):
    """A complete checkpoint; in memory are the tensors that this rank has read to verify them."""

    names: frozenset[str]
    """Names of its tensors."""

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        wanted = [name for name in self.names if name.startswith(prefix)]
        tensors = {name: self.tensors[name] for name in wanted if name in self.tensors}
        tensors |= read_tensors(self.path, [name for name in wanted if name not in tensors])
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def whole(self) -> "StoredCheckpoint":
        """Read all tensors and compare their checksums; return the checkpoint with them.

        Raises SourceError.
        """
        return replace(self, tensors=_verified(self, 0, 1))


class Checkpoints(RecoveryPart[CheckpointStanding]):
    """The checkpoints of one run. Owns a lock, and a thread while a checkpoint is being written.

    The folder is made if missing. Checkpoints beyond the newest `keep` are removed after a new one
    is complete.

    Raises UsageError if the folder is not writable, or if another run writes to it.
    """

    def __init__(self, folder: str, comm: Communicator, keep: int = 2) -> None:
        self.folder, self._comm, self._keep = os.path.abspath(folder), comm, keep
        self._thread_comm = comm.dup()
        """For the thread's messages alone."""
        self._copies = HostCopies()
        self._writer: Workers | None = None
        self._unfinished: _PendingCheckpoint | None = None
        """Written by the thread; by those of other ranks if this one has joined since."""
        self.last = -1
        """Optimizer step of the newest checkpoint of this run; -1 if there is none."""
        self._outcome: str | None = None
        """Error of the unfinished one, empty if it was published; None if a loss interrupted it."""
        self._lock: int | None = None
        self._place = CheckpointFolder(self.folder)
        self.written: list[str] = []
        """Names of this run's checkpoints."""
        self.failures: list[str] = []
        """Errors of checkpoints that could not be written."""
        self._lacks_last = False
        self.wait_s = 0.0
        """Seconds that training has waited for copies, and for the previous checkpoint."""
        self._leads = False
        """True on the rank that publishes."""
        self._lead()
        if self._leads:
            for name in self._place.names():
                if name.startswith(_UNFINISHED):
                    self._place.remove(name)
        self._recovery = recovery_of(comm)
        if self._recovery is not None:
            self._recovery.register(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            # After an error on this rank the others may have ended, so do not wait long.
            self._writer.close(_WRITE_TIMEOUT_S if kind is None else 5.0)
        if self._recovery is not None:
            self._recovery.unregister(self)
        if kind is None:
            self._thread_comm.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if kind is None:  # After an error the thread may still use it.
            self._place.close()

    def report(self) -> CheckpointStanding:
        self.copied()  # Others may overwrite this rank's tensors next.
        pending = None if self._unfinished is None else self._unfinished.about
        return CheckpointStanding(pending, self.last)

    def adopt(self, report: CheckpointStanding) -> None:
        self.last, self._unfinished = report.last, None
        if report.pending is not None:
            # It has no part in it, but settles with the others how it ends.
            ranks = cast(int, report.pending["ranks"])
            self._unfinished = self._pending(report.pending, -1, ranks)

    def reconcile(self, reports: Sequence[CheckpointStanding], comm: Communicator) -> None:
        self._lead()

    def _lead(self) -> None:
        """Lock the folder if this rank publishes: the system has freed a lost rank's lock."""
        if self._comm.rank == 0 and not self._leads:
            self._leads, self._lock = True, self._place.lock()

    def sharing(self) -> str:
        """Return a sentence if the folder was that of another task of this job array."""
        return self._place.sharing()

    def paths(self) -> list[str]:
        """Paths of complete checkpoints, the newest first."""
        names = [name for name in self._place.names() if _NAME.fullmatch(name)]
        return [os.path.join(self.folder, name) for name in sorted(names, reverse=True)]

    def newest(self) -> StoredCheckpoint | None:
        """Return the newest intact checkpoint, or None. Collective.

        All ranks share in verifying it. Damaged ones are reported on standard error.
        """
        paths = self._comm.tell(self.paths() if self._comm.rank == 0 else [])
        if self._comm.rank == 0:
            for name in filter(_NAME.fullmatch, self._place.names(believed=False)):
                text = f"{os.path.join(self.folder, name)} is not a folder of this user's"
                print_line(f"dlio: {text}; {_next(bool(paths))}", sys.stderr)
        for path in paths:
            checkpoint, damage = None, ""
            try:
                with parsing(path):
                    checkpoint = open_checkpoint(path)
                    verified = _verified(checkpoint, self._comm.rank, self._comm.size)
                    checkpoint = replace(checkpoint, tensors=verified)
            except SourceError as error:
                damage = str(error)
            damages = [text for text in self._comm.allgather(damage) if text]
            if not damages:
                return checkpoint
            if self._comm.rank == 0:
                print_line(f"dlio: {damages[0]}; {_next(path != paths[-1])}", sys.stderr)
        return None

    def save(
        self,
        step: int,
        tensors: Tensors,
        about: Mapping[str, object],
        later: Collection[str] = (),
    ) -> None:
        """Begin to write a checkpoint of an optimizer step; return when `tensors` have been copied.
        Collective.

        Waits for the previous one first. If that one failed, its error goes to standard error and
        to `failures`, and the run continues.

        Tensors named `rank<number>/...` are this rank's own; those named `all/...` are equal on all
        ranks, which write them in shares. Those in `later` stay as they are until `copied` has been
        called, and are copied meanwhile. `about` is further state as JSON types; rank 0's is
        written.
        """
        if self._unfinished is not None:
            self.wait()
        began = time.perf_counter()
        self.last = step
        rank, ranks = self._comm.rank, self._comm.size
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self._copies.begin({name: tensors[name] for name in _written_by(sizes, rank, ranks)}, later)
        self.wait_s += time.perf_counter() - began
        whole = {**about, "format": _FORMAT, "step": step, "ranks": ranks, _BOUND: step}
        unfinished = self._unfinished = self._pending(whole, rank, ranks)
        self._outcome = None
        self._writer = Workers(
            "dlio-checkpoint",
            lambda _: self._write(unfinished),
            stop_timeout_s=_WRITE_TIMEOUT_S,
        ).start()

    def _pending(self, about: Mapping[str, object], rank: int, ranks: int) -> _PendingCheckpoint:
        number = f"{about['step']:08d}"
        return _PendingCheckpoint(
            hidden=f"{_UNFINISHED}{number}",
            name=f"step-{number}",
            about=about,
            rank=rank,
            ranks=ranks,
            messages=messages_of(self._thread_comm),
        )

    def copied(self) -> None:
        """Wait until the tensors of the checkpoint in progress are copied, and may be changed.

        Raises UsageError if that takes longer than 30 minutes.
        """
        began = time.perf_counter()
        if not self._copies.wait(_WRITE_TIMEOUT_S):
            raise UsageError(
                f"{self.folder}: copying the state of a checkpoint took over "
                f"{_WRITE_TIMEOUT_S:.0f} s: check that the machine has free memory"
            )
        self.wait_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete or has failed. Collective.

        Raises UsageError if that takes longer than 30 minutes.
        """
        if self._recovery is not None:
            # A rank may have made a step whose sums another is only given after a loss, and both
            # may come here in different generations: each would wait for the other's parts.
            self._recovery.uniform(lambda: None)
        if self._unfinished is None:
            return
        began = time.perf_counter()
        if self._writer is not None and not self._writer.wait(_WRITE_TIMEOUT_S):
            raise UsageError(
                f"{self.folder}: writing a checkpoint took over {_WRITE_TIMEOUT_S:.0f} s: check "
                "that the file system responds"
            )
        unfinished, self._writer, self._unfinished = self._unfinished, None, None
        error = self._outcome
        if self._recovery is not None:
            error = uniform(self._comm, lambda: self._settled(unfinished))
        self._lacks_last = bool(error)
        if error:
            self.failures.append(f"no checkpoint: {error}")
            if self._comm.rank == 0:
                sys.stderr.write(f"dlio: no checkpoint: {error}\n")
        else:
            self.written.append(unfinished.name)
        self.wait_s += time.perf_counter() - began

    def statistics(self) -> CheckpointReport:
        """Figures of this run on this rank."""
        return {
            "written": self.written,
            "failures": self.failures,
            "lacks_last": self._lacks_last,
            "wait_s": self.wait_s,
        }

    def _write(self, unfinished: _PendingCheckpoint) -> None:
        """Write and publish the staged tensors; runs in the thread. Keeps the error for `wait`."""
        error = ""
        try:
            self._copies.finish()
            staged = self._copies.held
            checksum = _checksum(staged, unfinished.about[_BOUND])
            with self._place.unfinished(unfinished.hidden) as path:
                write_part(path, unfinished.rank, {**staged, _sum_name(unfinished.rank): checksum})
        except BaseException as raised:
            error = self._reason(raised)
            if unfinished.ranks > 1:
                error = f"rank {unfinished.rank}: {error}"

        def wait(requests: Sequence[Request]) -> None:
            who = f"rank {unfinished.rank} of {unfinished.ranks}"
            wait_all(requests, "the parts of a checkpoint", _WRITE_TIMEOUT_S, who)

        try:
            self._outcome = agree(
                unfinished.messages,
                unfinished.rank,
                unfinished.ranks,
                error,
                lambda: self._published(unfinished),
                wait,
            )
            if unfinished.rank == 0 and self._outcome and self._place.is_held():
                self._place.remove(unfinished.hidden)
        except PeerLost:
            pass  # Those that are left settle in `wait` how it ends.
        except BaseException as raised:
            self._outcome = self._reason(raised)

    def _reason(self, error: BaseException) -> str:
        """Return the reason for a checkpoint that is not written."""
        if isinstance(error, OSError) and error.errno and not isinstance(error, UntrustedFile):
            return not_written(self.folder, error)
        return cause_of(error)

    def _settled(self, unfinished: _PendingCheckpoint) -> str:
        """Return the error of a checkpoint that all ranks that are left have done with, or nothing.

        Collective. If none of them knows how it ended, it is published if all parts are there.
        """
        known = [each for each in self._comm.allgather(self._outcome) if each is not None]
        error = known[0] if known else ""
        if self._comm.rank == 0:
            if not known:
                error = self._finished(unfinished)
            if error:
                self._place.remove(unfinished.hidden)
        return self._comm.tell(error)

    def _finished(self, unfinished: _PendingCheckpoint) -> str:
        """Publish a checkpoint that a loss has interrupted; return the error, or nothing."""
        hidden = unfinished.hidden
        if not self._place.exists(hidden):  # The lost rank has done it.
            published = self._place.exists(unfinished.name)
            return "" if published else "a rank was lost while it was removed"
        with self._place.unfinished(hidden) as path:
            for rank in range(unfinished.ranks):
                if not has_part(path, rank):
                    return f"rank {rank} was lost before it had written its part"
        return self._published(unfinished)

    def _published(self, unfinished: _PendingCheckpoint) -> str:
        """Complete a checkpoint of which all parts are there; return the error, or nothing."""
        try:
            with self._place.unfinished(unfinished.hidden) as path:
                complete(path, unfinished.ranks)
                about = json.loads(json.dumps(unfinished.about))  # As it will be read.
                text = json.dumps({**about, _SUMS: _sums(path, about)}, indent=2).encode()
                write_whole(os.path.join(path, _ABOUT), lambda file: file.write(text))
            self._place.publish(unfinished.hidden, unfinished.name)
            # Newer ones are damaged: this run would have gone on from them.
            names = [os.path.basename(path) for path in self.paths()]
            for old in [name for name in names if name <= unfinished.name][self._keep :]:
                self._place.hide(old, f"{_UNFINISHED}{old}")
        except Exception as error:
            return self._reason(error)
        return ""


def without_last(written: Sequence[str]) -> str:
    """Return the words about a last checkpoint that failed; `written` are those of the run."""
    older = "--resume goes on from an older one" if written else "this run has written none"
    return f"the last checkpoint was not written; {older}"


def _next(has_older: bool) -> str:
    """Return the words on how a run goes on without a checkpoint that it cannot use."""
    return "trying an older checkpoint" if has_older else "none is left: training begins anew"


def open_checkpoint(path: str) -> StoredCheckpoint:
    """Open a checkpoint. Raises SourceError if it is incomplete or of another format."""
    try:
        about = json.loads(read_small(path, _ABOUT))
        sums = about.pop(_SUMS, None)
        if about["format"] != _FORMAT:
            raise SourceError(f"{path}: has format {about['format']}; this version reads {_FORMAT}")
        # Checkpoints of earlier versions have no checksums here.
        if sums is not None and sums != _sums(path, about):
            raise SourceError(f"{path}: the checkpoint is damaged: a checksum differs")
        ranks = about["ranks"]
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"{ranks!r} is not a number of ranks")
    except SourceError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path}: not a complete checkpoint: {error}") from error
    names = frozenset(contents(path))
    if ranks > len(names):
        raise SourceError(
            f"{path}: the checkpoint lacks the tensors of most of its {counted(ranks, 'rank')}"
        )
    return StoredCheckpoint(path, ranks, about, names)


def _sums(path: str, about: Mapping[str, object]) -> dict[str, str]:
    """Return the checksums of a checkpoint's state and of its table of contents.

    Raises OSError, ValueError.
    """
    text = json.dumps(about, sort_keys=True).encode()
    table = read_small(path, CONTENTS)
    return {"about": xxhash.xxh3_64_hexdigest(text), "contents": xxhash.xxh3_64_hexdigest(table)}


def _verified(checkpoint: StoredCheckpoint, rank: int, ranks: int) -> Tensors:
    """Return tensors whose checksums are right, of the saved ranks that this rank verifies.

    Raises SourceError for a damaged one.
    """
    whole: dict[str, torch.Tensor] = {}
    path, saved_ranks = checkpoint.path, checkpoint.ranks
    sizes = {name: entry.size.numel() for name, entry in contents(path).items()}
    for saved in range(rank, saved_ranks, ranks):
        name = _sum_name(saved)
        if name not in checkpoint.names:
            raise SourceError(f"{path}: the checkpoint lacks the tensors of rank {saved}")
        names = _written_by(sizes, saved, saved_ranks)
        tensors = read_tensors(path, [*names, name])
        # A part of an older checkpoint is whole in itself.
        if not torch.equal(tensors.pop(name), _checksum(tensors, checkpoint.about.get(_BOUND))):
            raise SourceError(f"{path}: the checkpoint is damaged: its checksum differs")
        whole |= tensors
    return whole


def _written_by(sizes: Mapping[str, int], rank: int, ranks: int) -> set[str]:
    """Names of the tensors that a rank writes, of all with their numbers of entries: its own ones,
    and its share of the common ones."""
    shared = sorted((n for n in sizes if n.startswith("all/")), key=lambda n: (-sizes[n], n))
    loads = [0] * ranks
    mine = {name for name in sizes if name.startswith(f"rank{rank}/")}
    for name in shared:
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1
        if least == rank:
            mine.add(name)
    return mine


def _checksum(tensors: Tensors, step: object) -> torch.Tensor:
    """XXH3 checksum of a step, unless it is None, and of names and bytes; int64 (1,)."""
    digest = xxhash.xxh3_64(b"" if step is None else f"step {step}\n".encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        flat = tensors[name].contiguous().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return torch.tensor([np.uint64(digest.intdigest()).astype(np.int64)])


def _sum_name(rank: int) -> str:
    return f"checksum/rank{rank}"
