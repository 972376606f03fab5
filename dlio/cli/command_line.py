"""Command lines of `dlio`: finds sub-commands, runs them and reports errors.

The core's commands are in this folder, one file each. Others plug in through the entry-point group
`dlio.commands`: functions of records of options (`dlio.cli.cli_command`), groups of such functions,
cyclopts apps, or, if typer is installed, typer apps.

Exit codes: 0 for success; 2 for errors that a user can resolve, with one line on standard error; 3
from `dlio stage` if its deadline passes, 4 if not all fits into the tiers; 130 if interrupted; 1
from `dlio ledger` for a trace that is not exact, otherwise for a bug, with a traceback.
"""

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from dlio.errors import CommError, DlioError, UsageError
from dlio.util.child_processes import die
from dlio.util.early_interrupt import INTERRUPTED
from dlio.util.limits import OPEN_FILES, lacks_files
from dlio.util.printable import escaping_libraries
from dlio.util.settings import DONE, LAUNCHER, START, STORE, settings, unknown_variables
from dlio.util.whole_files import FULL, unwritable

_FAILED = 2
_AGAIN = 76
"""Of a rank that has lost another: the launcher starts all ranks again."""
_DEBUG = "DLIO_DEBUG"
_MEANT: Final = {
    word: meant
    for words, meant in {
        "list info inspect describe stat stats dataset data": "ls",
        "show browse display preview": "view",
        "convert shard write build prepare": "pack",
        "prefetch copy cp load fetch download warm preload": "stage",
        "check validate test fsck checksum scrub": "verify (data) or doctor (the machine)",
        "clean clear purge delete remove rm unstage free": "evict (staged data) or cache clean",
        "report reports plot summary": "bench html (a page of reports) or bench compare",
        "benchmark measure profile speed": "bench",
        "evaluate predict inference infer score": "eval",
        "tune sweep hpo optimize optimise": "search",
        "fit finetune": "train",
        "submit sbatch srun slurm": "launch --slurm",
        "mpirun mpiexec torchrun exec start": "launch or run",
        "monitor watch ps jobs": "top",
        "forecast estimate": "plan",
        "version": "--version",
        "help": "--help",
    }.items()
    for word in words.split()
}
"""Commands by the words that other tools have for them."""
_FLAGS = ("--version", "--debug", "--help", "--help-all", "-h", "--install-completion")


def run_and_exit(argv: Sequence[str] | None) -> NoReturn:
    """Run the command and exit; see `dlio.cli.main`."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    guarded(lambda: _run_with_umask(tokens), ends=argv is None)


def guarded(run: Callable[[], object], ends: bool = True) -> NoReturn:
    """Run a command and exit with its code. An error is printed and ends the other ranks, too.

    If this process `ends` afterwards, signals that come too late change nothing about its exit
    code; otherwise SIGTERM and SIGUSR1 get their former effect.
    """
    from dlio.util.signals import as_command, work_is_done

    _fill_closed_streams()
    with as_command():
        code = _code_of(run)
        if ends:
            work_is_done()
            # Otherwise the end of the interpreter looks through all of torch for garbage, which
            # takes half a second of processor time, also after Ctrl-C.
            gc.freeze()
        _exit(code, ends)


def _fill_closed_streams() -> None:
    """Open the null device for standard streams that were closed (`>&-`): the next file that is
    opened would get their number, and in it all that libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _code_of(run: Callable[[], object]) -> object:
    """Run a command; returns its exit code, or the text of a SystemExit."""
    from dlio.util.signals import is_of_interruption

    code: object = 0
    try:
        try:
            if LAUNCHER in os.environ:
                from dlio.comm.launch_environment import watch_launcher

                watch_launcher()
            run()
        except Exception as error:
            if is_of_interruption(error):
                raise KeyboardInterrupt from error
            raise
    except DlioError as error:
        with contextlib.suppress(UsageError):  # The settings may be invalid themselves.
            if settings().debug:
                # Do not re-raise: at exit, MPI would wait for ranks that wait for this one.
                traceback.print_exc()
        # In one write, so that output of other ranks or mpirun cannot interrupt the line.
        sys.stderr.write(f"dlio: error: {error}\n")
        sys.stderr.flush()
        # The launcher starts ranks again that have lost each other.
        code = _AGAIN if START in os.environ and isinstance(error, CommError) else _FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as error:
        code = error.code
    except BrokenPipeError:
        # The reader of standard output has closed it: discard further output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    return code


def _exit(code: object, ends: bool) -> NoReturn:
    """Raise SystemExit, or end this process at once where it would wait for other ranks."""
    from dlio.util.signals import forget_interruption

    if ends and isinstance(code, int) and code != INTERRUPTED:
        _end_with(code)
    if code == INTERRUPTED:
        if ends:  # Once more, by those who cannot wait for the interpreter's end.
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        # NumPy cannot be imported again after an interruption that has ended its import.
        places = sys.modules.get("dlio.comm.launch_environment")
        is_found = places is not None and (places.under_mpi() or places.under_torch())
        if is_found or LAUNCHER in os.environ:
            world = sys.modules.get("dlio.comm.world")
            if world is not None and world.membership() is not None:
                die()  # Others that may go on are told of a signal, and never of an exit code.
            os._exit(INTERRUPTED)  # An ordinary exit would wait in MPI for the other ranks.
        sys.stderr.write("dlio: interrupted\n")
        sys.stderr.flush()
    forget_interruption()
    if "dlio.comm.world" in sys.modules:
        _end_alone(code if isinstance(code, int) else 1)
    if code and ("mpi4py" in sys.modules or STORE in os.environ):
        from dlio.comm.world import abort

        abort(code if isinstance(code, int) else 1)
    sys.exit(code if isinstance(code, int | str) else 0)


