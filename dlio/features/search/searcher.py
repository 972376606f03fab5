"""The searcher: starts trials as ranks become free, and ends, stops or restarts them."""

import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Final

from dlio.comm.private_store import StoreServer
from dlio.errors import DlioError
from dlio.features.search.parameter_sampler import ParameterSampler
from dlio.features.search.search_options import SearchOptions
from dlio.features.search.search_space import Point
from dlio.features.search.study import Study, TrialEpoch, TrialRecord
from dlio.features.search.successive_halving import SuccessiveHalving
from dlio.launch.job_folder import open_job_folder
from dlio.launch.node.agent_protocol import Message, pack, receive_exactly
from dlio.launch.node.zygote_process import ZygoteProcess
from dlio.launch.rank_environment import meeting_variables
from dlio.util.input_files import open_input
from dlio.util.settings import LAUNCHER, RECORD, TRIAL, TRIAL_LINK
from dlio.util.signals import EndOrder, heard_signals, is_repeated, leave_closed_terminal
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import PUBLIC_FILE, open_own

# The ranks of one trial
_HOST: Final = "127.0.0.1"
_PROGRAM: Final = "dlio.cli.rank_main"
_FEW_S: Final = 10.0
_OF_LAUNCHERS: Final = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_")
_PLACES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class TrialProgram:
    """The program of a trial's ranks."""

    function: str
    """`module:function`, which is called with the records."""
    records: Sequence[tuple[str, Mapping[str, object]]]
    """Records of options: `module:class`, and fields by name."""


@dataclass(slots=True)
class Team:
    """The ranks of one trial, from their start to the end of the last one."""

    record: TrialRecord
    slots: Sequence[int]
    """Numbers of the search's ranks that it takes."""
    zygote: ZygoteProcess
    link: socket.socket
    """The searcher's end."""
    stack: ExitStack
    """All that belongs to its ranks."""
    codes: list[int] = field(default_factory=list)
    """Exit codes, other than 0, of ranks that have ended by themselves."""
    left: set[int] = field(default_factory=set)
    """The zygote's keys of ranks that run."""
    decided_at: float = 0.0
    """Time of the decision to start it."""
    kill_at: float = math.inf
    """Deadline, once it was asked to end."""
    was_killed: bool = False
    """True once the searcher has ended it."""
    is_stopped: bool = False
    """True if it ends early, by its results."""
    waits: bool = False
    """True while it waits for an answer."""

    @classmethod
    def start(
        cls,
        record: TrialRecord,
        work: TrialProgram,
        slots: Sequence[int],
        cores: Sequence[Sequence[int]],
        gpus: Sequence[str],
        folder: str,
        zygote: ZygoteProcess,
    ) -> "Team":
        """Fork the ranks of a trial, with the cores of each and the GPUs of all.

        CUDA_VISIBLE_DEVICES names `gpus`. Raises OSError if the zygote is gone.
        """
        mine, its = socket.socketpair()
        with ExitStack() as stack, its:
            stack.callback(mine.close)
            os.close(make_folders(folder))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            log = open_own(os.path.join(folder, "log.txt"), flags, PUBLIC_FILE)
            nothing = os.open(os.devnull, os.O_RDONLY)
            try:
                common = _environment(work, folder, gpus)
                if len(slots) > 1:
                    job = stack.enter_context(open_job_folder())
                    stack.enter_context(StoreServer(job))
                    with socket.create_server((_HOST, 0)) as free:
                        port = free.getsockname()[1]
                    common |= meeting_variables(len(slots), job, _HOST, port)
                    common["TORCH_CPP_LOG_LEVEL"] = "ERROR"
                team = cls(record, slots, zygote, mine, stack)
                for rank in range(len(slots)):
                    own = common
                    if len(slots) > 1:
                        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    order = {
                        "argv": [_PROGRAM, "trial"],
                        "environment": own,
                        "folder": os.getcwd(),
                        "cores": cores[rank],
                        "link": TRIAL_LINK,
                    }
                    team.left.add(zygote.fork(order, (nothing, log, log, its.fileno())))
            finally:
                os.close(log)
                os.close(nothing)
            team.stack = stack.pop_all()
        return team

    def ended(self, key: int, code: int) -> None:
        """Note the end of a rank."""
        self.left.remove(key)
        if code and not self.was_killed:
            self.codes.append(code)

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        if number == signal.SIGKILL:
            self.was_killed = True
        for key in self.left:
            self.zygote.signal(key, number)

    def receive(self) -> Message | None:
        """Return the next message of the trial; None if it has ended."""
        self.link.settimeout(_FEW_S)
        try:
            message, _ = receive_exactly(self.link)
        except (EOFError, OSError):
            return None
        return message

    def answer(self, goes_on: bool) -> None:
        """Answer the trial's message."""
        self.waits = False
        with suppress(OSError):  # It has ended: seen next.
            self.link.sendall(pack({"goes_on": goes_on}))

    @property
    def code(self) -> int:
        """Exit code of the trial: negative if a signal, not the searcher's, has ended a rank."""
        killed = [code for code in self.codes if code < 0]
        return (killed or self.codes or [0])[0]


