"""`dlio run`: run a single-process training script on many ranks."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import RankOptions
from dlio.comm.launch_detection import under_torchrun
from dlio.comm.launch_environment import under_mpi
from dlio.integrations.script.run_options import CheckPlan, RunOptions
from dlio.launch.command_ranks import on_ranks
from dlio.util.arguments import script_in
from dlio.util.options import CheckedOptions, Option


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its own arguments."""

    script: Annotated[
        str, Option("Training script, written for torch.", positional=True, metavar="SCRIPT")
    ]
    arguments: Annotated[
        tuple[str, ...], Option("Arguments of the script.", rest=True, metavar="ARGS")
    ] = ()


@dataclass(frozen=True, slots=True)
class CheckOptions(CheckedOptions):
    """A comparison with one process in place of a run."""

    check: Annotated[
        int | None,
        Option(
            "Run the script's first optimizer steps, this many, once in one process and once on "
            "the ranks of -n, or two, in scratch copies of its folder, and say where "
            "losses, gradients, weights, learning rates or printed lines differ, and why. Ends "
            "with code 1 if any does.",
            least=1,
            unit="steps",
        ),
    ] = None


@with_help(
    "dlio run -n 2 --check 5 train.py --epochs 3",
    "dlio run -n 2 train.py --epochs 3",
    "mpirun -n 64 dlio run --exchange hierarchical train.py",
    usual=(
        ("script", "Training script, written for torch; its arguments follow it"),
        "ranks",
        ("check", "Compare the first steps with one process's; says what differs"),
        *("batch", "exchange", "tiers", "seed"),
        ("fault_tolerance", "shrink: go on without ranks that are lost"),
    ),
)
def command(
    script: Script, options: RunOptions, checking: CheckOptions, ranks: RankOptions
) -> None:
    """Run a training script for one process, unchanged, on many ranks.

    Arguments after SCRIPT are its own. Its optimizers get the mean of all ranks' gradients, its
    DataLoaders give each rank a part of every batch, and only rank 0 prints and saves.
    """
    from dlio.storage.tier_spec import choose_tiers

    _hash_alike()
    choose_tiers(options.tiers, 0)  # An invalid one is reported before ranks are started.
    if checking.check is not None:
        from dlio.integrations.script.check import check_script

        sound = check_script(
            CheckPlan(checking.check, script.script, script.arguments),
            options,
            2 if ranks.ranks is None else ranks.ranks,
            ranks.backend,
        )
        if not sound:
            raise SystemExit(1)
        return
    least = None if options.fault_tolerance == "off" else options.min_ranks
    on_ranks(
        ranks.ranks,
        run_rank,
        script,
        options,
        check=lambda: script_in(script.script),
        min_ranks=least,
        backend=ranks.backend,
    )


def _hash_alike() -> None:
    """Start this rank again with the hashes of texts that all ranks have, if another launcher than
    dlio's has started it: sets of texts would have another order on each."""
    if "PYTHONHASHSEED" not in os.environ and (under_mpi() or under_torchrun()):
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def run_rank(script: Script, options: RunOptions) -> None:
    """Run the script as this rank."""
    from dlio.integrations.script.runner import run_script

    run_script(script.script, script.arguments, options)
