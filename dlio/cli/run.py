"""`dlio run`: a script for one process, on many ranks."""

import sys
from typing import Annotated, Literal

import typer

from dlio.cli.ranks import started


def command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A training script of torch's.")],
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", help="Start this many ranks on this machine.", min=1),
    ] = None,
    exchange: Annotated[
        str, typer.Option(help="How ranks keep one model; as `dlio train --exchange`.")
    ] = "allreduce",
    batch: Annotated[
        Literal["global", "per-rank"],
        typer.Option(
            help="global: a batch of the script's is shared out, so its learning rate is right; "
            "per-rank: each rank has one, and steps become fewer."
        ),
    ] = "global",
    balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="Ranks that compute faster get more of each batch, from the second pass on.",
        ),
    ] = False,
    tiers: Annotated[
        str | None,
        typer.Option(help="ram:2GiB,/local/scratch:20GiB per node, for data that dlio can read."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a script that does not seed.", min=0)] = 0,
    pretend_nodes: Annotated[
        int | None, typer.Option(help="Behave as if the ranks were on that many nodes.")
    ] = None,
) -> None:
    """Run SCRIPT on many ranks, unchanged; what follows it are its own arguments.

    Its optimizers get the mean of all ranks' gradients, its DataLoaders give each rank a part of
    every batch, rank 0 prints and saves.
    """
    from dlio.storage.spec import choose_tiers
    from dlio.train.exchange.spec import parse_exchange

    parse_exchange(exchange)
    choose_tiers(tiers, 0)
    # As it was written, so that the script's own arguments stay its own.
    if started(ranks, _written):
        return

    from dlio.script.runner import RunOptions, run_script

    options = RunOptions(exchange, batch, tiers, seed, pretend_nodes, balance)
    run_script(script, context.args, options)


def _written() -> list[str]:
    # Options of dlio itself may stand before.
    return sys.argv[sys.argv.index("run") :]
