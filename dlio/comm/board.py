"""A board of what each rank of a node does, which the others read without its help.

Each rank has one row in memory of its own, and writes into it where it begins a step, and where it
waits for other ranks. Others of the node open the memory through /proc, so that it needs no name
and goes with the rank. A row takes 400 bytes, and a step two writes of a few bytes.

    UNWATCHED --- computing() --> COMPUTING --- blocked() --> BLOCKED
        ^                            |   <--- it ends -----------+
        +--------- it ends ----------+

UNWATCHED is all that has a deadline of its own, or may take any time: waiting for the source,
evaluating, writing a checkpoint (`off_the_record()`). A rank there is never suspected.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

WINDOW: Final = 20
"""Steps whose times a row holds."""
_NOW: Final = struct.Struct("dqq")
"""Since when, phase, number of the step; the time first, so that a reader in between takes none of
them for older than it is."""
_ALIVE: Final = struct.Struct("dq")
"""Time of the last beat, and the thread that beats."""
_STEP: Final = struct.Struct("dd")
"""Seconds of a step, and those of them that the rank did not wait for others."""
_BEATS_AT: Final = _NOW.size
_STEPS_AT: Final = _BEATS_AT + _ALIVE.size
_SIZE: Final = _STEPS_AT + WINDOW * _STEP.size


class RankPhase(IntEnum):
    """Occupation of a rank."""

    UNWATCHED = 0
    COMPUTING = 1
    BLOCKED = 2
    """It waits for other ranks."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """The row of a rank; times are the machine's monotonic ones."""

    step: int
    """Number of steps that it has begun."""
    phase: RankPhase
    since: float
    """Time when the phase began."""
    beat: float
    """Time when a thread of the rank last ran."""
    thread: int
    """The kernel's number of that thread."""
    seconds: tuple[float, ...]
    """Time of each of its last steps, up to `WINDOW`."""
    busy: tuple[float, ...]
    """Time in each of these that it did not wait for others."""


class Board:
    """The row of this rank. `blocked` and `off_the_record` may nest.

    `beat` may be called by another thread than the rest.
    """

    def __init__(self) -> None:
        # Memory without a name goes with the process; a killed rank would leave a file in /dev/shm.
        self.file = os.memfd_create("dlio-board")
        """Descriptor through which other processes of this user read the row."""
        os.ftruncate(self.file, _SIZE)
        self._row = mmap.mmap(self.file, _SIZE)
        self._step, self.phase, self._since = 0, RankPhase.UNWATCHED, time.monotonic()
        self._begun = self._since
        self._busy = 0.0
        self.beat()
        self.enter(RankPhase.UNWATCHED)

    def beat(self) -> None:
        """Note that a thread of this rank runs."""
        _ALIVE.pack_into(self._row, _BEATS_AT, time.monotonic(), threading.get_native_id())

    def begin_step(self) -> None:
        """Note that this rank computes the next step."""
        self._step += 1
        self.enter(RankPhase.COMPUTING)
        self._begun, self._busy = self._since, 0.0

    def end_step(self) -> None:
        """Note that this rank has computed the step, if it has begun one."""
        begun = self.phase is RankPhase.COMPUTING
        self.enter(RankPhase.UNWATCHED)
        if begun:
            at = _STEPS_AT + (self._step - 1) % WINDOW * _STEP.size
            _STEP.pack_into(self._row, at, self._since - self._begun, self._busy)

    def enter(self, phase: RankPhase) -> RankPhase:
        """Begin a phase; returns the one before."""
        before, now = self.phase, time.monotonic()
        if before is RankPhase.COMPUTING:
            self._busy += now - self._since
        self.phase, self._since = phase, now
        # Without a lock: a reader that meets a half-written row looks again before it suspects
        # anybody.
        _NOW.pack_into(self._row, 0, now, phase, self._step)
        return before


class BoardReader:
    """Reads the row of a rank of this machine, from its process and its `Board.file`. Closed by its
    owner.
    """

    def __init__(self, process: int, file: int) -> None:
        self._file = -1
        # A rank that has ended, or has another user, has no row; then nobody is suspected.
        with suppress(OSError):
            self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> RankRow | None:
        """Return the row; None if there is none."""
        # Read and not mapped: one call takes the row as it is at one moment, or nearly so.
        row = os.pread(self._file, _SIZE, 0) if self._file >= 0 else b""
        if len(row) != _SIZE:
            return None
        since, phase, step = _NOW.unpack_from(row)
        beat, thread = _ALIVE.unpack_from(row, _BEATS_AT)
        times = list(_STEP.iter_unpack(row[_STEPS_AT:]))
        # A slot is filled when its step has ended.
        filled = [each for each in times if each[0] > 0]
        seconds, busy = (tuple(each[k] for each in filled) for k in range(2))
        return RankRow(step, RankPhase(phase), since, beat, thread, seconds, busy)

    def close(self) -> None:
        """Forget the row."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


_board: Board | None = None


def open_board() -> Board:
    """Return the row of this process; from now on the functions of this module write into it."""
    global _board
    if _board is None:
        _board = Board()
    return _board


def _forget() -> None:
    global _board
    _board = None  # The row is the parent's.


os.register_at_fork(after_in_child=_forget)


@contextmanager
def computing() -> Iterator[None]:
    """Note that this rank computes a step inside the `with` block."""
    if (board := _board) is None:
        yield
        return
    board.begin_step()
    try:
        yield
    finally:
        board.end_step()


def end_step() -> None:
    """Note that this rank does something else in the midst of a step, and until the next one."""
    if _board is not None:
        _board.end_step()


@contextmanager
def blocked(any_thread: bool = False) -> Iterator[None]:
    """Note that this rank waits for others inside the `with` block.

    Other threads than the main one say so with `any_thread` alone, if that one waits for them.
    """
    board = _board
    # A background thread that waits says nothing about the rank: the main thread may compute, and
    # a rank that is taken to be blocked is never suspected of hanging.
    is_main = any_thread or threading.current_thread() is threading.main_thread()
    if board is None or board.phase is RankPhase.BLOCKED or not is_main:
        yield
        return
    with _phase(RankPhase.BLOCKED):
        yield


@contextmanager
def off_the_record() -> Iterator[None]:
    """Note that the `with` block may take any time: this rank is not suspected there."""
    with _phase(RankPhase.UNWATCHED):
        yield


@contextmanager
def _phase(phase: RankPhase) -> Iterator[None]:
    board = _board
    if board is None:
        yield
        return
    before = board.enter(phase)
    try:
        yield
    finally:
        board.enter(before)
