"""The program of a trial's rank: a training, or a script, that tells its results by epochs."""

import os
import selectors
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlio.comm import Communicator
from dlio.errors import CommError, UsageError
from dlio.features.search.objectives import METRIC_LINE, metrics_of, picked
from dlio.launch.node.agent_protocol import pack, receive_exactly
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.config import TrainConfig
from dlio.train.report import EpochReport
from dlio.util.closable import Closable
from dlio.util.settings import TRIAL_LINK

if TYPE_CHECKING:
    from typing import TextIO

    from dlio.integrations.script.run_options import RunOptions


# Messages to the searcher, over a socket that it made
#
# Rank 0 tells the results of each epoch and waits for the answer, whether the trial goes on. If
# other trials have to come to the same look first, the answer comes later; meanwhile the other
# ranks of the trial are told to wait on.
_TURN_S: Final = 20.0
"""Time between two signs to the other ranks, well below the deadline of their waits."""


class TrialLink(Closable):
    """A trial's end of the link."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ[TRIAL_LINK]))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def begin(self) -> None:
        """Tell that the trial's program runs."""
        self._socket.sendall(pack({"begins": True}))

    def tell(
        self,
        epoch: int,
        values: list[float | None],
        source_bytes: int = 0,
        peers: Communicator | None = None,
    ) -> bool:
        """Tell an epoch's values of the objectives; return False if the trial shall end.

        Epochs count from 0. Collective over `peers`. Raises CommError if the searcher is gone.
        """
        if peers is None or peers.rank == 0:
            message = {"epoch": epoch, "values": values, "source_bytes": source_bytes}
            try:
                self._socket.sendall(pack(message))
            except OSError as error:
                raise CommError(f"the searcher has ended: {error}") from error
        while True:
            answer = self._answer() if peers is None or peers.rank == 0 else None
            if peers is not None:
                answer = peers.tell(answer)
            if answer is not None:
                return answer

    def _answer(self) -> bool | None:
        """Return the searcher's decision; None if there is none yet."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(_TURN_S):
                return None
        try:
            message, _ = receive_exactly(self._socket)
        except (EOFError, OSError) as error:
            raise CommError(f"the searcher has ended: {error}") from error
        return bool(message["goes_on"])


# Programs of ranks


@dataclass(frozen=True, slots=True)
class TrialTask:
    """The results that a trial tells, and the script that it runs."""

    objectives: tuple[str, ...]
    """Names of the metrics."""
    words: tuple[str, ...] = ()
    """A script with its arguments; empty for `dlio train`."""


class SearchCallback(Callback):
    """Tell the searcher the results of each epoch; ends the run if it decides so."""

    def __init__(self, link: TrialLink, objectives: tuple[str, ...]) -> None:
        self._link, self._objectives = link, objectives

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        values = picked(metrics_of(report), self._objectives)
        source = report.bytes.get("source", 0)
        if not self._link.tell(report.epoch, values, source, run.comm):
            run.stop("the search ends this trial early")


_current: list[SearchCallback] = []
"""The callback of this process's trial."""


def make_callback() -> Callback:
    """Return the callback of this process's trial; a factory for --callback."""
    return _current[0]


def run_training(config: TrainConfig, task: TrialTask) -> None:
    """Train as a rank of a trial."""
    from dlio.comm import world
    from dlio.train.trainer import train

    with TrialLink() as link:
        if os.environ.get("RANK", "0") == "0":
            link.begin()
        _current[:] = [SearchCallback(link, task.objectives)]
        report = train(config)
    if world().rank == 0:
        report.print()


def run_script_trial(options: "RunOptions", task: TrialTask) -> None:
    """Run a script as a rank of a trial."""
    from dlio.comm import world
    from dlio.integrations.script.runner import run_script

    if world().rank:
        run_script(task.words[0], task.words[1:], options)
        return
    with TrialLink() as link:
        link.begin()
        stream = _MetricLines(sys.stdout, link, task.objectives)
        sys.stdout = stream
        try:
            run_script(task.words[0], task.words[1:], options)
        finally:
            sys.stdout = stream.stream


class _MetricLines:
    """Standard output that takes `dlio: metric NAME VALUE` out of its lines."""

    def __init__(self, stream: "TextIO", link: TrialLink, names: tuple[str, ...]) -> None:
        self.stream, self._link, self._names = stream, link, names
        self._line = ""
        self._values: dict[str, float | None] = {}
        self._epochs = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, and tell the metrics of complete lines."""
        count = self.stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        return count

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines."""
        for line in lines:
            self.write(line)

    def _take(self, line: str) -> None:
        match = METRIC_LINE.fullmatch(line)
        if match is None or match[1] not in self._names:
            return
        try:
            self._values[match[1]] = float(match[2])
        except ValueError:
            raise UsageError(f"{line}: give a number after the metric's name") from None
        if len(self._values) == len(self._names):
            values = [self._values[name] for name in self._names]
            self._values, epoch = {}, self._epochs
            self._epochs += 1
            if not self._link.tell(epoch, values):
                raise SystemExit(0)
