"""`dlio run --check`: a script's first steps in one process and on ranks, compared.

Sums are taken in another order on ranks, so that values are equal within a bound, not to the bit.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.errors import UsageError
from dlio.integrations.script.run_options import CheckPlan, RunOptions
from dlio.integrations.script.scratch_folder import ScratchFolder, remove_outside
from dlio.integrations.script.step_comparison import Comparison, compare
from dlio.integrations.script.step_records import ScriptRecord, load_record, recorded
from dlio.launch.command_ranks import captured_ranks
from dlio.util.arguments import script_in
from dlio.util.printable import print_line
from dlio.util.units import counted
from dlio.util.whole_files import FULL, unwritable

_ALONE_S: Final = 3600.0
"""Deadline of the steps in one process."""
_SLOWER: Final = 20
"""Ranks get this many times the seconds of one process, and a minute."""
_TIMEOUT_S: Final = "60"
"""Deadline of a rank's waits for others, unless DLIO_TIMEOUT is set."""


def check_script(plan: CheckPlan, options: RunOptions, ranks: int, backend: str) -> bool:
    """Run a script's first steps in one process and on ranks, and print how they compare.

    Returns True if they are the same.

    Raises UsageError if the script does not run in one process, or the options do not let it do
    the same on ranks.
    """
    if under_mpi() or under_torch():
        raise UsageError(
            "--check starts its runs itself: `dlio run -n 2 --check 5 train.py`, without a launcher"
        )
    if ranks < 2:
        raise UsageError(f"-n {ranks}: --check compares one process with 2 ranks or more")
    if options.batch != "global":
        raise UsageError(
            f"--batch {options.batch} makes other steps than one process: leave it out of --check"
        )
    script_in(plan.script)
    options = replace(options, fault_tolerance="off", min_ranks=1, balance=False)
    plan = replace(plan, home=os.path.realpath(os.getcwd()))
    try:
        return _check_below(plan, options, ranks, backend)
    except OSError as error:
        if error.errno not in FULL:
            raise
        place = f"TMPDIR: {error.filename or tempfile.tempdir}"
        raise unwritable(place, error) from error


def _check_below(plan: CheckPlan, options: RunOptions, ranks: int, backend: str) -> bool:
    """Make both runs in a temporary folder. Raises OSError if it cannot be written."""
    with tempfile.TemporaryDirectory(prefix="dlio-check-", ignore_cleanup_errors=True) as folder:
        print_line(
            f"dlio run --check: {plan.steps} steps of {plan.script}, in one process and on {ranks} "
            f"ranks, in scratch copies of the working folder below {folder}, removed at the end"
        )
        return _check(plan, options, ranks, backend, os.path.realpath(folder))


def _check(plan: CheckPlan, options: RunOptions, ranks: int, backend: str, folder: str) -> bool:
    """Make both runs below an empty folder, and print how they compare."""
    began = time.monotonic()
    alone = _run(plan, options, 1, backend, folder, _ALONE_S)
    if alone.reason is not None or alone.records[0] is None:
        raise UsageError(f"{plan.script} does not run in one process: {alone.reason}")
    limit_s = 60 + _SLOWER * (time.monotonic() - began)
    together = _run(plan, options, ranks, backend, folder, limit_s)
    for note in together.notes:
        print_line(note)
    records = [each for each in together.records if each is not None]
    return _say(
        compare(alone.records[0], records if len(records) == ranks else [], options.exchange),
        together.reason,
        alone.records[0],
        ranks,
        plan.steps,
    )


def check_rank(plan: CheckPlan, options: RunOptions) -> None:
    """Run the steps as this rank, and leave a record."""
    from dlio.integrations.script.runner import run_script

    sys.dont_write_bytecode = True
    os.environ.setdefault("WANDB_MODE", "disabled")  # Nor does it leave anything elsewhere.
    scratch = ScratchFolder(plan.root, plan.home)
    scratch.enter()
    script = os.path.realpath(os.path.join(plan.home, plan.script))
    if script.startswith(plan.home + os.sep):
        # A real file, so that the script also finds and makes files next to it.
        script = os.path.relpath(script, plan.home)
        scratch.own(script, changes=True)

    def moved(argument: str) -> str:
        name, equals, path = argument.rpartition("=")
        if path == plan.home or path.startswith(plan.home + os.sep):
            return f"{name}{equals}{scratch.place(path)}"
        return argument

    def observed(rank: int, weight: Callable[[], float]) -> AbstractContextManager[None]:
        return recorded(ScriptRecord(plan.records, rank), plan.steps, weight)

    run_script(script, [moved(each) for each in plan.arguments], options, observed)


class _CheckedRun:
    """A run that has ended: its records, and the lines that it printed about itself."""

    def __init__(self, records: list[ScriptRecord | None], code: int, errors: str) -> None:
        self.records = records
        lines = [line for line in errors.splitlines() if line.strip()]
        self.notes = [line for line in lines if line.startswith("dlio run: ")]
        self.reason: str | None = None
        """Why the run ended early; None if it did not."""
        if code:
            ours = [line for line in lines if line.startswith("dlio: error: ")]
            # The last line of a traceback, before the launcher's boilerplate.
            raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
            last = (ours or raised or lines or [f"exit code {code}"])[-1]
            self.reason = last.removeprefix("dlio: error: ")


def _run(
    plan: CheckPlan, options: RunOptions, ranks: int, backend: str, folder: str, limit_s: float
) -> _CheckedRun:
    root = os.path.join(folder, "one" if ranks == 1 else "ranks")
    scratch = ScratchFolder(root, plan.home)
    scratch.make()
    plan = replace(plan, root=root, records=scratch.records)
    environment = {"DLIO_TIMEOUT": os.environ.get("DLIO_TIMEOUT", _TIMEOUT_S)}
    try:
        done = captured_ranks(
            ranks,
            check_rank,
            plan,
            options,
            backend=backend,
            environment=environment,
            timeout_s=limit_s,
        )
        code, errors = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        code, errors = 1, f"it did not end within {limit_s:.0f} s"
    finally:
        remove_outside(scratch.made)
    records = [load_record(plan.records, rank) for rank in range(ranks)]
    return _CheckedRun(records, code, errors)


def _say(
    comparison: Comparison, reason: str | None, alone: ScriptRecord, ranks: int, steps: int
) -> bool:
    """Print the result of a check; True if all is the same."""
    done = len(alone.steps)
    if done < steps:
        print_line(f"the script makes {done} optimizer steps, fewer than {steps}")
    if reason is not None:
        print_line(f"on {counted(ranks, 'rank')} it stopped: {reason}")
    for line in comparison.lines:
        print_line(line)
    for cause in comparison.causes:
        print_line(f"likely cause: {cause}")
    if not done and not alone.losses:
        print_line("nothing was compared: the script made no step of a torch optimizer")
        return False
    if reason is not None or comparison.lines:
        return False
    if not done:
        print_line(
            f"the same for {len(alone.losses)} losses; gradients and weights were not compared, as "
            "the script made no step of a torch optimizer"
        )
        return True
    print_line(
        f"the same for {done} steps (largest difference {comparison.largest:.1e} of a gradient's "
        f"norm, bound {comparison.bound:.0e})"
    )
    return True
