"""Output of ranks, or of the mpirun that starts them, and the filter of its errors."""

import os
import re
import sys
import threading
from typing import IO

from dlio.launch.rank_failures import failures_in, lines_of, told_by_mpirun
from dlio.util.closable import Closable
from dlio.util.live_line import LiveLine
from dlio.util.signals import NOTHING_SAVED, RESUME_CODE, EndOrder
from dlio.util.threads import Workers

_END_TIMEOUT_S = 10.0
_RULE = "-" * 20
_RULE_AT_END = re.compile(f"^({_RULE}-*)|({_RULE}-*)$")
_ERROR = "dlio: error:"
_NOT_STARTED = "PMIx server's listener thread failed to start"
"""Message of mpirun if a network interface disappeared while mpirun listed them. No rank has been
started then, so mpirun can be started again."""
_NODE_LOST = "PRTE has lost communication with a remote daemon"
_CRASH = "ompi_comm_revoke_local"
"""Where Open MPI 5.0 crashes if it learns of a loss while ranks make a communicator: it ends the
collectives of one that has none yet (`c_coll` is NULL until `mca_coll_base_comm_select`)."""
_NOISE = ("NBC_Progress", "Error in NBC_Start_round", "plm:ssh: Warning: setpgid")
"""Beginnings of the lines that Open MPI prints about sums that a loss has interrupted."""
_LIMITS = re.compile(r"PMIX_ERR_SYS_LIMITS_(PIPES|FILES|SOCKETS|CHILDREN)")
_BANNERS = (
    "MPI_ABORT was invoked",
    "has exited due to process rank",
    "exited with non-zero status",
    "exiting without calling",
    "noticed that process rank",
)


class RankOutput(Closable):
    """Output of processes, by whole lines: captured unchanged, or passed on at once, standard error
    through a filter.

    Without `capture`, standard output is read only if a live line is to stay below it.
    """

    def __init__(
        self, processes: int, live: LiveLine, sorter: "ErrorFilter", capture: bool = False
    ) -> None:
        self.live, self.sorter = live, sorter
        self._capture = capture
        self._lock = threading.Lock()
        self._lines: tuple[list[str], list[str]] = ([], [])
        self._streams: list[tuple[int, IO[str]]] = []
        self.pipes: list[tuple[int | None, int]] = []
        """Descriptors of each process's standard output and error; None for this process's."""
        for _ in range(processes):
            output = self._pipe(0) if capture or live.shown else None
            self.pipes.append((output, self._pipe(1)))
        self._relay = Workers(
            "dlio-output", self._read, len(self._streams), stop_timeout_s=_END_TIMEOUT_S
        )

    @property
    def text(self) -> str | None:
        """Standard output of all processes, if it is captured."""
        return "".join(self._lines[0]) if self._capture else None

    @property
    def errors(self) -> str | None:
        """Standard error of all processes, if it is captured."""
        return "".join(self._lines[1]) if self._capture else None

    def start(self) -> None:
        """Begin to read, once processes hold the pipes: a process's end is the end of its pipes."""
        for pair in self.pipes:
            for pipe in pair:
                if pipe is not None:
                    os.close(pipe)
        self.pipes.clear()
        self._relay.start()

    def close(self) -> None:
        """Read to the end, unless a process that outlives the others holds a pipe."""
        if self.pipes:
            self.start()
        self._relay.close()
        left = self.sorter.end()
        if not self._capture:
            self.live.write(sys.stderr, left)

    def as_told(self, code: int, order: EndOrder) -> int:
        """Return the exit code of ranks, as of those that listened if they were told to end before
        they did: this is said, as their code is that of a signal then."""
        if not order.explains(code):
            return code
        if code != RESUME_CODE:
            with self._lock:
                self._pass_on(1, NOTHING_SAVED)
        self.sorter.interrupted = True
        return RESUME_CODE

    def _pipe(self, number: int) -> int:
        end, pipe = os.pipe()
        self._streams.append((number, os.fdopen(end, encoding="utf-8", errors="replace")))
        return pipe

    def _read(self, thread: int) -> None:
        number, stream = self._streams[thread]
        with stream:
            for line in stream:
                with self._lock:
                    self._pass_on(number, line)

    def _pass_on(self, number: int, line: str) -> None:
        shown = self.sorter.feed(line) if number else []
        if self._capture:
            self._lines[number].append(line)
        elif number == 0:
            self.live.feed(line)
        elif shown:
            self.live.write(sys.stderr, shown)


