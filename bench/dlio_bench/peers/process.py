"""Contenders' processes: asked, paused and ended, with a deadline for every answer, and in turn."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dlio.errors import UsageError
from dlio.util.closable import Closable
from dlio.util.units import counted
from dlio_bench.bench_processes import cpu_s, pss, threads, tree
from dlio_bench.peers.environments import runner_command, runner_environment
from dlio_bench.peers.standalone.runners.protocol import MARK, Task, checksum
from dlio_bench.results.repeats import turns

_LOOK_S: Final = 0.25
_END_S: Final = 20.0
_LINGER_S: Final = 3.0
_MOST_OF_A_SOCKET: Final = 75
"""Characters of a folder of which multiprocessing's sockets still have a valid address."""


@dataclass(frozen=True, slots=True)
class ContenderFigures:
    """Figures of the last of some passes."""

    samples: int
    seconds: float
    first_batch_s: float
    labels: list[str]
    """Checksum of the multiset of labels of each pass."""
    output: str | None
    """Type and layout of batches; None for a loop that keeps none."""
    values: list[int]
    """Weights of the passes over rows that were not timed."""
    cpu_s: float
    """Seconds of all processes of the contender on processors, of all passes."""


def _temporary(scratch: str) -> dict[str, str]:
    """Variables with which a process has its temporary files next to its scratch folder, whose
    owner removes both: torch's workers leave sockets in theirs when they are interrupted."""
    folder = os.path.dirname(os.path.abspath(scratch))
    return {"TMPDIR": folder} if len(folder) <= _MOST_OF_A_SOCKET else {}


