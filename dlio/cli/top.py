"""`dlio top`: the jobs of this user on this machine, while they run."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from dlio.cli.option_groups import with_help
from dlio.errors import UsageError
from dlio.util.live_figures import ProcessFigures, ask_all
from dlio.util.options import Option
from dlio.util.printable import print_line

_ANSWER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Options of `dlio top`."""

    every: Annotated[
        float, Option("Seconds between two looks; rates are of this time.", metavar="SECONDS")
    ] = 1.0
    once: Annotated[bool, Option("Print one table, and end.")] = False
    as_json: Annotated[bool, Option("Print a line of JSON for each look.", name="json")] = False

    def __post_init__(self) -> None:
        if not _LEAST_S <= self.every <= _MOST_S:
            raise UsageError(f"--every {self.every:g}: give {_LEAST_S:g} to {_MOST_S:g} seconds")


_LEAST_S: Final = 0.1
_MOST_S: Final = 3600.0


@with_help(
    "dlio top",
    "dlio top --once --json",
    "srun --jobid 4711 --overlap dlio top --once",
)
def command(options: TopOptions) -> None:
    """Show tiers, reads by place, stalls, progress and trials of this user's running jobs.

    Asks all processes of dlio on this machine that read data, train, search, stage or pack. On a
    terminal the table is drawn until Ctrl-C; elsewhere it is printed once, as with --once.
    """
    try:
        if options.as_json:
            _print_json(options)
        elif options.once or not sys.stdout.isatty():
            _print_once(options)
        else:
            _draw(options)
    except KeyboardInterrupt:
        return


def _print_json(options: TopOptions) -> None:
    while True:
        processes = [asdict(answer) for answer in ask_all(_ANSWER_S)]
        print(json.dumps({"time": time.time(), "processes": processes}), flush=True)
        if options.once:
            return
        time.sleep(options.every)


def _print_once(options: TopOptions) -> None:
    from rich.console import Console

    from dlio.cli.top_table import view

    before = ask_all(_ANSWER_S)
    if not before:
        print_line(_NOTHING)
        return
    time.sleep(options.every)
    Console().print(view(before, ask_all(_ANSWER_S)))


def _draw(options: TopOptions) -> None:
    from rich.live import Live

    from dlio.cli.top_table import view

    before: list[ProcessFigures] = []
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            now = ask_all(_ANSWER_S)
            live.update(view(before, now) if now else _NOTHING, refresh=True)
            before = now
            time.sleep(options.every)


_NOTHING: Final = "no process of this user reads data with dlio, trains, searches, stages or packs"
