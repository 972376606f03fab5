"""Tables, notes and progress of benchmarks on a terminal.

    with working("loader"):
        expect(10)
        for ...:
            advance("torch")

The bar is drawn on standard error, where that is a terminal, or by the launcher of ranks; elsewhere
a line is printed there now and then. `expect` and `advance` may be called by any function below
`working`; without it they do nothing.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlio.comm.launch_environment import shows_terminal
from dlio.util.live_line import tell_launcher, tells_launcher
from dlio.util.printable import print_line
from dlio.util.progress_bar import ProgressBar
from dlio_bench.results.report_values import Figure, Ratio, labels_text

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
_WIDE: Final = 130
"""Columns of tables that go to a file or a pipe."""
_NEWS_EVERY_S: Final = 30.0
"""Least time between lines of progress where no bar is drawn."""


@dataclass(slots=True)
class _TerminalWork:
    title: str
    bar: ProgressBar | None
    """None where the launcher draws it."""
    total: float = 0
    done: float = 0
    told_at: float = field(default_factory=time.monotonic)

    def show(self, note: str | None = None) -> None:
        done = min(self.done, self.total) if self.total else self.done
        if self.bar is None:
            tell_launcher(self.title, done, self.total, note or "")
        else:
            self.bar.update(done, total=self.total or None, note=note)
            self._tell(done, note)

    def _tell(self, done: float, note: str | None) -> None:
        """Print a line where standard error is a file or a pipe, and the last one is old."""
        now = time.monotonic()
        if sys.stderr.isatty() or now - self.told_at < _NEWS_EVERY_S:
            return
        self.told_at = now
        counts = f": step {done:,.0f} of {self.total:,.0f}" if self.total else ""
        print_line(f"{self.title}{counts}{f'; {note}' if note else ''}", stream=sys.stderr)


_WORK: ContextVar[_TerminalWork | None] = ContextVar("work", default=None)


@contextmanager
def working(title: str, total: float = 0, *, shown: bool = True) -> Iterator[None]:
    """Draw a progress bar with the remaining time meanwhile; `expect` adds steps to those that are
    known already. Ranks that leave it to another one do not show it."""
    with ExitStack() as stack:
        if shown:
            bar = None
            if not tells_launcher():
                bar = stack.enter_context(ProgressBar(title, transient=True, to_stderr=True))
            work = _TerminalWork(title, bar, total)
            stack.callback(_WORK.reset, _WORK.set(work))
            work.show()
        yield


def expect(steps: float) -> None:
    """Add steps to those that the bar expects."""
    if (work := _WORK.get()) is not None:
        work.total += steps
        work.show()


def advance(note: str | None = None, steps: float = 1) -> None:
    """Count steps that are done; the note says which one is next, or was."""
    if (work := _WORK.get()) is not None:
        work.done += steps
        work.show(note)


def steps(items: Iterable[T], note: Callable[[T], str] = str) -> Iterator[T]:
    """Yield items, each a step of the bar that is expected and then done; `note` gives the text for
    an item that is worked on."""
    listed = list(items)
    expect(len(listed))
    for each in listed:
        advance(note(each), 0)
        yield each
        advance()


def console() -> "Console":
    """Return a console as wide as the terminal; 130 columns where the output is none."""
    from rich.console import Console

    # mpirun gives ranks a pseudo-terminal even if their output ends in a file.
    own = Console(force_terminal=shows_terminal(), force_interactive=False)
    return own if own.is_terminal else Console(width=max(_WIDE, own.width), force_terminal=False)


def table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> None:
    """Print a table that fits into the width of the terminal. So many columns from the left hold
    words; the others are justified right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    target = console()
    for k, heading in enumerate(headings):
        drawn.add_column(
            Text(heading),
            justify="left" if k < left else "right",
            overflow="fold",
            # Lines of a file can be searched for words.
            no_wrap=k < left and not target.is_terminal,
        )
    for row in rows:
        # Names come from files and users: no markup in them.
        drawn.add_row(*(Text(cell) for cell in row))
    target.print(drawn)


def show_figures(title: str, figures: Sequence[Figure], ratios: Sequence[Ratio] = ()) -> None:
    """Print figures and ratios as a table: labels, name, and median with the range."""
    rows = [
        (labels_text(each.labels), each.name, f"{range_text(each.values)} {each.unit}".rstrip())
        for each in figures
    ]
    rows += [(labels_text(each.labels), each.name, range_text(each.values)) for each in ratios]
    table(title, ("of", "figure", "median (min to max)"), rows, left=2)


def show_notes(notes: Sequence[str]) -> None:
    """Print sentences, each on lines of its own."""
    from rich.text import Text

    for note in notes:
        console().print(Text(note))


def show(name: str, figures: Mapping[str, object]) -> None:
    """Print the figures of a case: `rows` as a table, `said` as sentences, others one a line."""
    for key, value in figures.items():
        if key == "said" and isinstance(value, list):
            show_notes([str(sentence) for sentence in value])
        elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            _rows(name if key == "rows" else f"{name}, {key.replace('_', ' ')}", value)
        elif key != "raw":
            print(f"{name}, {key.replace('_', ' ')}: {format_figure(value)}")


def format_figure(value: object) -> str:
    """Return a cell's text: three digits, and a spread as its median with the range."""
    if value is None:
        return "-"
    if isinstance(value, dict) and "deviation" in value:
        return f"{value['mean']:.1f} ± {value['deviation']:.1f}"
    if isinstance(value, dict) and "median" in value and "min" in value:
        median, low, high = (format_figure(float(value[key])) for key in ("median", "min", "max"))
        return f"{median} ({low} to {high})"
    if isinstance(value, dict):
        return ", ".join(
            f"{key.replace('_', ' ')} {format_figure(each)}" for key, each in value.items()
        )
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(format_figure(each) for each in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rows(title: str, rows: list[dict[str, Any]]) -> None:
    headings = list(dict.fromkeys(heading for row in rows for heading in row if heading != "all"))
    words = itertools.takewhile(lambda heading: isinstance(rows[0].get(heading), str), headings)
    left = max(1, len(list(words)))
    table(
        title,
        [heading.replace("_", " ") for heading in headings],
        [[format_figure(row.get(heading)) for heading in headings] for row in rows],
        left,
    )


def range_text(values: Sequence[float]) -> str:
    """Return the median with the range; a single value as it is."""
    from dlio_bench.results.repeats import spread

    return format_figure(spread(values)) if len(values) > 1 else format_figure(float(values[0]))
