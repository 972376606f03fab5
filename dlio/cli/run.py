"""`dlio run`: run a single-process training script on many ranks."""

from dataclasses import dataclass
from typing import Annotated

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import RankOptions
from dlio.integrations.script.run_options import RunOptions
from dlio.launch.command_ranks import on_ranks
from dlio.util.options import Option


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its own arguments."""

    script: Annotated[
        str, Option("Training script, written for torch.", positional=True, metavar="SCRIPT")
    ]
    arguments: Annotated[
        tuple[str, ...], Option("Arguments of the script.", rest=True, metavar="ARGS")
    ] = ()


@with_help(
    "dlio run -n 2 train.py --epochs 3",
    "mpirun -n 64 dlio run --exchange hierarchical train.py",
)
def command(script: Script, options: RunOptions, ranks: RankOptions) -> None:
    """Run SCRIPT unchanged on many ranks; arguments after SCRIPT are passed to it.

    Its optimizers get the mean of all ranks' gradients, its DataLoaders give each rank a part of
    every batch, and only rank 0 prints and saves.
    """
    from dlio.storage.tier_spec import choose_tiers

    choose_tiers(options.tiers, 0)  # An invalid one is reported before ranks are started.
    least = None if options.fault_tolerance == "off" else options.min_ranks
    on_ranks(ranks.ranks, run_rank, script, options, min_ranks=least, backend=ranks.backend)


def run_rank(script: Script, options: RunOptions) -> None:
    """Run the script as this rank."""
    from dlio.integrations.script.runner import run_script

    run_script(script.script, script.arguments, options)