class ContenderProcess(Closable):
    """One contender's process. Owner: the caller, by `with`.

    The command serves the protocol, with variables of `environment` in addition to this process's;
    each answer must come within `patience_s`. `task.scratch` is made.

    The process starts at once and prepares its data; `get_ready` waits for it. Raises UsageError,
    also from every other method, when the process ends, says that it failed, or gives no answer in
    time; it is ended then.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        task: Task,
        patience_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._patience_s = patience_s
        self._task = task
        self._left = b""
        os.makedirs(task.scratch, exist_ok=True)
        self._said = open(f"{task.scratch}.log", "w+", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
                env={**os.environ, **_temporary(task.scratch), **(environment or {})},
            )
        except OSError as error:
            self._said.close()
            raise UsageError(f"{name} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def close(self) -> None:
        """End the process and all workers of its own."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._end_group()
        self._answers.close()
        self._said.close()

    def get_ready(self) -> dict[str, str]:
        """Have it prepare its data. Returns the versions of its libraries."""
        path = f"{self._task.scratch}.task.json"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self._task), file)
        versions: dict[str, str] = self._ask({"task": path}, "prepare its data")["versions"]
        return versions

    def make_passes(self, passes: int) -> ContenderFigures:
        """Have it make passes over all pictures, one after another; the last one is timed."""
        self._signal(signal.SIGCONT)
        before = self._cpu_s()
        answer = self._ask({"passes": passes}, "make a pass")
        return ContenderFigures(**answer, cpu_s=self._cpu_s() - before)

    def pause(self) -> None:
        """Stop it: some contenders poll while they wait, which would slow the others' turns."""
        self._signal(signal.SIGSTOP)

    def footprint(self) -> dict[str, float]:
        """`pss_MiB`, `processes` and `threads` of the process and all below it."""
        pids = tree(self._process.pid)
        return {
            "pss_MiB": sum(pss(pid) for pid in pids) / 1024,
            "processes": len(pids),
            "threads": sum(threads(pid) for pid in pids),
        }

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in tree(self._process.pid))

    def _ask(self, request: Mapping[str, object], to: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience_s
        with contextlib.suppress(OSError):  # A broken pipe: the reason follows.
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        while (line := self._line(deadline)) is not None:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise UsageError(f"{self.name} failed to {to}: {answer['error']}")
                return answer
        if time.monotonic() >= deadline:
            self.kill()
            raise UsageError(
                f"{self.name} took more than {self._patience_s:g} s to {to} and was ended: give it "
                "more with --patience"
            )
        raise UsageError(f"{self.name} {self._end()} while it was to {to}: {self._last_words()}")

    def _line(self, deadline: float) -> str | None:
        """Next line of the process; None when it has ended or the deadline has passed."""
        descriptor = self._answers.fileno()
        while b"\n" not in self._left:
            wait = min(deadline - time.monotonic(), _LOOK_S)
            if wait <= 0:
                return None
            ended = self._process.poll() is not None
            if select.select([descriptor], [], [], 0 if ended else wait)[0]:
                data = os.read(descriptor, 1 << 16)
                if not data:
                    return None
                self._left += data
            elif ended:
                return None
        line, _, self._left = self._left.partition(b"\n")
        return line.decode(errors="replace")

    def _end(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its pipe"
        if code >= 0:
            return f"exited with code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def _end_group(self) -> None:
        """End the processes that it left behind; those that clean up after it get time for it."""
        deadline = time.monotonic() + _LINGER_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(_LOOK_S / 10)
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for pid in tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def start_contender(
    name: str,
    task: Task,
    patience_s: float,
    environment: str = "",
    module: str = "dlio_bench.peers.dlio_contenders",
) -> ContenderProcess:
    """Start a contender: of a peers' environment, or of a module of dlio's own for "". Its process
    may be one of several that run the same contender: its folder names it in errors."""
    if environment:
        command = runner_command(environment, name)
        variables = runner_environment(task.workers)
    else:
        command = [sys.executable, "-m", module, name]
        variables = {"HF_HUB_OFFLINE": "1"}
    return ContenderProcess(os.path.basename(task.scratch), command, task, patience_s, variables)


# Passes of all contenders in turn, with the labels of each pass compared with the data's


@dataclass(slots=True)
class ContenderRace:
    """All passes of a contender."""

    cold: float
    """Seconds to the first batch of the first pass of all."""
    output: str | None
    """Type and layout of batches."""
    rates: list[float] = field(default_factory=list)
    """Samples a second of each repeat."""
    cpu: list[float] = field(default_factory=list)
    """Seconds on processors for each sample, of timed passes and the one before them."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first batch of each timed pass."""
    footprint: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RaceOutcome:
    """Those that took part until the end, and those that did not."""

    races: dict[str, ContenderRace] = field(default_factory=dict)
    """By contender."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of libraries, by distribution."""
    absent: dict[str, str] = field(default_factory=dict)
    """Reasons why contenders did not take part, or not until the end."""


def race(
    starts: Mapping[str, Callable[[], ContenderProcess]],
    labels: Sequence[int],
    repeats: int,
    progress: Callable[[str], object] = lambda _: None,
    weight: int | None = None,
) -> RaceOutcome:
    """Have contenders load the same pictures or rows, each `repeats` times, in turn.

    Within each repeat every contender makes a pass that is not timed and one that is; the order is
    turned round from one repeat to the next. Whoever fails is left out, with the reason, and its
    figures are dropped. A contender that gives other labels in a pass has failed, or,
    if `weight` is given, rows of another one.

    `progress` is called before a contender prepares its data and before each timed pass, with a
    note; 1 + repeats times for each contender that does not fail.
    """
    outcome = RaceOutcome()
    expected = checksum(labels)

    def passes(contender: ContenderProcess, count: int) -> ContenderFigures:
        figures = contender.make_passes(count)
        if set(figures.labels) != {expected}:
            raise UsageError(
                f"{contender.name} gave other labels than the data has, in a pass of "
                f"{counted(figures.samples, 'sample')} of {len(labels)}"
            )
        if weight is not None and set(figures.values) != {weight}:
            raise UsageError(f"{contender.name} gave other values than the data has")
        contender.pause()
        return figures

    with contextlib.ExitStack() as stack:
        running: dict[str, ContenderProcess] = {}

        def leave(name: str, error: UsageError) -> None:
            outcome.absent[name] = str(error)
            outcome.races.pop(name, None)
            if (gone := running.pop(name, None)) is not None:
                gone.close()

        def end(interruption: type[BaseException] | None, *_: object) -> None:
            if interruption is not None:
                # It would finish its pass first. All before any is waited for: another interruption
                # may follow.
                for contender in running.values():
                    contender.kill()
            for contender in running.values():
                contender.close()

        stack.push(end)
        for name, start in starts.items():
            progress(f"{name}: preparing")
            try:
                running[name] = start()
                outcome.versions.update(running[name].get_ready())
                cold = passes(running[name], 1)
                outcome.races[name] = ContenderRace(cold.first_batch_s, cold.output)
            except UsageError as error:
                leave(name, error)
        for repeat, name in turns(running, repeats):
            if name not in running:
                continue
            progress(f"{name}: pass {repeat + 1} of {repeats}")
            try:
                # The first is not timed: its memory may have been taken away meanwhile.
                timed = passes(running[name], 2)
            except UsageError as error:
                leave(name, error)
                continue
            own = outcome.races[name]
            own.rates.append(timed.samples / timed.seconds)
            own.cpu.append(timed.cpu_s / (len(timed.labels) * len(labels)))
            own.first.append(timed.first_batch_s)
        for name, contender in running.items():
            outcome.races[name].footprint = contender.footprint()
    return outcome
