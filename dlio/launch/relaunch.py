"""The launcher of jobs that start again by themselves: on several nodes, or from checkpoints.

    agents ready -> mpirun -> done
          ^           |  mpirun has ended without the ranks' own end, or a node's agent is lost
          |           v
          +--- kill the old ranks, choose the nodes that are left

mpirun's exit code says nothing here: Open MPI 5.0 ends with 0 when it has lost a daemon. Ranks
leave a file at their end.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Final

import dlio.launch.node.shim
from dlio.launch import mpi_launch
from dlio.launch.agent_links import Agents, remote_shell
from dlio.launch.job_folder import name_of_job, open_job_folder
from dlio.launch.node.agent_protocol import job_folder
from dlio.launch.node.job_starts import Incident, JobStart, Patience, living, spread
from dlio.launch.node_requests import Growth, NodeRequests
from dlio.launch.rank_environment import rank_environment, root_permission
from dlio.launch.rank_output import ErrorFilter, RankOutput
from dlio.util.child_processes import end_groups, module_command
from dlio.util.cores import available_cores
from dlio.util.live_line import LiveLine
from dlio.util.plugins import plugins
from dlio.util.settings import DONE, LAUNCHER, MIN_RANKS, START
from dlio.util.signals import receiving
from dlio.util.threads import Workers
from dlio.util.units import counted
from dlio.util.whole_files import remove_file

_KILLED: Final = 1
_FEW: Final = 2
_END_TIMEOUT_S: Final = 1.0
_STDERR_TIMEOUT_S: Final = 10.0
ZYGOTE_MODULES: Final = (
    "numpy",
    "torch",
    "torch._dynamo",  # Optimizers import it.
    "numpy.random",
    "mpi4py",
    "rich.console",
    "rich.table",
    "dlio.launch.command_ranks",
    "dlio.cli.train_command",
    "dlio.storage.shard_file",
    "dlio.train.callbacks.early_stopping",
    "dlio.train.callbacks.nan_guard",
    "dlio.exchange.asgd",
    "dlio.exchange.synchronous_sgd",
    "dlio.exchange.node_gossip",
    "dlio.exchange.local_sgd",
    "dlio.train.optimizers",
    "dlio.train.trainer",
)
"""Modules that ranks need, for the zygote; importing torch alone takes seconds."""


@dataclass(frozen=True, slots=True)
class RestartableJob:
    """A job that may start again."""

    module: str
    """Module that ranks run."""
    argv: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str]
    """Variables of the ranks, in addition to this process's own."""
    nodes: tuple[str, ...]
    """Nodes to start ranks on; none for this machine alone, without agents."""
    survives: bool
    """True if ranks go on when others are lost."""
    again: bool
    """True if ranks are started again when they cannot go on."""
    min_ranks: int
    """Fewest ranks that are started again."""
    progress: Callable[[], int]
    """Returns how far the training is by its files, a number that grows."""
    live: LiveLine
    """Draws the progress that ranks tell of."""
    leftovers: Callable[[str], Sequence[str]]
    """Returns files that a job of a certain token leaves if it fails."""


def run(job: RestartableJob) -> int:
    """Run a job, start it again where it cannot go on, and return its exit code.

    Raises UsageError if mpirun is not installed, or if a node cannot be reached.
    """
    mpirun, token = mpi_launch.find_mpirun(), secrets.token_hex(8)
    code = _KILLED
    with ExitStack() as stack:
        stack.callback(lambda: _remove(job.leftovers(token) if code else ()))
        environment = _environment(job)
        folder = stack.enter_context(open_job_folder())
        agents = requests = None
        if job.nodes:
            readers = {entry.module for entry in plugins("dlio.readers")}
            modules = [*ZYGOTE_MODULES, *sorted(readers)]
            agents = stack.enter_context(Agents(job.nodes, token, environment, modules))
            if job.survives:
                requests = NodeRequests(folder, job.nodes)
                name = name_of_job(folder)
                said = f"job {name}: `dlio join {name} --nodes d` takes in a node d\n"
                job.live.write(sys.stdout, [said])
        code = _JobStarts(job, mpirun, token, environment, agents, folder, requests).run()
    return code