def _environment(work: TrialProgram, folder: str, gpus: Sequence[str]) -> dict[str, str]:
    full = {
        name: value
        for name, value in os.environ.items()
        if name not in _PLACES and not name.startswith(_OF_LAUNCHERS)
    }
    full |= {
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
        # As `dlio.launch.command_ranks.run_as_rank` reads it; no launcher starts these ranks.
        RECORD: json.dumps({"ranks": 1, "command": ["dlio"], "may_end": False, **asdict(work)}),
        TRIAL: folder,
    }
    if gpus:
        full["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return full


# The search
CORES: Final = "--cores-per-rank"
"""Key of the cores that each rank of a study computes on, in `Study.first`."""
STOPPED: Final = 75
"""Exit code of a search that was told to end, as of `dlio train`."""
_PATIENCE_S: Final = 60.0
"""Time for trials to write a checkpoint and end."""
_SCRIPT_S: Final = 10.0
_DEATHS: Final = 8
"""Deaths of a trial without a new epoch after which it has failed."""
_ZYGOTES: Final = 20
"""Zygotes that may die before the search gives up."""
_LONGEST_NOTE: Final = 300


class SearchFailed(DlioError):
    """No trial can succeed."""


class Searcher:
    """Runs the trials of a study on this machine, `trials` in all.

    `work` returns a trial's program from its parameters and its folder. `changed` is called after
    each change of a trial, with the trials that run. Without `halving` no trial ends early.
    """

    def __init__(
        self,
        study: Study,
        sampling: ParameterSampler,
        search: SearchOptions,
        trials: int,
        is_script: bool,
        work: Callable[[Point, str], TrialProgram],
        halving: SuccessiveHalving | None,
        changed: Callable[[Sequence[Team]], object],
    ) -> None:
        self._study, self._sampling, self._search = study, sampling, search
        self._trials, self._is_script, self._work = trials, is_script, work
        self._halving, self._changed = halving, changed
        self._free = list(range(search.ranks))
        self._teams: list[Team] = []
        self._again = [record for record in study.records if not record.has_ended]
        """Trials that run on from their checkpoints, by number."""
        self._deaths: Counter[int] = Counter()
        self._selector = selectors.DefaultSelector()
        self._zygote: ZygoteProcess | None = None
        self._is_ready, self._zygotes = False, 0
        self._gpus: list[str] = []
        self._asked = self._stopping = False
        """True once a signal has come, and once the trials were asked to end."""
        self.starts_s: list[float] = []
        """Seconds from each decision to start a trial to the first line of its program."""

    def run(self) -> bool:
        """Run all trials that are left; False if it was told to end before.

        Raises SearchFailed if the first trials all fail, or no ranks can be started.
        """
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            stack.enter_context(self._told_to_end())
            stack.callback(self._end_all)
            while True:
                self._settle()
                if self._asked and not self._stopping:
                    self._ask_to_end()
                if not self._stopping:
                    self._start_trials()
                self._changed(self._teams)
                if not self._teams and (self._stopping or self._is_done()):
                    return self._is_done()
                self._wait()

    def _is_done(self) -> bool:
        ended = all(record.has_ended for record in self._study.records)
        return ended and len(self._study.records) >= self._trials

    def _settle(self) -> None:
        """Answer and end trials whose look has been decided by the results of others."""
        for record in list(self._again):
            if self._decided(record) is False:
                self._again.remove(record)
                self._stop(record)
                self._study.tidy()
        for team in self._teams:
            if not team.waits:
                continue
            if (goes_on := self._decided(team.record)) is not None:
                team.is_stopped = not goes_on
                team.answer(goes_on)
                if team.is_stopped and self._is_script:
                    team.kill_at = time.monotonic() + _SCRIPT_S
            elif self._stopping:
                team.signal(signal.SIGKILL)  # It has a checkpoint, and would wait for ever.

    def _stop(self, record: TrialRecord) -> None:
        """End a trial that does not go on after its last epoch."""
        lost = record.nan_after(self._study.objectives)
        self._study.end(record, "failed" if lost else "pruned", lost)

    def _decided(self, record: TrialRecord) -> bool | None:
        """True if a trial goes on after its last epoch; None if others have to come to it first."""
        halving, epochs = self._halving, len(record.epochs)
        if record.nan_after(self._study.objectives):
            return False  # Weights that are not numbers stay so; a median would not compare them.
        if halving is None or not epochs:
            return True
        objective = self._study.objectives[0]
        courses = {each.number: each.course(objective) for each in self._study.records}
        return halving.goes_on(record.number, epochs, courses)

    def _start_trials(self) -> None:
        """Start trials while there are ranks, those that were interrupted first."""
        while len(self._free) >= self._search.ranks_per_trial:
            if self._zygote is None:
                if not self._may_begin() and not self._again:
                    return
                self._start_zygote()
            if not self._is_ready:
                return
            record = self._next()
            if record is None:
                return
            self._start(record)

    def _may_begin(self) -> bool:
        """True if there is another trial, and those that its choice knows have ended."""
        number = len(self._study.records)
        known = self._study.records[: self._sampling.known(number)]
        return number < self._trials and all(record.has_ended for record in known)

    def _next(self) -> TrialRecord | None:
        """Take the trial that starts next; None if one has to wait for others."""
        for record in self._again:
            if self._decided(record):
                self._again.remove(record)
                return record
        if self._again or not self._may_begin():
            return None
        number = len(self._study.records)
        known = self._study.frozen(self._sampling.known(number))
        return self._study.add(self._sampling.choose(number, known))

    def _start(self, record: TrialRecord) -> None:
        count = self._search.ranks_per_trial
        slots, self._free = self._free[:count], self._free[count:]
        folder = self._study.trial_folder(record.number)
        gpus = [self._gpus[slot % len(self._gpus)] for slot in slots] if self._gpus else []
        decided_at = time.monotonic()
        assert self._zygote is not None
        try:
            team = Team.start(
                record,
                self._work(record.point, folder),
                slots,
                [self._cores(slot) for slot in slots],
                list(dict.fromkeys(gpus)),
                folder,
                self._zygote,
            )
        except (BrokenPipeError, ConnectionResetError):
            self._free = sorted([*self._free, *slots])
            self._again = sorted([*self._again, record], key=lambda each: each.number)
            self._is_ready = False  # The zygote's end is seen next.
            return
        team.decided_at = decided_at
        self._teams.append(team)
        self._selector.register(team.link, selectors.EVENT_READ, team)

    def _cores(self, slot: int) -> list[int]:
        """Return the cores of a rank: neighbours, and as many for each rank."""
        if not hasattr(os, "sched_getaffinity"):
            return []
        cores = sorted(os.sched_getaffinity(0))
        count = min(self._study.first[CORES], len(cores))
        return [cores[(slot * count + k) % len(cores)] for k in range(count)]

    def _wait(self) -> None:
        """Handle the next messages, ends of processes, and deadlines."""
        now = time.monotonic()
        until = min([now + 1.0, *(team.kill_at for team in self._teams)])
        for key, _ in self._selector.select(max(0.0, until - now)):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(key.fd, 64)
            elif key.data is self._zygote:
                self._hear_zygote()
            elif key.data in self._teams:
                self._hear(key.data)
        now = time.monotonic()
        for team in self._teams:
            if team.kill_at <= now:
                team.kill_at = math.inf
                team.signal(signal.SIGKILL)

    def _hear(self, team: Team) -> bool:
        """Take a message of a trial; False if there is none."""
        message = team.receive()
        if message is None:
            if team.link in self._selector.get_map():
                self._selector.unregister(team.link)
            return False
        if "begins" in message:
            self.starts_s.append(time.monotonic() - team.decided_at)
            return True
        record, epoch = team.record, message["epoch"]
        if epoch >= len(record.epochs):
            self._deaths.pop(record.number, None)
        results = TrialEpoch(tuple(message["values"]), message["source_bytes"])
        self._study.report(record, epoch, results)
        team.waits = True
        if epoch + 1 < len(record.epochs):
            team.answer(True)  # A script that began again.
        return True

    def _hear_zygote(self) -> None:
        assert self._zygote is not None
        try:
            message = self._zygote.receive()
        except (EOFError, OSError):
            self._zygote_died()
            return
        if "ready" in message:
            self._zygote.order({"gpus": True})
        elif "gpus" in message:
            self._is_ready = True
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            count = message["gpus"]
            self._gpus = given.split(",")[:count] if given else [str(k) for k in range(count)]
        elif "ended" in message:
            key, code = message["ended"], message["code"]
            team = next((each for each in self._teams if key in each.left), None)
            if team is None:
                return
            team.ended(key, code)
            if not team.left:
                self._finish(team)
            elif code and not team.was_killed and code != STOPPED:
                team.signal(signal.SIGKILL)  # A trial goes on with all of its ranks alone.

    def _finish(self, team: Team) -> None:
        """Free the ranks of a trial, and end it or have it run again."""
        if team.link in self._selector.get_map():
            while not team.waits and self._hear(team):
                pass  # The last message may still be on its way.
        if team.link in self._selector.get_map():
            self._selector.unregister(team.link)
        self._teams.remove(team)
        team.stack.close()
        self._free = sorted([*self._free, *team.slots])
        record, code = team.record, team.code
        if team.is_stopped:
            self._stop(record)
        elif code == 0 and not team.was_killed and record.epochs:
            self._study.end(record, "complete")
        elif code < 0 or self._explains(code) or (team.was_killed and code == 0):
            self._again = sorted([*self._again, record], key=lambda each: each.number)
            if not self._stopping:
                self._deaths[record.number] += 1
            if self._deaths[record.number] >= _DEATHS:
                self._again.remove(record)
                self._study.end(record, "failed", f"died {_DEATHS} times within one epoch")
        else:
            said = _last_error(os.path.join(self._study.trial_folder(record.number), "log.txt"))
            if not code:
                said = "it ended without a metric: scripts print `dlio: metric NAME VALUE`"
            self._study.end(record, "failed", said)
        self._study.tidy()
        self._give_up_if_hopeless()

    def _explains(self, code: int) -> bool:
        """True if a trial ended with this code as it was told to, also before it listened."""
        return code == STOPPED or EndOrder(self._stopping).explains(code)

    def _give_up_if_hopeless(self) -> None:
        records = self._study.records
        least = min(self._trials, max(3, self._search.at_a_time))
        if len(records) >= least and all(record.state == "failed" for record in records[:least]):
            raise SearchFailed(
                f"the first {least} trials have failed, the first one with: {records[0].note}; "
                f"the log is {self._study.trial_folder(0)}/log.txt; name a new --study"
            )

    def _start_zygote(self) -> None:
        if self._zygotes >= _ZYGOTES:
            raise SearchFailed(f"the process that starts ranks has died {_ZYGOTES} times")
        self._zygotes += 1
        modules = ["dlio.features.search.trial", "dlio.launch.command_ranks", "dlio.train.trainer"]
        if self._is_script:
            modules.append("dlio.integrations.script.runner")
        self._zygote, self._is_ready = ZygoteProcess(modules), False
        self._selector.register(self._zygote.control, selectors.EVENT_READ, self._zygote)

    def _zygote_died(self) -> None:
        """Its ranks die with it: their trials run again."""
        assert self._zygote is not None
        self._selector.unregister(self._zygote.control)
        self._zygote.close()
        self._zygote, self._is_ready = None, False
        for team in list(self._teams):
            team.codes += [-int(signal.SIGKILL)] * len(team.left)
            team.left.clear()
            self._finish(team)

    @contextmanager
    def _told_to_end(self) -> Iterator[None]:
        """Within a `with` statement, signals end the search with checkpoints; a second one at
        once."""
        mine, its = socket.socketpair()
        with mine, its:
            its.setblocking(False)
            self._selector.register(mine, selectors.EVENT_READ)

            def act(number: int, _: object) -> None:
                leave_closed_terminal(number)
                if is_repeated():
                    return
                if self._asked and number != signal.SIGHUP:
                    raise KeyboardInterrupt
                self._asked = True
                with suppress(BlockingIOError):
                    its.send(b"x")

            numbers = (signal.SIGINT, *heard_signals())
            before = {number: signal.signal(number, act) for number in numbers}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _ask_to_end(self) -> None:
        self._stopping = True
        print("dlio search: trials write checkpoints and end", file=sys.stderr, flush=True)
        for team in self._teams:
            team.signal(signal.SIGTERM if self._is_script else signal.SIGUSR1)
            team.kill_at = time.monotonic() + _PATIENCE_S

    def _end_all(self) -> None:
        for team in self._teams:
            team.stack.close()
        if self._zygote is not None:
            self._zygote.close()


def _last_error(path: str) -> str:
    """Return the last error in a trial's log, or its last line."""
    try:
        with open_input(path) as file:
            file.seek(max(0, os.path.getsize(path) - 16384))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    errors = [line for line in lines if line.startswith("dlio: error: ")]
    last = (errors or lines or ["it wrote nothing"])[-1]
    return last.removeprefix("dlio: error: ")[:_LONGEST_NOTE]
