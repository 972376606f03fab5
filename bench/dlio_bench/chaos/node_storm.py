"""`--case nodes`: jobs on pretended nodes, of which whole ones are lost and join again."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlio.errors import UsageError
from dlio.train.ledger_file import read_lines
from dlio.util.units import counted
from dlio_bench.bench_processes import command_line
from dlio_bench.chaos.accounts import (
    UnevenEpoch,
    effective_time,
    quantiles,
    uneven_epochs,
    uneven_totals,
)
from dlio_bench.chaos.chaos_figures import joining_times, shown_rows
from dlio_bench.chaos.chaos_job import ChaosCase, ChaosJob
from dlio_bench.chaos.leftovers import left_in_shared_memory, shared_memory
from dlio_bench.chaos.pretended_nodes import PretendedNodes, may_pretend, without_daemons
from dlio_bench.chaos.scheduled_faults import FaultClock
from dlio_bench.chaos.stamps import steps_of

_NAMES: Final = "ABCDEF"
_POLL_S: Final = 0.01
_JOIN_TIMEOUT_S: Final = 120.0
_SHOWN: Final = {
    "faults": "faults made",
    "jobs": "jobs",
    "hangs": "hangs",
    "failed_jobs": "jobs that failed",
    "samples_lost": "samples lost",
    "samples_doubled": "samples doubled",
    "ledger_problems": "wrong lines of traces",
    "node_next_step_s": "node lost to the next step of all, s",
    "cut_next_step_s": "node cut off to the next step of all, s",
    "steps_redone_most": "steps redone at a loss, at most",
    "joined": "nodes that joined again",
    "joining_s": "others held by them, s",
    "ettr": "effective training time ratio",
    "left_processes": "processes left",
    "left_files": "temporary files left",
}


@dataclass(slots=True)
class Outage:
    """A node that was lost or cut off."""

    kind: str
    node: str
    at: float
    """Time of the fault, by the machine's monotonic clock."""
    until: float | None = None
    """Time when all ranks had finished their first step after it; None if none has."""


@dataclass(slots=True)
class NodeJob:
    """One job, and its report."""

    outages: list[Outage] = field(default_factory=list)
    code: int | None = None
    hung: bool = False
    errors: str = ""
    uneven: list[UnevenEpoch] | None = None
    """Epochs with lost or doubled samples; None without a trace of the whole job."""
    losses: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    counted_s: float = 0.0
    wall_s: float = 0.0
    left_processes: int = 0
    left_files: list[str] = field(default_factory=list)


def measure(case: ChaosCase) -> dict[str, object]:
    """Lose nodes by a schedule; each joins again when the others have gone on.

    Raises UsageError where nodes cannot be pretended, or for ranks that do not fit them.
    """
    options = case.options
    if not may_pretend():
        raise UsageError("--case nodes: this user may not have UTS namespaces; run it as root")
    if options.ranks % options.nodes:
        raise UsageError(f"--nodes {options.nodes}: -n {options.ranks} is not a multiple of it")
    samples, before = case.samples(), shared_memory()
    clock, jobs, idle = case.clock(options.node_kinds), list[NodeJob](), 0
    while clock.faults and idle < 2:
        remaining = len(clock.faults)
        jobs.append(_job(case, os.path.join(case.folder, str(len(jobs) + 1)), samples, clock))
        idle = 0 if len(clock.faults) < remaining else idle + 1
    figures = figures_of_nodes(jobs)
    left = left_in_shared_memory(before)
    said = [
        f"{options.ranks} ranks on {options.nodes} pretended nodes of this machine, "
        f"{samples:,} samples an epoch. A lost node joins again once the others have gone on. "
        "Folders of its daemon stay, as on a node that has lost its power.",
        f"Left in shared memory: {', '.join(left) or 'nothing'}. Times are median, p90, p99 and "
        "max.",
    ]
    if clock.faults:
        said.append(f"{counted(len(clock.faults), 'fault')} left out: jobs made no steps.")
    said += [f"a job failed: {job.errors.splitlines()[-1:]}" for job in jobs if job.code]
    rows = shown_rows(_SHOWN, {"value": figures})
    return {**figures, "shared_memory_left": left, "rows": rows, "said": said}


