"""The `dlio` command: finds its sub-commands, calls the library, reports.

Commands of the core stand in this folder, one file each; others plug in through the entry-point
group `dlio.commands`, as functions or as typer apps. Exit codes: 0, or 2 with one line on standard
error for what a user can mend, 130 when interrupted; anything else is a bug, with a traceback.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from dlio.cli import demo, forecast, ls, run, train
from dlio.errors import DlioError, UsageError
from dlio.util.settings import settings

_CORE: dict[str, Callable[..., None]] = {
    "ls": ls.command,
    "train": train.command,
    "demo": demo.command,
    "plan": forecast.plan,
    "simulate": forecast.simulate,
}
_FAILED = 2
_INTERRUPTED = 130
_DEBUG = "DLIO_DEBUG"


def make_app() -> typer.Typer:
    """The command with all sub-commands that are installed."""
    app = typer.Typer(
        name="dlio",
        help="Feeds distributed deep learning from a deep memory hierarchy.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=app.info.help)(_options)
    # What follows the script is the script's.
    own = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
    app.command("run", context_settings=own)(run.command)
    for name, function in _CORE.items():
        app.command(name)(function)
    for entry in sorted(entry_points(group="dlio.commands"), key=lambda entry: entry.name):
        try:
            loaded = entry.load()
        except Exception as error:
            loaded = _broken(entry, error)
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=entry.name)
        else:
            app.command(entry.name)(loaded)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit. `argv` without the program's name; by default the process's."""
    from dlio.comm import abort
    from dlio.comm.environment import under_mpi, watch_launcher
    from dlio.util.signals import terminate_as_interrupt

    terminate_as_interrupt()
    watch_launcher()
    try:
        make_app()(args=None if argv is None else list(argv), prog_name="dlio")
    except DlioError as error:
        if settings().debug:
            # Not raised again: MPI would wait, at exit, for ranks that wait for this one.
            traceback.print_exc()
        # One write: what other ranks and mpirun write must not come between a line and its end.
        sys.stderr.write(f"dlio: error: {error}\n")
        sys.stderr.flush()
        abort(_FAILED)
        sys.exit(_FAILED)
    except SystemExit as error:
        if error.code == _INTERRUPTED:
            if under_mpi():
                os._exit(_INTERRUPTED)  # MPI would wait for the other ranks, who are ended too.
            print("dlio: interrupted", file=sys.stderr, flush=True)
        if error.code:
            abort(error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException:
        traceback.print_exc()
        abort(1)
        sys.exit(1)


def _show_version(asked: bool) -> None:
    if asked:
        import dlio

        typer.echo(f"dlio {dlio.__version__}")
        raise typer.Exit


def _set_debug(asked: bool) -> None:
    if asked:
        os.environ[_DEBUG] = "1"  # Ranks that are started inherit it.


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            callback=_set_debug,
            is_eager=True,
            help="Show where an error comes from. Or DLIO_DEBUG=1.",
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def _broken(entry: EntryPoint, error: Exception) -> Callable[[], None]:
    """A command in place of one whose module cannot be loaded."""

    def command() -> None:
        raise UsageError(
            f"the command {entry.name} ({entry.value}) cannot be loaded: {error}; install its "
            "package again"
        )

    command.__doc__ = f"(cannot be loaded: {error})"
    return command
