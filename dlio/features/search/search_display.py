"""A search on the terminal and as a page: the table of trials, the best one, Optuna's plots."""

import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from dlio.errors import UsageError, printable
from dlio.features.search.objectives import Objective
from dlio.features.search.study import Study, TrialRecord
from dlio.train.tasks.metrics import show_metric
from dlio.util.extras import how_to_install
from dlio.util.json_output import json_text
from dlio.util.live_figures import publish
from dlio.util.printable import as_html, print_line
from dlio.util.units import counted, format_bytes
from dlio.util.whole_files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

_ROWS: Final = 12
"""Ended trials in the live table, besides those that run."""
_LEAST_PLOTTED: Final = 2


def check_plots() -> None:
    """Raise UsageError if plots cannot be drawn."""
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--html: {error}; install it: {how_to_install('search')}") from error


class TrialTable:
    """The table of trials while they run: drawn on a terminal, otherwise a line per ended trial."""

    def __init__(self, study: Study, trials: int) -> None:
        self._study, self._trials = study, trials
        self._told = {record.number for record in study.records if record.has_ended}
        self._live: Any = None
        self._figures: dict[str, object] = {}

    def figures(self) -> dict[str, object]:
        """Return what `dlio top` shows of the search, as of the last update."""
        return self._figures

    def __enter__(self) -> Self:
        self._published = publish("search", self.figures)
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._table({}), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._published.close()
        if self._live is not None:
            self._live.stop()

    def update(self, running: Mapping[int, bool]) -> None:
        """Draw anew. Trials that run are given by number, True for one that waits for others."""
        self._figures = self._counted(running)
        if self._live is not None:
            self._live.update(self._table(running), refresh=True)
            return
        for record in self._study.records:
            if record.has_ended and record.number not in self._told:
                self._told.add(record.number)
                print_line(self._line(record))

    def _counted(self, running: Mapping[int, bool]) -> dict[str, object]:
        best = self._study.best()
        return {
            "study": self._study.folder,
            "trials": self._trials,
            "ended": sum(record.has_ended for record in self._study.records),
            "running": [number for number, waits in running.items() if not waits],
            "waiting": [number for number, waits in running.items() if waits],
            "best": _values(best[0], self._study.objectives) if best else None,
        }

    def _line(self, record: TrialRecord) -> str:
        values = _values(record, self._study.objectives)
        more = f" ({record.note})" if record.note else ""
        return (
            f"trial {record.number} {record.state} after {counted(len(record.epochs), 'epoch')}: "
            f"{values}; "
            f"{_point(record)}{more}"
        )

    def _table(self, running: Mapping[int, bool]) -> "RenderableType":
        from rich.markup import escape
        from rich.table import Table

        records = self._study.records
        best = {record.number for record in self._study.best()}
        ended = [record for record in records if record.has_ended]
        table = Table(
            title=f"{len(ended)} of {counted(self._trials, 'trial')}", title_justify="left"
        )
        for name in ("trial", "state", "epochs"):
            table.add_column(name)
        for objective in self._study.objectives:
            table.add_column(objective.name, justify="right")
        table.add_column("parameters")
        kept = {record.number for record in ended[-_ROWS:]} | best
        for record in records:
            if record.has_ended and record.number not in kept:
                continue
            state = record.state
            if not record.has_ended:
                waits = running.get(record.number)
                state = "queued" if waits is None else "waits" if waits else "running"
            table.add_row(
                str(record.number),
                f"{state}{' *' if record.number in best else ''}",
                str(len(record.epochs)),
                *_columns(record, self._study.objectives),
                escape(printable(_point(record))),
            )
        return table


def results(study: Study, command: Callable[[TrialRecord], Sequence[str]]) -> dict[str, object]:
    """Return the results of a search as JSON takes them, with the command of each best trial."""
    names = [objective.name for objective in study.objectives]
    return {
        "study": study.folder,
        "objectives": {each.name: each.direction for each in study.objectives},
        "best": [
            {
                "trial": record.number,
                "values": dict(zip(names, record.values, strict=True)),
                "parameters": dict(record.point),
                "command": shlex.join(command(record)),
                "weights": study.weights(record.number),
            }
            for record in study.best()
        ],
        "trials": [
            {
                "trial": record.number,
                "state": record.state,
                "parameters": dict(record.point),
                "epochs": [list(epoch.values) for epoch in record.epochs],
                "note": record.note,
            }
            for record in study.records
        ],
        "staged_bytes": study.staged_bytes,
        "trial_source_bytes": study.trial_source_bytes,
    }


def show_results(
    study: Study, command: Callable[[TrialRecord], Sequence[str]], is_script: bool
) -> None:
    """Print counts, bytes read from the source, and the best trials."""
    records = study.records
    states = {
        state: sum(record.state == state for record in records)
        for state in ("complete", "pruned", "failed", "running")
    }
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    epochs = sum(len(record.epochs) for record in records)
    print_line(f"{counted(len(records), 'trial')} ({counts}), {counted(epochs, 'epoch')}")
    if study.staged_bytes:
        print_line(
            f"read from the source: {format_bytes(study.staged_bytes)} to stage, "
            f"{format_bytes(study.trial_source_bytes)} by trials"
        )
    for record in study.best():
        print_line(f"best: trial {record.number}, {_values(record, study.objectives)}")
        print_line(f"    {shlex.join(command(record))}")
        if not is_script:
            print_line(f"    weights: {study.weights(record.number)}")


def write_page(study: Study, path: str, command: Callable[[TrialRecord], Sequence[str]]) -> None:
    """Write the plots of a search, and its best trials, as one file without links."""
    parts = [
        f"<h1>dlio search: {as_html(study.folder)}</h1>",
        *(
            f"<p>best: trial {record.number}, {as_html(_values(record, study.objectives))}"
            f"<br><code>{as_html(shlex.join(command(record)))}</code></p>"
            for record in study.best()
        ),
    ]
    parts += [
        figure.to_html(full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(_figures(study))
    ]
    rows = json_text(results(study, command)["trials"]).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="trials">{rows}</script>')
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>dlio search</title>'
    page = "\n".join([head, *parts]).encode()
    write_whole(path, lambda file: file.write(page))


def _figures(study: Study) -> list[Any]:
    """Return Optuna's plots that the results suffice for."""
    import optuna
    from optuna import visualization as plots

    made: list[Any] = []
    complete = [record for record in study.records if record.state == "complete"]
    of = study.optuna_study
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if len(study.objectives) > 1:
            names = [each.name for each in study.objectives]
            if complete and len(names) in (2, 3):
                made.append(plots.plot_pareto_front(of, target_names=names))
            return made
        name = study.objectives[0].name
        made.append(plots.plot_optimization_history(of, target_name=name))
        made.append(plots.plot_intermediate_values(of))
        if len(complete) >= _LEAST_PLOTTED:
            made.append(plots.plot_parallel_coordinate(of, target_name=name))
            made.append(plots.plot_slice(of, target_name=name))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.append(plots.plot_param_importances(of, evaluator=evaluator, target_name=name))
    return made


def _columns(record: TrialRecord, objectives: Sequence[Objective]) -> list[str]:
    values = record.values or (None,) * len(objectives)
    return [
        show_metric(objective.name.removeprefix("val_"), value)
        for objective, value in zip(objectives, values, strict=True)
    ]


def _values(record: TrialRecord, objectives: Sequence[Objective]) -> str:
    shown = _columns(record, objectives)
    return ", ".join(f"{each.name} {text}" for each, text in zip(objectives, shown, strict=True))


def _point(record: TrialRecord) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.point.items()
    )