def figures_of_nodes(jobs: Sequence[NodeJob]) -> dict[str, object]:
    """Return the figures of jobs whose nodes were lost."""
    outages = [each for job in jobs for each in job.outages]
    losses = [loss for job in jobs for loss in job.losses if loss["kind"] == "restart"]
    joins = [change for job in jobs for change in job.changes if change["kind"] == "joined"]
    wall_s = sum(job.wall_s for job in jobs)
    idle = {
        kind: quantiles([o.until - o.at for o in outages if o.kind == kind and o.until is not None])
        for kind in ("node", "cut")
    }
    return {
        "faults": dict(Counter(each.kind for each in outages)),
        "unnoticed": sum(each.until is None for each in outages),
        "jobs": len(jobs),
        "hangs": sum(job.hung for job in jobs),
        "failed_jobs": sum(job.code != 0 and not job.hung for job in jobs),
        **uneven_totals([job.uneven for job in jobs]),
        "node_next_step_s": idle["node"],
        "cut_next_step_s": idle["cut"],
        "steps_redone_most": max((loss["steps_again"] for loss in losses), default=None),
        "joined": len(joins) or None,
        "joining_s": quantiles([join["seconds"] for join in joins]),
        "ettr": sum(job.counted_s for job in jobs) / wall_s if wall_s else None,
        "phases": [loss.get("phases", {}) for loss in losses],
        "left_processes": sum(job.left_processes for job in jobs),
        "left_files": sorted({name for job in jobs for name in job.left_files}),
    }


class _World:
    """The nodes that a job has, and whether all of their ranks make steps."""

    def __init__(
        self, job: ChaosJob, nodes: PretendedNodes, names: Sequence[str], per_node: int
    ) -> None:
        self._job, self._nodes, self._per_node = job, nodes, per_node
        self.names = list(names)
        self.lost = ""
        """Node that has not joined again yet."""
        self._join: subprocess.Popen[bytes] | None = None
        self._since = 0.0
        """Processes that began before are those of an earlier start."""

    def first_steps(self) -> float | None:
        """Return when all ranks had finished their first step; None while one has not."""
        firsts = [
            each.steps[0]["t"]
            for each in self._job.stamps.ranks
            if each.steps and each.begun > self._since and command_line(each.pid)
        ]
        wanted = len(self.names) * self._per_node
        return max(firsts) if self._join is None and len(firsts) == wanted else None

    def lose(self, kind: str, pick: float) -> Outage:
        """Make a fault at one of the nodes."""
        name = self.names.pop(int(pick * len(self.names)))
        self.lost = name
        self._since = time.monotonic()
        if kind == "cut":
            self._nodes.cut(name)
        else:
            self._nodes.lose(name)
        return Outage(kind, name, self._since)

    def join_again(self) -> None:
        """Ask that the lost node joins, and note when its agent is ready."""
        if self._join is None:
            name = re.findall(r"^job (\w+):", self._job.output, re.MULTILINE)[-1]
            argv = ["-m", "dlio.cli", "join", name, "--nodes", self.lost]
            self._join = subprocess.Popen([sys.executable, *argv], env=self._job.environment)
            self._deadline = time.monotonic() + _JOIN_TIMEOUT_S
        elif self._join.poll() == 0:
            # The others train until its ranks begin, with all others, once more.
            self.names.append(self.lost)
            self._join, self.lost = None, ""
        elif self._join.poll() is not None or time.monotonic() > self._deadline:
            self.close()
            self._join = None

    def close(self) -> None:
        """End a request that is under way."""
        if self._join is not None:
            self._join.kill()
            self._join.wait()


def _job(case: ChaosCase, folder: str, samples: int, clock: FaultClock) -> NodeJob:
    """Run a job to its end; make faults meanwhile."""
    options, record = case.options, NodeJob()
    own = os.path.join(folder, "run")
    os.makedirs(folder)
    names = _NAMES[: options.nodes]
    more = ["--nodes", ",".join(names), "--fault-tolerance", "shrink"]
    argv = case.train_argv(own, more)
    with closing(PretendedNodes(Path(folder))) as nodes:
        if "cut" in options.node_kinds:
            nodes.relay()
        with (
            case.job(argv, own, nodes.environment) as job,
            closing(_World(job, nodes, names, options.ranks // options.nodes)) as world,
        ):
            while job.runs():
                steps = world.first_steps()
                if record.outages and record.outages[-1].until is None:
                    record.outages[-1].until = steps
                elif world.lost:
                    world.join_again()
                fault = clock.due(steps is not None and not world.lost)
                if fault is not None:
                    record.outages.append(world.lose(fault.kind, fault.picks[0]))
                    clock.faults.popleft()
                time.sleep(_POLL_S)
            clock.due(False)
            nodes.close()
            record.code, record.hung = job.code, job.hung
    record.errors = job.errors
    record.left_processes = job.left_processes
    record.left_files = without_daemons(job.left_files)
    report, trace = (os.path.join(own, name) for name in ("report.json", "trace.jsonl"))
    if os.path.exists(report):
        with open(report, encoding="utf-8") as file:
            wrote = json.load(file)
        record.losses, record.changes = wrote["losses"], wrote["changes"]
    if record.code == 0 and os.path.exists(trace):
        record.uneven = uneven_epochs(read_lines(trace), samples, options.epochs)
    disturbed = [(each.at, each.until or float("inf")) for each in record.outages]
    disturbed += joining_times(job.stamps.ranks)
    effective = effective_time([steps_of(job.stamps.ranks)], disturbed)
    record.counted_s, record.wall_s = effective.counted_s, effective.wall_s
    return record
