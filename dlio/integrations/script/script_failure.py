"""The end of a script on a rank, as its user is told: with the script's own line."""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final

from dlio.errors import CommError, DlioError
from dlio.integrations.script.file_callers import is_of_script
from dlio.integrations.script.muted_output import last_muted
from dlio.launch.rank_failures import RankFailure, leave_failure
from dlio.util.settings import MIN_RANKS, settings

_HERE: Final = os.path.dirname(__file__) + os.sep
_LONGEST: Final = 300
_USERS_FAULT: Final = 2


@contextmanager
def telling_failures(
    path: str, rank: int, hint: Callable[[Exception], str] = lambda _: ""
) -> Iterator[None]:
    """Tell how a script ends inside the `with` block, if by an error or an exit code. `hint`
    returns a remark on an error.

    An error of one rank ends the others, so the launcher prints it, last, and their errors not at
    all. Raises SystemExit in place of the error then; an end by `sys.exit()` or
    `sys.exit(0)` ends the block.
    """
    if not faulthandler.is_enabled():
        # The script's line at a crash. A notebook's standard error has no descriptor.
        with suppress(OSError, AttributeError, RuntimeError):
            faulthandler.enable()
    try:
        yield
    except KeyboardInterrupt as error:
        line = f"ended{_place(error.__traceback__)}: KeyboardInterrupt"
        # The launcher interrupts those that outlive another's end, which is told first.
        _tell(RankFailure(rank, time.monotonic(), "", line, follows=True), prints=True)
        raise
    except BrokenPipeError:
        raise
    except SystemExit as error:
        if not error.code:
            return
        code = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else f": {_short(str(error.code))}"
        if not said and (printed := last_muted(sys.stdout)):
            said = f", after it printed: {_short(printed)}"
        line = f"ended by sys.exit with code {code}{_place(error.__traceback__)}{said}"
        if not _tell(RankFailure(rank, time.monotonic(), "", line)):
            raise
        raise SystemExit(code) from None
    except DlioError as error:
        place = _place(error.__traceback__).removeprefix(" at ")
        line = str(error)
        if os.path.basename(place) not in line:
            line += f" ({place})"
        follows = isinstance(error, CommError)
        if not _tell(RankFailure(rank, time.monotonic(), "", line, follows, names_rank=follows)):
            raise
        raise SystemExit(_USERS_FAULT) from None
    except BaseException as error:
        more = hint(error) if isinstance(error, Exception) else ""
        line = f"ended{_place(error.__traceback__)}: {_short_error(error)}{more}"
        _tell(RankFailure(rank, time.monotonic(), _text(error, path), line), prints=True)
        raise SystemExit(1) from None


def _tell(failure: RankFailure, prints: bool = False) -> bool:
    """Tell the launcher, or else print, if wanted; True if either was done."""
    if not settings().debug and MIN_RANKS not in os.environ and leave_failure(failure):
        return True
    if prints:
        # In one write, so that other ranks' lines stay out of it.
        last = f"dlio: error: rank {failure.rank} {failure.line}\n"
        sys.stderr.write(f"{failure.text}{last}")
        sys.stderr.flush()
    return prints


def _place(trace: TracebackType | None) -> str:
    """Return ` at FILE:LINE` of the innermost line that is the script's; empty without one."""
    place = ""
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if is_of_script(str(frame.f_globals.get("__name__", "")), file):
            short = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
            place = f" at {short}:{line}"
    return place


def _text(error: BaseException, path: str) -> str:
    """Return the traceback, from the script's own line on, without dlio's part of it."""
    report = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    left = [report]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        files = [frame.filename for frame in each.stack]
        first = files.index(path) if path in files else 0
        kept = [frame for frame in each.stack[first:] if not frame.filename.startswith(_HERE)]
        if isinstance(error, SyntaxError) and path not in files:
            kept = []
        each.stack = traceback.StackSummary.from_list(kept)
        left += [more for more in (each.__cause__, each.__context__) if more is not None]
        left += each.exceptions or []
    return "".join(report.format())


def _short_error(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    if isinstance(error, SyntaxError):
        return lines[-1]
    # An error of a worker process has that process's traceback in its message.
    return _short(lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
