"""Ranks that are stopped, hang or are slow: they are killed, or named.

MPI tells of a rank that has died, and never of one that is stopped (SIGSTOP, a frozen container) or
hangs: the others would wait for it until their deadline. Its state is in /proc and its progress on
its board, so no message is needed. A rank that a debugger stops has another state and is left
alone. `dlio.comm.survival.suspicion` decides who hangs.
"""

import ctypes
import faulthandler
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dlio.comm.board import Board, BoardReader, RankRow
from dlio.comm.survival.suspicion import RankView, SlowRanks, hung_ranks
from dlio.util.child_processes import STOPPED_S, is_stopped, process_state
from dlio.util.printable import log_warning
from dlio.util.settings import settings
from dlio.util.threads import Workers

_POLL_S: Final = 0.25
_ON_DUTY_S: Final = 5.0
"""Age of a rank's last beat up to which it is taken to watch the others."""
_DUMP_S: Final = 0.5
"""Time for a rank to write its stacks."""
_STDERR: Final = 2
_STACKS: Final = signal.SIGRTMAX - 3
"""Signal that makes a rank write its stacks."""


@dataclass(slots=True)
class WatchPolicy:
    """Rules for ranks that hang or are slow."""

    hang_after_s: float | None
    """See `dlio.comm.survival.suspicion.hung_ranks`."""
    evicts_slow: bool = False
    """Kill ranks that are slow."""
    compared: frozenset[int] = frozenset()
    """Members whose speeds are compared; set by the watch."""


_policy: WatchPolicy | None = None


def watch_policy() -> WatchPolicy:
    """Return the policy of this process's watch, as DLIO_HANG_AFTER has it. It may be changed, on
    all ranks alike."""
    global _policy
    if _policy is None:
        _policy = WatchPolicy(settings().hang_after_s or math.inf)
    return _policy


class NodeWatch:
    """A thread that kills ranks of this machine when they are stopped or hang. Closed by its owner.

    `processes` of the ranks of this machine, and the `files` of their rows, are by member. Of the
    `members` of this generation, the lowest one of this machine that lives and beats watches all.
    Those that `trains` does not return are spares. Without a `board`, this rank's row, it watches
    only for ranks that are stopped.
    """

    def __init__(
        self,
        processes: Mapping[int, int],
        me: int,
        members: Callable[[], tuple[int, ...]],
        board: Board | None = None,
        files: Mapping[int, int] | None = None,
        trains: Callable[[], tuple[int, ...]] | None = None,
    ) -> None:
        self._processes, self._me, self._members = dict(processes), me, members
        self._trains = trains or members
        self._board, self._files = board, dict(files or {})
        self._readers: dict[int, BoardReader] = {}
        self._since: dict[int, float] = {}
        self._slow = SlowRanks()
        self._suspected: set[tuple[int, float]] = set()
        """Ranks that were seen to hang at the last look, and since when they do what they do."""
        self._condemned: set[int] = set()
        self._watching_since = time.monotonic()
        self._workers = Workers("dlio-node-watch", self._run, serves_others=True)
        if len(self._processes) > 1:
            if board is not None:
                watch_policy().compared = frozenset(self._processes)
                faulthandler.register(_STACKS, _STDERR, all_threads=True)
            self._workers.start()

    def close(self) -> None:
        """End the thread."""
        self._workers.close()
        for reader in self._readers.values():
            reader.close()

    def _run(self, _: int) -> None:
        last = time.monotonic()
        if self._board is not None:
            self._board.beat()  # Stacks are asked of this thread.
        while not self._workers.stopping.wait(_POLL_S):
            now = time.monotonic()
            if self._board is not None:
                self._board.beat()
            # The clock goes on while a process is stopped: times of others would look long.
            if now - last > STOPPED_S:
                # This rank was stopped itself, perhaps with all others.
                self._since.clear()
                self._watching_since = now
            last = now
            here = [member for member in self._members() if member in self._processes]
            if self._is_on_duty(here, now):
                for member in here:
                    if member != self._me:
                        self._look_for_a_stop(member, now)
                if self._board is not None:
                    trains = self._trains()
                    self._look_for_hangs([each for each in here if each in trains], now)

    def _is_on_duty(self, here: list[int], now: float) -> bool:
        """True if no lower rank watches."""
        # One watcher per node, so that a line about a hung rank appears once; the next takes over
        # where the lowest rank is the one that hangs.
        lower = here[: here.index(self._me)] if self._me in here else here
        # A generation lasts until all survivors have met: some of it may be dead.
        return not any(
            process_state(self._processes[member]) not in "TZX" and not self._is_silent(member, now)
            for member in lower
        )

    def _is_silent(self, member: int, now: float) -> bool:
        row = self._row(member)
        return row is not None and now - row.beat > _ON_DUTY_S

    def _row(self, member: int) -> RankRow | None:
        if member not in self._files:
            return None
        if member not in self._readers:
            self._readers[member] = BoardReader(self._processes[member], self._files[member])
        return self._readers[member].read()

    def _look_for_a_stop(self, member: int, now: float) -> None:
        process = self._processes[member]
        # State T, and not t: a rank that a debugger holds is in the latter.
        if not is_stopped(process):
            self._since.pop(member, None)
        elif now - self._since.setdefault(member, now) >= STOPPED_S:
            _kill(process)

    def _look_for_hangs(self, here: list[int], now: float) -> None:
        seen = {
            member: RankView(process_state(self._processes[member]), self._row(member))
            for member in here
        }
        policy = watch_policy()
        before, self._suspected = self._suspected, set()
        for each in hung_ranks(seen, now, self._watching_since, policy.hang_after_s):
            row = seen[each.member].row
            assert row is not None
            self._suspected.add((each.member, row.since))
            if (each.member, row.since) in before:  # A row may have been read half written.
                who = f"rank {each.member} (process {self._processes[each.member]})"
                self._end(each.member, row, f"{who} hangs and is killed: {each.why}")
        rows = {member: each.row for member, each in seen.items() if each.row is not None}
        for member, times in self._slow.look(rows):
            what = f"rank {member} (process {self._processes[member]}) computes {times:.0f} times"
            what += " slower than the others of its node"
            if policy.evicts_slow and len(self._members()) > (settings().min_ranks or 1):
                self._end(member, None, f"{what}: --evict-slow kills it")
            else:
                log_warning("%s", what)

    def _end(self, member: int, row: RankRow | None, why: str) -> None:
        """Kill a rank, this one perhaps, after it has written its stacks."""
        if member in self._condemned:
            return
        self._condemned.add(member)
        log_warning("%s", why)
        if row is not None:
            # To the thread that beats: the main one may be unable to take a signal.
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).tgkill(self._processes[member], row.thread, int(_STACKS))
            # SIGKILL cannot wait for the stacks, which are all that a user gets to find the fault.
            time.sleep(_DUMP_S)
        _kill(self._processes[member])


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