class _Mpirun:
    """A running mpirun, and what it writes to stderr. Its owner calls `end`, then `close`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, live: LiveLine
    ) -> None:
        self._output = RankOutput(1, live, ErrorFilter(survives=True))
        self.process = mpi_launch.started(command, environment, self._output, folder)
        self._ending: Workers | None = None

    def end(self) -> None:
        """End it when its ranks are gone; returns at once."""
        self._ending = Workers(
            "dlio-mpirun-end",
            lambda _: end_groups([self.process], _END_TIMEOUT_S),
            stop_timeout_s=_STDERR_TIMEOUT_S,
        ).start()

    def ask_to_end(self) -> None:
        """Have its ranks write a checkpoint and end."""
        self._output.sorter.interrupted = True
        self.process.send_signal(signal.SIGUSR1)

    def interrupt(self, by_user: bool) -> None:
        """End it together with its ranks, and wait for that."""
        self._output.sorter.interrupted = by_user
        mpi_launch.end(self.process)

    def close(self) -> None:
        """Wait until it has ended and all that it wrote has been passed on."""
        if self._ending is not None:
            self._ending.close()
        # A remote shell to a lost node may hold the other end for longer.
        self._output.close()


class _JobStarts:
    """The starts of a job.

    `folder` is the job's; without agents, ranks leave a file there at their end. `requests` are
    for other nodes; None where ranks cannot pause for that.
    """

    def __init__(
        self,
        job: RestartableJob,
        mpirun: str,
        token: str,
        environment: dict[str, str],
        agents: Agents | None,
        folder: str,
        requests: NodeRequests | None,
    ) -> None:
        self._job, self._program, self._token = job, mpirun, token
        self._environment, self._agents, self._folder = environment, agents, folder
        self._placed = spread(job.ranks, job.nodes or ("",))
        self._ranks = living(self._placed, ())
        self._incidents: list[Incident] = []
        self._patience = Patience()
        self._noticed = 0.0
        self._next_rank = job.ranks
        self._per_node = max(len(ranks) for ranks in self._placed.values())
        self._growth = None
        if requests is not None and agents is not None:
            self._growth = Growth(agents, requests, self._per_node, job.min_ranks)
        self._mpiruns: list[_Mpirun] = []
        """Of all starts: with agents, one may be ending while the next begins."""

    def run(self) -> int:
        """Start ranks until they have reached their end; returns the exit code."""
        try:
            return self._run()
        finally:
            for each in self._mpiruns:
                each.close()

    def _run(self) -> int:
        number = 0
        while True:
            before = self._ranks
            code, turn = self._start(number)
            if code is not None:
                return code
            self._ranks = living(self._placed, self._lost())
            gone = [rank for rank in before if rank not in self._ranks]
            is_planned = self._growth is not None and self._growth.has_paused
            if gone or not is_planned:
                self._note("restart", gone)
            self._change()
            if not is_planned and (reason := self._reason_to_end(turn)):
                self._job.live.write(sys.stderr, [f"dlio: error: {reason}\n"])
                return _FEW
            number += 1

    def _note(self, kind: str, ranks: Sequence[int]) -> None:
        node_of = {rank: node for node, placed in self._placed.items() for rank in placed}
        nodes = tuple(node_of[rank] for rank in ranks)
        self._incidents.append(Incident(tuple(ranks), nodes, self._noticed, kind))

    def _change(self) -> None:
        """Take in the nodes that are to join, and leave out those that leave."""
        change = None if self._growth is None else self._growth.apply()
        if change is None:
            return
        left = [rank for node in change.left for rank in self._placed[node]]
        if left:
            self._note("left", left)
        for node in change.left:
            del self._placed[node]
        joined: list[int] = []
        for node in change.joined:
            self._placed.pop(node, None)  # Ranks that come back get numbers of their own.
            ranks = tuple(range(self._next_rank, self._next_rank + self._per_node))
            self._placed[node], self._next_rank = ranks, self._next_rank + self._per_node
            joined += ranks
        if joined:
            self._note("joined", joined)
        self._ranks = living(self._placed, self._lost())

    def _reason_to_end(self, turn: int) -> str:
        """Return the reason why ranks are not started again; empty if they are."""
        lost = ", ".join(self._lost())
        if not self._job.again:
            return f"the ranks have ended{f'; lost nodes: {lost}' if lost else ''}"
        if len(self._ranks) < max(1, self._job.min_ranks):
            return (
                f"{counted(len(self._ranks), 'rank')} left (lost nodes: {lost}), and "
                "--min-ranks is "
                f"{self._job.min_ranks}: this job ends"
            )
        if not self._patience.allows(max(turn, self._job.progress())):
            return (
                "ranks were started again three times and came no further: this job ends; see "
                "the errors above"
            )
        return ""

    def _lost(self) -> list[str]:
        return [] if self._agents is None else self._agents.lost

    def _start(self, number: int) -> tuple[int | None, int]:
        """Run mpirun; return the exit code if the job is over, and the newest snapshot's turn."""
        job = self._job
        incidents = tuple(self._incidents)
        record = JobStart(number, self._token, job.ranks, self._ranks, incidents, time.time())
        own = {START: json.dumps(asdict(record))}
        done_file = os.path.join(self._folder, f"done-{number}")
        if self._agents is None:
            own |= {DONE: done_file, LAUNCHER: str(os.getpid())}
        else:
            self._agents.start(number, own)
        command = self._command(number)
        mpirun = _Mpirun(command, {**self._environment, **own}, self._folder, job.live)
        self._mpiruns.append(mpirun)
        try:
            with receiving(mpirun.ask_to_end):
                code = self._watch(mpirun.process, done_file)
            turn = -1
            if self._agents is not None:
                turn = self._agents.stop()
                code = self._agents.done
        except BaseException as error:
            mpirun.interrupt(isinstance(error, KeyboardInterrupt))
            raise
        mpirun.end()
        if self._agents is None:
            mpirun.close()  # It takes its ranks along.
        return code, turn

    def _watch(self, process: "subprocess.Popen[bytes]", done_file: str) -> int | None:
        """Return when mpirun has ended, when a rank has failed or a node is lost.

        Returns the exit code that a rank has left.
        """
        lost = len(self._lost())
        watch = os.pidfd_open(process.pid)
        try:
            while True:
                if self._agents is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(mpi_launch.LOOK_S)
                    ended, code = process.poll() is not None, mpi_launch.code_of(done_file)
                else:
                    ended, code = self._agents.look(watch), self._agents.done
                paused = None
                if self._growth is not None:
                    paused = self._growth.attend(self._placed)
                if ended or code or paused is not None or len(self._lost()) > lost:
                    self._noticed = time.time() if paused is None else paused
                    return mpi_launch.code_of(done_file) if self._agents is None else code
        finally:
            os.close(watch)

    def _command(self, number: int) -> list[str]:
        job = self._job
        options = ["--bind-to", "none"]
        if job.survives:
            options += mpi_launch.SURVIVING
        if self._agents is None:
            if len(self._ranks) > available_cores():
                options.append("--oversubscribe")
            rank = module_command(job.module)
        else:
            slots = {n: ranks for n, ranks in self._placed.items() if n in self._agents.living}
            hosts = ",".join(f"{node}:{len(ranks)}" for node, ranks in slots.items() if ranks)
            shell = " ".join(remote_shell())
            options += ["--mca", "plm_ssh_agent", shell, "--host", hosts, "--map-by", "slot"]
            shim = os.path.abspath(dlio.launch.node.shim.__file__)
            folder = job_folder(self._token, "{node}")
            rank = [sys.executable, "-I", "-S", shim, folder, str(number), job.module]
        return [self._program, *options, "-n", str(len(self._ranks)), *rank, *job.argv]


def _environment(job: RestartableJob) -> dict[str, str]:
    per_node = -(-job.ranks // max(1, len(job.nodes)))
    full = {**rank_environment(per_node, job.live), **root_permission()}
    if not job.nodes:
        full = {**mpi_launch.ONE_NODE, **full}
    if job.survives:
        full = {**mpi_launch.SURVIVING_ENVIRONMENT, **full, MIN_RANKS: str(job.min_ranks)}
    return {**full, **job.environment}


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            remove_file(path)
