"""`dlio top`: the jobs of this user on this machine, while they run."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final

from dlio.cli.option_groups import with_help
from dlio.errors import printable
from dlio.storage.counters import PLACES
from dlio.util.json_output import json_text
from dlio.util.live_figures import Figures, ProcessFigures, ask_all
from dlio.util.options import CheckedOptions, Option
from dlio.util.printable import print_line
from dlio.util.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_ANSWER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TopOptions(CheckedOptions):
    """Options of `dlio top`."""

    every: Annotated[
        float,
        Option(
            "Time between two looks; rates are of this time.",
            metavar="SECONDS",
            unit="seconds",
            least=0.1,
            most=3600,
        ),
    ] = 1.0
    once: Annotated[bool, Option("Print one table, and end.")] = False
    as_json: Annotated[bool, Option("Print a line of JSON for each look.", name="json")] = False


@with_help(
    "dlio top",
    "dlio top --once --json",
    "srun --jobid 4711 --overlap dlio top --once",
)
def command(options: TopOptions) -> None:
    """Show tiers, reads, stalls, progress and trials of your running jobs.

    Asks all of your processes of dlio on this machine that read data, train, search, stage or
    pack. On a terminal the table is drawn until Ctrl-C; elsewhere it is printed once, as with
    --once.
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
        print(json_text({"time": time.time(), "processes": processes}), flush=True)
        if options.once:
            return
        time.sleep(options.every)


def _print_once(options: TopOptions) -> None:
    from rich.console import Console

    before = ask_all(_ANSWER_S)
    if not before:
        print_line(_NOTHING)
        return
    time.sleep(options.every)
    Console().print(view(before, ask_all(_ANSWER_S)))


def _draw(options: TopOptions) -> None:
    from rich.live import Live

    before: list[ProcessFigures] = []
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            now = ask_all(_ANSWER_S)
            live.update(view(before, now) if now else _NOTHING, refresh=True)
            before = now
            time.sleep(options.every)


_NOTHING: Final = "no process of this user reads data with dlio, trains, searches, stages or packs"


def view(before: Sequence[ProcessFigures], now: Sequence[ProcessFigures]) -> "RenderableType":
    """Return the tables of a look, with rates since an earlier one, `before`."""
    from rich.console import Group
    from rich.text import Text

    made = [_tiers(now), *_ranks(before, now), *_lines(now)]
    return Group(*(Text(each) if isinstance(each, str) else each for each in made if each))


def _tiers(now: Sequence[ProcessFigures]) -> "RenderableType | None":
    """Return the table of tiers, each once, however many ranks share it."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    rows = {
        (tier["root"], part["path"]): tier for part in _parts(now, "data") for tier in part["tiers"]
    }
    if not rows:
        return None
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for name in ("tier", "data set"):
        table.add_column(name, overflow="fold")
    for name in ("here", "of", "capacity"):
        table.add_column(name, justify="right", no_wrap=True)
    for (root, path), tier in rows.items():
        sizes = [format_bytes(tier[key]) for key in ("used", "wanted", "capacity")]
        place = "ram" if tier["kind"] == "ram" else root
        table.add_row(escape(printable(place)), escape(printable(path)), *sizes)
    return table


def _ranks(
    before: Sequence[ProcessFigures], now: Sequence[ProcessFigures]
) -> "Iterator[RenderableType]":
    """Return a table for each data set that processes read, with a row for each of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    earlier = {answer.pid: answer for answer in before}
    paths = dict.fromkeys(part["path"] for part in _parts(now, "data"))
    for path in paths:
        yield f"\n{printable(path)}, MiB/s by place:"
        table = Table(box=SIMPLE_HEAD, show_edge=False)
        for name in ("process", "rank", "progress", "samples/s", "waits", *PLACES):
            table.add_column(name, justify="left" if name == "progress" else "right", no_wrap=True)
        for answer in now:
            for row in _rows(earlier.get(answer.pid), answer, path):
                table.add_row(*row)
        yield table


def _rows(before: ProcessFigures | None, now: ProcessFigures, path: str) -> Iterator[list[str]]:
    """Return the rows of a process that has a data set open."""
    old = [part for part in _parts([before] if before else [], "data") if part["path"] == path]
    progress = "".join(
        f"epoch {part['epoch']}/{part['epochs']}, step {part['step']}/{part['steps']}"
        for part in _parts([now], "training")
    )
    for part in _parts([now], "data"):
        if part["path"] != path:
            continue
        rates = ["-"] * (2 + len(PLACES))
        if old and before is not None:
            seconds = max(now.time - before.time, 1e-3)
            waited = (part["waited_s"] - old[0]["waited_s"]) / seconds
            moved = [part["bytes"][place] - old[0]["bytes"][place] for place in PLACES]
            rates = [
                f"{(part['samples'] - old[0]['samples']) / seconds:,.0f}",
                f"{min(1.0, waited):.0%}",
                *(f"{each / seconds / (1 << 20):,.1f}" for each in moved),
            ]
        yield [str(now.pid), f"{part['rank']}/{part['ranks']}", progress, *rates]


def _lines(now: Sequence[ProcessFigures]) -> Iterator[str]:
    """Return a line for each search, and for each command that moves bytes."""
    for part in _parts(now, "search"):
        best = f"; best so far: {part['best']}" if part.get("best") else ""
        waiting = f", {len(part['waiting'])} wait for others" if part["waiting"] else ""
        yield printable(
            f"search {part['study']}: {part['ended']} of {counted(part['trials'], 'trial')} ended, "
            f"{len(part['running'])} running{waiting}{best}"
        )
    for part in _parts(now, "work"):
        total = f" of {format_bytes(part['total'])}" if part["total"] else ""
        yield printable(f"{part['title']}: {format_bytes(part['done'])}{total}")


def _parts(answers: Sequence[ProcessFigures], kind: str) -> Iterator[Figures]:
    """Return the figures of one kind, but for those that their owner could not give."""
    for answer in answers:
        for part in answer.parts:
            if part.get("kind") == kind and "problem" not in part:
                yield part
