"""One run of `dlio train`, or of another training that stamps steps, seen and hurt from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Final, Self

from dlio.errors import UsageError
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.leftovers import JOB, kill, processes_of, wait_until
from dlio_bench.chaos.scheduled_faults import (
    FaultClock,
    InjectedFault,
    ScheduledFault,
    make_schedule,
)
from dlio_bench.chaos.stamps import RankStamps, Stamps
from dlio_bench.chaos.torchft_program import EXIT, HANG, RAISE, STACKS

IMAGE_SIZE: Final = 32
"""Side of the pictures, in pixels."""

_END_TIMEOUT_S: Final = 20.0
_GRACE_S: Final = 15.0
"""Time in which processes of a job may outlive it: reapers of shared memory end after it."""
_LOOK_S: Final = 0.1
_START: Final = 5
"""Times the deadline that a job may take to start its ranks."""
_TIMEOUT: Final = "60"
"""DLIO_TIMEOUT of the jobs, unless it is set."""
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segv": signal.SIGSEGV,
    "exit": EXIT,
    "raise": RAISE,
    "twice": signal.SIGKILL,
    "first": signal.SIGKILL,
    "hang": HANG,
    "leave": signal.SIGTERM,
}
_WITHOUT_CORES: Final = ("sh", "-c", 'ulimit -c 0; exec "$@"', "sh")
"""Runs a command whose crashes leave no files."""
_TAIL: Final = 2000


class ChaosJob:
    """A training with its ranks. A context manager, which ends it.

    It gets a new folder of its own, for stamps, output and temporary files. Without a finished step
    it has hung after `deadline_s`; it may take longer to start.
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: str,
        cache: str,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self._deadline_s = folder, deadline_s
        self.stamps = Stamps(folder)
        self.hurt: set[int] = set()
        """Processes of ranks that were hurt."""
        self.hung = False
        self.left_processes = 0
        """Processes that were there after the end, and were killed."""
        self.left_files: list[str] = []
        """Temporary files and folders, such as sessions of MPI, that were there after the end."""
        self._temporary = os.path.join(folder, "tmp")
        os.makedirs(self._temporary)
        self.environment = {
            "DLIO_TIMEOUT": _TIMEOUT,
            **os.environ,
            **(environment or {}),
            JOB: folder,
            "DLIO_CACHE": cache,
            "TMPDIR": self._temporary,
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "torchinductor"),
        }
        with ExitStack() as stack:
            output, errors = (
                stack.enter_context(open(os.path.join(folder, f"{name}.txt"), "wb"))
                for name in ("output", "errors")
            )
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                [*_WITHOUT_CORES, *argv],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._looked = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Its standard output."""
        with open(os.path.join(self.folder, "output.txt"), errors="replace") as file:
            return file.read()

    @property
    def errors(self) -> str:
        """End of its standard error."""
        with open(os.path.join(self.folder, "errors.txt"), errors="replace") as file:
            return file.read()[-_TAIL:].strip()

    def finish(self, what: str = "the job") -> None:
        """Wait for its end. Raises UsageError if it fails or hangs."""
        while self.runs():
            time.sleep(_LOOK_S)
        if self.code or self.hung:
            raise UsageError(f"{what} {'has hung' if self.hung else 'failed'}: {self.errors}")

    def runs(self) -> bool:
        """Return True while it runs and has not hung; reads new stamps now and then."""
        if self.code is not None:
            self.stamps.read()
            return False
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return True
        self._looked = now
        self.stamps.read()
        patience_s = self._deadline_s * (1 if self.stamps.newest else _START)
        if now - max(self.stamps.newest, self._started) > patience_s:
            self.hung = True
            kill((each.pid for each in self.stamps.ranks), STACKS)
            time.sleep(1.0)
        return not self.hung

    def left(self) -> list[int]:
        """Return the ranks that train and were not hurt, ascending."""
        return [
            rank
            for rank, each in self._newest().items()
            if each.steps and each.pid not in self.hurt
        ]

    def steps_since(self, began: float, ranks: int) -> int:
        """Return the fewest steps of a rank that trains and was not hurt, if all ranks have begun
        again since a monotonic time; else 0."""
        if sum(each.begun > began for each in self._newest().values()) < ranks:
            return 0
        return self.fewest_steps

    @property
    def fewest_steps(self) -> int:
        """The fewest steps of a rank that trains and was not hurt."""
        newest = self._newest()
        return min((len(newest[rank].steps) for rank in self.left()), default=0)

    def hurt_by(self, fault: ScheduledFault) -> InjectedFault | None:
        """Make a fault; None if a rank to hurt had ended before."""
        chosen = fault.choose(self.left())
        newest = self._newest()
        at = time.monotonic()
        for number, rank in enumerate(chosen):
            if number:
                time.sleep(fault.gap_s)
            try:
                os.kill(newest[rank].pid, _SIGNALS[fault.kind])
            except ProcessLookupError:
                return None
            self.hurt.add(newest[rank].pid)
        return InjectedFault(fault, at, tuple(chosen))

    def _newest(self) -> dict[int, RankStamps]:
        """Return the stamps of each rank's newest process, by rank."""
        by_begin = sorted(self.stamps.ranks, key=lambda each: each.begun)
        return dict(sorted({each.rank: each for each in by_begin}.items()))

    def end(self) -> None:
        """End it with all its processes, and note its leftovers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.code is None:
                # The launcher passes SIGTERM on; it ends its ranks, which may be stopped.
                self._process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_TIMEOUT_S)
        wait_until(lambda: not processes_of(self.folder), _GRACE_S)
        left = processes_of(self.folder)
        self.left_processes += len(left)
        kill(left)
        self.left_files = sorted(os.listdir(self._temporary))


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """Settings of the jobs of a case."""

    options: ChaosOptions
    source: str
    """Training data."""
    folder: str
    """New folder; all jobs share a cache there."""

    def samples(self) -> int:
        """Return the number of samples of the training data."""
        from dlio.data.reader import open_reader

        with closing(open_reader(self.source)) as reader:
            return len(reader)

    def clock(self, kinds: Sequence[str]) -> FaultClock:
        """Return a clock with the schedule of faults of some kinds."""
        own = self.options
        return FaultClock(make_schedule(kinds, own.kills, own.every, own.spacing, own.seed))

    def train_argv(self, folder: str, more: Sequence[str], model: str | None = None) -> list[str]:
        """Return the command of a `dlio train` with more options that stamps its steps into
        `folder`."""
        own = self.options
        inside = (
            f"dlio_bench.chaos.stamps:StampWriter(folder={folder!r}, bench={os.getpid()}, "
            f"pause_ms={own.pause_ms})"
        )
        return [
            *(sys.executable, "-m", "dlio.cli", "train", self.source),
            *("--batch-size", str(own.batch_size), "--image-size", str(IMAGE_SIZE)),
            *("--model", model or own.model, "--epochs", str(own.epochs), "--seed", str(own.seed)),
            *("--exchange", own.exchange, "-n", str(own.ranks)),
            *("--trace", f"{folder}/trace.jsonl", "--report", f"{folder}/report.json"),
            *("--callback", inside, *more),
        ]

    def job(
        self, argv: Sequence[str], folder: str, environment: Mapping[str, str] | None = None
    ) -> ChaosJob:
        """Start a job; see `ChaosJob`."""
        cache = os.path.join(self.folder, "cache")
        return ChaosJob(argv, folder, cache, self.options.deadline, environment)
