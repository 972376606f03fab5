"""`--case storm`: jobs with faults, until all of the schedule are made."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from dlio.comm.survival.suspicion import FIRST_STEPS
from dlio.exchange.exchange_spec import parse_exchange
from dlio.train.ledger_file import read_lines
from dlio.util.units import counted
from dlio_bench.bench_processes import command_line
from dlio_bench.chaos.accounts import uneven_epochs
from dlio_bench.chaos.chaos_figures import JobRecord, RunRecord, figures_of, next_step, rows_of
from dlio_bench.chaos.chaos_job import ChaosCase, ChaosJob
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.leftovers import left_in_shared_memory, shared_memory
from dlio_bench.chaos.pretended_nodes import PretendedNodes, without_daemons
from dlio_bench.chaos.scheduled_faults import FaultClock, InjectedFault
from dlio_bench.chaos.stamps import steps_of
from dlio_bench.chaos.torchft_job import account, joins, read_batches, torchft_argv
from dlio_bench.results.terminal import steps

_WEIGHTS: Final = "weights.pt"
"""File in a job's folder."""
_POLL_S: Final = 0.01
_CHECKED: Final = 25
"""Steps after which ranks compare their weights."""
_IDLE: Final = 3
"""Processes in a row that make no step after which the bench gives up."""
_REPLACED: Final = {
    False: "Ranks are not replaced: the next job begins when too few are left.",
    True: "Spares replace lost ranks; the next job begins when too few are left.",
}


def measure(case: ChaosCase) -> dict[str, object]:
    """Make all faults of the schedule in jobs that shrink and, if wished, in others, too.

    `--restart` and `--torchft` add others.

    A job of n ranks and k spares takes n - 1 + k losses. Then it is left to finish, and the next
    one begins.

    Returns figures by way of surviving, and what was left behind.
    """
    options, samples, before = case.options, case.samples(), shared_memory()
    result: dict[str, dict[str, object]] = {}
    said = [
        f"{counted(options.ranks, 'rank')} a job; {counted(options.kills, 'fault')}, one in "
        f"{options.every:g} s of "
        f"steps; {counted(samples, 'sample')} an epoch. {_REPLACED[options.spares > 0]}"
    ]
    others = {"restart": options.restart, "torchft": options.torchft is not None}
    for mode in steps(("shrink", *(mode for mode, wanted in others.items() if wanted))):
        clock = case.clock(options.kinds)
        jobs: list[JobRecord] = []
        idle = 0
        while clock.faults and idle < _IDLE:
            own = os.path.join(case.folder, f"{mode}-{len(jobs) + 1}")
            job = _job(case, own, samples, mode, clock)
            jobs.append(job)
            idle = 0 if any(steps_of(run.ranks) for run in job.runs) else idle + 1
        if clock.faults:
            said.append(
                f"{mode}: not made: {counted(len(clock.faults), 'fault')}: jobs made no steps."
            )
        result[mode] = figures_of(mode, jobs, samples)
        errors = [job.runs[-1].errors.splitlines() for job in jobs if job.failed]
        reasons = dict.fromkeys(lines[-1] if lines else "it said nothing" for lines in errors)
        said += [f"{mode}: a job failed: {reason}" for reason in reasons]
    left = left_in_shared_memory(before)
    said.append(
        f"Left in shared memory: {', '.join(left) or 'nothing'}. Times are median, p90, p99 and "
        "max. The effective training time ratio is the time in steps that count over that from "
        "the first step to the end."
    )
    return {**result, "shared_memory_left": left, "rows": rows_of(result), "said": said}


class _Refill:
    """Has all ranks of a job begin again, on pretended nodes A and B; a state from which they can
    is kept after so many steps."""

    def __init__(self, folder: str, ranks: int, steps: int) -> None:
        self._steps = steps
        os.makedirs(f"{folder}-nodes")
        self._nodes = PretendedNodes(Path(f"{folder}-nodes"))
        self.environment, self.close = self._nodes.environment, self._nodes.close
        self._ranks = ranks
        self.times: list[tuple[float, float]] = []
        """Begin and end of each time."""
        self._begun = 0.0

    @property
    def is_under_way(self) -> bool:
        """True from the daemon's death until all ranks have come further."""
        return bool(self._begun)

    def look(self, job: ChaosJob, wanted: bool) -> None:
        """Kill a daemon if that is wanted, or see whether all ranks have come further.

        A job that comes no further in three starts ends.
        """
        if not self._begun:
            settled = not any(map(command_line, job.hurt))
            if wanted and settled and any(self._nodes.kill(node, "prted") for node in "BA"):
                self._begun = time.monotonic()
        elif job.steps_since(self._begun, self._ranks) > self._steps:
            self.times.append((self._begun, time.monotonic()))
            self._begun = 0.0