class ErrorFilter:
    """Filters the standard error of ranks and mpirun, line by line.

    An error that several ranks report is shown once, and so is that they have nothing to save. Open
    MPI's banners about an aborted rank are held back until the end, and shown only if no rank has
    reported an error itself. With `again`
    mpirun will be started again if it did not start its ranks. With `survives` ranks go on when
    others are lost, and say so themselves.

    The cause of the end comes last: as ranks have left it in the job's `folder` (`rank_failures`),
    or as the launcher knows it.
    """

    def __init__(
        self, again: bool = False, survives: bool = False, folder: str | None = None
    ) -> None:
        self._again, self._survives, self._folder = again, survives, folder
        self._errors: set[str] = set()
        self._block: list[str] | None = None
        self._banners: list[str] = []
        self._has_ended = False
        self.interrupted = False
        """True if the user has ended the ranks; banners are then not shown."""
        self.not_started = False
        """True if mpirun failed before it started any rank, and may succeed if started again."""
        self.end_of_signal = ""
        """End of a rank by a signal, in one line."""
        self.end_of = ""
        """End of a rank by an exit code, in one line, for the case that no rank has said more."""
        self.has_crashed = False
        """True if ranks ended by a fault of Open MPI while they regrouped after a loss."""
        self.lost_node = False
        """True if mpirun has lost its daemon on another node; its exit code may then be 0."""

    def feed(self, line: str) -> list[str]:
        """Add a line; return the lines to show now."""
        line = line.replace("\0", "")  # Open MPI ends its banners with a null character.
        if not line:
            return []
        self.lost_node |= _NODE_LOST in line
        self.has_crashed |= _CRASH in line
        if self._survives and (not line.strip() or any(words in line for words in _NOISE)):
            return []
        if _ERROR not in line:
            return self._sort(line)
        # A banner may start or end within a line, if a rank ended while it wrote one.
        parts = _RULE_AT_END.split(line.removesuffix("\n"))
        return [shown for part in parts if part for shown in self._sort(part + "\n")]

    def _sort(self, line: str) -> list[str]:
        if line.startswith(_RULE):
            if self._block is None:
                self._block = [line]
                return []
            block, self._block = [*self._block, line], None
            if self._again and any(_NOT_STARTED in row for row in block):
                self.not_started = True
                return []
            if any(words in row for row in block for words in _BANNERS):
                self._banners += block
                self._look_for_end(block)
                return []
            return block
        if line.lstrip().startswith(_ERROR) or line == NOTHING_SAVED:
            # Another rank's error may appear within a banner.
            line = line.lstrip()
            is_told = line in self._errors or (self.interrupted and line == NOTHING_SAVED)
            shown = [] if is_told else [line]
            self._errors.add(line)
            return shown
        if match := _LIMITS.search(line):
            limit = "processes (`ulimit -u`)" if match[1] == "CHILDREN" else "files (`ulimit -n`)"
            self.end_of = f"mpirun has reached the limit of {limit}: raise it, or start fewer ranks"
            return []
        if self._block is not None:
            self._block.append(line)
            return []
        return [line]

    def _look_for_end(self, block: list[str]) -> None:
        if self._survives or (end := told_by_mpirun(block)) is None:
            return
        line, by_signal = end
        if by_signal:
            self.end_of_signal = self.end_of_signal or line
        else:
            self.end_of = self.end_of or line

    def end(self) -> list[str]:
        """Return the lines to show after the last line, once."""
        left, banners = self._block or [], self._banners
        self._block, self._banners = None, []
        if self.interrupted or self._has_ended:
            return left
        self._has_ended = True
        failures = [] if self._folder is None else failures_in(self._folder)
        if all(each.follows for each in failures):
            if self.end_of_signal:
                return [*left, f"{_ERROR} {self.end_of_signal}\n"]
            # A rank that says itself why it ended says more.
            ranks = tuple(f"rank {each.rank} " for each in failures)
            if failures and self.end_of and not self.end_of.startswith(ranks):
                return [*left, f"{_ERROR} {self.end_of}\n"]
        if failures or self._errors:
            return [*left, *lines_of(failures)]
        if self.end_of:
            return [*left, f"{_ERROR} {self.end_of}\n"]
        return [*banners, *left]