def _end_with(code: int) -> None:
    """Keep signals that come too late from changing the exit code."""
    from dlio.comm.launch_detection import under_torchrun
    from dlio.comm.launch_environment import under_mpi, under_torch
    from dlio.util.signals import end_with

    mpi = sys.modules.get("mpi4py.MPI")
    others = under_mpi() or under_torch() or under_torchrun()
    waits = others or (mpi is not None and mpi.Is_initialized())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()  # A signal may end this process before it does so itself.
    end_with(code, at_once=not waits)


def _end_alone(code: int) -> None:
    """End a rank that others may survive, where MPI would hang or let them wait for it.

    Returns if no rank has been lost, and an ordinary exit will do.
    """
    from dlio.comm.world import leave_code, membership

    left = membership()
    if left is None and START not in os.environ:
        return
    from dlio.util.signals import RESUME_CODE

    sys.stdout.flush()
    sys.stderr.flush()
    if left is None:
        tells = code in (0, _FAILED, RESUME_CODE)
    else:
        if (code == 1 and len(left.members) > 1) or code == _AGAIN:
            die()  # A bug: the others go on.
        ends_all = left.lost or code in (_FAILED, RESUME_CODE)
        tells = ends_all if code else left.me in left.members
    if DONE in os.environ and tells:
        # After a failure the launcher ends the others: MPI_Abort hangs after a loss.
        leave_code(code)
    if left is not None and left.lost:
        os._exit(code)


def _run_with_umask(tokens: list[str]) -> None:
    """Run a command so that no library, such as Optuna or TensorBoard, makes files that all users
    may write. Programs of users keep their umask."""
    before = os.umask(0)
    is_of_user = tokens[:1] in (["run"], ["launch"])
    os.umask(before if is_of_user else before | 0o002)
    try:
        if tokens and not tokens[0].startswith("-"):
            _check_folder()  # torch's libraries end the process there, in words of their own.
        with contextlib.nullcontext() if is_of_user else escaping_libraries():
            run_command(tokens)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not error.filename:
            _check_folder()
        if not is_of_user and lacks_files(error):
            raise UsageError(f"{error}: {OPEN_FILES}") from error
        if is_of_user or error.errno not in FULL or isinstance(error, DlioError):
            raise
        raise unwritable(str(error.filename or "standard output, or a file,"), error) from error
    finally:
        os.umask(before)


def _check_folder() -> None:
    """Raise UsageError if the current folder has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(
            "the current folder has been removed: change to another one (cd)"
        ) from error


def run_command(tokens: list[str]) -> None:
    """Parse a command line, without `dlio`, and run its command. Raises UsageError."""
    from dlio.cli.app import find_command, make_app, places, run_app
    from dlio.cli.cli_command import SWITCHES
    from dlio.util.arguments import nearest

    while tokens and tokens[0] == "--debug":
        os.environ[_DEBUG] = "1"  # Ranks that are started inherit it.
        del tokens[0]
    _warn_of_unknown_variables()
    if tokens and tokens[0].startswith("-") and tokens[0] not in _FLAGS:
        later = next((each for each in tokens if each in places()), "")
        if later:
            raise UsageError(f"{tokens[0]}: write options after the command: dlio {later} ...")
        raise UsageError(f"{tokens[0]}: no such option{nearest(tokens[0], _FLAGS)} (`dlio --help`)")
    if tokens and not tokens[0].startswith("-") and tokens[0] not in places():
        meant = _MEANT.get(tokens[0].lower())
        close = f"; did you mean {meant}?" if meant else nearest(tokens[0], places())
        raise UsageError(f"{tokens[0]}: no such command{close} (`dlio --help`)")
    if tokens[:1] == ["--version"]:
        import dlio

        print(f"dlio {dlio.__version__}")
        return
    command = find_command(tokens)
    words = len(command.name.split()) if command is not None else 1
    rest: list[str] = []
    own = tokens[words:]
    if command is not None:
        own, rest = command.split(own)
    for switch, (variable, _) in SWITCHES.items():
        if switch in own:
            own.remove(switch)
            os.environ[variable] = "1"
    brief = "--help-all" not in own
    own = ["--help" if each == "--help-all" else each for each in own]
    path = [] if not tokens or tokens[0].startswith("-") else tokens[:words]
    if tokens[:1] == ["--install-completion"]:
        run_app(make_app(), tokens, command)
    else:
        if path:
            settings()  # Invalid variables are reported before any work.
        run_app(make_app(path, rest, brief), [*path, *own], command)


def _warn_of_unknown_variables() -> None:
    unknown = unknown_variables(os.environ)
    if unknown:
        from dlio.comm.launch_environment import under_mpi, under_torch

        if under_mpi() or under_torch():
            return  # The launcher has printed the warning.
    for name, near in unknown:
        hint = f"; did you mean {near}?" if near else ""
        print(f"dlio: warning: {name}: no such variable{hint}", file=sys.stderr, flush=True)