def _job(case: ChaosCase, folder: str, samples: int, mode: str, clock: FaultClock) -> JobRecord:
    """Run a job to its end, in several processes if it restarts; make faults meanwhile."""
    options, record = case.options, JobRecord()
    idle = 0
    while idle < _IDLE:
        own = os.path.join(folder, str(len(record.runs) + 1))
        if mode == "torchft":
            argv = torchft_argv(options, case.source, own, options.model)
        else:
            argv = case.train_argv(own, _options_of(mode, options, own, folder))
        run = _run(case, argv, own, mode, clock)
        record.runs.append(run)
        if mode != "restart" or run.code == 0:
            break
        idle = 0 if run.made and steps_of(run.ranks) else idle + 1
    last = record.runs[-1]
    if mode == "torchft":
        for rank, join in joins(last.ranks):
            rank.losses.append(join)
    if last.code == 0 and not last.hung:
        record.epochs = options.epochs
        if mode == "torchft":
            ledger = account(read_batches(own), last.ranks, options.epochs)
            record.dropped, record.beyond = ledger.dropped, ledger.beyond
            record.uneven = uneven_epochs(ledger.lines, samples, options.epochs)
            return record
        with open(f"{own}/report.json", encoding="utf-8") as file:
            record.other_weights = len(json.load(file)["restored"])
        # A run that is resumed has no trace of the steps before.
        if len(record.runs) == 1 and os.path.exists(f"{own}/trace.jsonl"):
            lines = read_lines(f"{own}/trace.jsonl")
            record.uneven = uneven_epochs(lines, samples, options.epochs)
            if options.replay:
                record.replay = _replay(case, own)
    return record


def _options_of(mode: str, options: ChaosOptions, own: str, folder: str) -> list[str]:
    """Return the options by which a `dlio train` survives."""
    if mode == "restart":
        more = ["--checkpoint", os.path.join(folder, "checkpoints"), "--resume"]
        return [*more, "--checkpoint-every", str(options.checkpoint_every)]
    more = ["--fault-tolerance", "shrink"]
    more += ["--nodes", "A,B"] if options.refill else ["--backend", options.backend]
    if parse_exchange(options.exchange).alike:
        more += ["--check-weights", str(_CHECKED)]
    more += ["--spares", str(options.spares)] if options.spares else []
    return more + (["--save", f"{own}/{_WEIGHTS}"] if options.replay else [])


def _replay(case: ChaosCase, folder: str) -> str:
    """Replay the trace of the job in a folder without faults; see `JobRecord.replay`."""
    own = f"{folder}-replay"
    more = ["--replay", f"{folder}/trace.jsonl", "--save", f"{own}/{_WEIGHTS}"]
    with case.job(case.train_argv(own, more), own) as job:
        while job.runs():
            time.sleep(_POLL_S)
        if job.code != 0:
            return "it hung" if job.hung else job.errors or f"exit code {job.code}"
    one, other = (torch.load(os.path.join(each, _WEIGHTS)) for each in (folder, own))
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return "equal" if same else "other"


def _run(
    case: ChaosCase, argv: Sequence[str], folder: str, mode: str, clock: FaultClock
) -> RunRecord:
    """Run a training to its end; make faults meanwhile."""
    options = case.options
    all_ranks = options.ranks + (options.spares if mode == "shrink" else 0)
    made: list[InjectedFault] = []
    refill = None
    with ExitStack() as stack:
        if options.refill and mode == "shrink":
            refill = _Refill(folder, options.ranks, parse_exchange(options.exchange).period)
            stack.callback(refill.close)
        environment = refill.environment if refill else None
        job = stack.enter_context(case.job(argv, folder, environment))
        while job.runs():
            takes = clock.faults[0].takes if clock.faults else 0
            spare = len(job.left()) > takes and (mode != "restart" or not made)
            # torchft's groups begin again, as further ones.
            ranks = job.stamps.ranks
            begun = len(ranks) >= all_ranks and any(each.steps for each in ranks)
            if refill is not None and begun:
                refill.look(job, bool(clock.faults) and not spare)
                begun = not refill.is_under_way
            # Nobody is suspected in the first steps, nor while two ranks compute, as two that hang
            # do: the run would end at its deadline.
            if mode == "shrink":
                if clock.faults and clock.faults[0].kind == "hang":
                    spare = spare and job.fewest_steps > FIRST_STEPS
                if made and made[-1].fault.kind == "hang":
                    spare = spare and next_step(ranks, made[-1]) is not None
            fault = clock.due(begun and spare)
            if fault is not None and (hurt := job.hurt_by(fault)) is not None:
                made.append(hurt)
                clock.faults.popleft()
            time.sleep(_POLL_S)
        clock.due(False)
        ended = time.monotonic()
        code = job.code
    return RunRecord(
        code=code,
        hung=job.hung,
        ranks=job.stamps.ranks,
        made=made,
        ended=ended,
        errors=job.errors,
        left_processes=job.left_processes,
        left_files=without_daemons(job.left_files) if refill else job.left_files,
        refills=refill.times if refill else [],
    )
