"""The benchmark suite: `dlio bench`. Every figure is measured beside what it is compared with."""

import typer

from dlio_bench import exchange, loader, prune, readers, shuffle, staging, tiers

command = typer.Typer(
    help="Measure, side by side in one run, with medians and spread.", no_args_is_help=True
)
command.command("exchange")(exchange.command)
command.command("loader")(loader.command)
command.command("prune")(prune.command)
command.command("readers")(readers.command)
command.command("shuffle")(shuffle.command)
command.command("staging")(staging.command)
command.command("tiers")(tiers.command)
