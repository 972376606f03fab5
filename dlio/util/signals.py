"""Signals that end a process, or ask it to end."""

import ctypes
import errno
import math
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from dlio.util import early_interrupt
from dlio.util.settings import MIN_RANKS, START

RESUME_CODE: Final = 75
"""Exit code of a run that has written a checkpoint because it was told to end: the same command
with --resume goes on. It is EX_TEMPFAIL of sysexits.h."""
NOTHING_SAVED: Final = "dlio: told to end before the first step: there is nothing to save\n"
_BEFORE_LISTENING: Final = (130, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""Exit codes of a rank that a signal has ended while Python or its modules were loaded."""
_SAME_S: Final = 1.0
"""Time in which signals are one: a launcher passes on those that its ranks may have got, too."""
_NUMBERS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Those that ask a command to end; the last one where a terminal is closed, unless it is ignored
(`nohup`)."""
_AGAIN_S: Final = 0.01
"""Time after which an interruption that Python has dropped comes again."""
_is_command = False
"""This process runs a command, after which it ends; see `as_command`."""
_before_command: dict[int, Any] = {}
"""Handlers of signals before `as_command`."""
_frees_children = False
"""Forked processes have `_before_command`; see `freeing_children`."""
_was_interrupted = False
_interrupted_at = -math.inf
"""Time of the signal that has raised the last interruption."""
_is_dropping = False
"""An interruption would be dropped now, without a word to us."""
_receivers: list[Callable[[], object]] = []
"""Called in place of ending this process; see `passing_on`."""
_saves = False
"""True once this process has something to save when it is told to end; see `ending_at_once`."""


@contextmanager
def as_command() -> Iterator[None]:
    """Within a `with` statement, SIGTERM, SIGUSR1 and SIGHUP raise KeyboardInterrupt, as Ctrl-C
    does.

    Resources are thus released, also when Ctrl-C is pressed several times at once: a signal within
    1 s of the first one has no effect. See `work_is_done`, too.
    """
    global _is_command, _before_command, _interrupted_at
    _interrupted_at = -math.inf
    before: dict[int, Any] = {number: signal.getsignal(number) for number in heard_signals()}
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, early_interrupt.end):
        # Else the shell ignores it, or a program that calls us has a handler.
        before[signal.SIGINT] = signal.default_int_handler
    was_command, hook, outer = _is_command, sys.unraisablehook, _before_command
    _is_command, _before_command = True, before
    for number in before:
        signal.signal(number, _raise_interrupt)
    sys.unraisablehook = _raise_again
    try:
        yield
    finally:
        _is_command, sys.unraisablehook, _before_command = was_command, hook, outer
        for number, handler in before.items():
            if signal.getsignal(number) in (_raise_interrupt, _ignore):  # Not after `end_with`.
                signal.signal(number, handler)


def heard_signals() -> list[int]:
    """Return the signals that ask this process to end: not that of a closed terminal if `nohup`, or
    a shell, has had it ignored."""
    kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [each for each in _NUMBERS if not (kept and each == signal.SIGHUP)]


def leave_closed_terminal(number: int) -> None:
    """At SIGHUP, let lines for a terminal that is closed go nowhere: each would be an error, and
    end a run that saves."""
    if number != signal.SIGHUP:
        return
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream)


def _raise_interrupt(number: int, _: object) -> None:
    global _was_interrupted
    leave_closed_terminal(number)
    if not is_repeated():
        _was_interrupted = True
        raise KeyboardInterrupt


def is_repeated() -> bool:
    """True if a signal that interrupts comes so soon after another one that both are one."""
    global _interrupted_at
    if time.monotonic() <= _interrupted_at + _SAME_S:
        return True
    _interrupted_at = time.monotonic()
    return False


@contextmanager
def freeing_children() -> Iterator[None]:
    """Within a `with` statement, a forked process takes signals as if `as_command` were not there:
    a pool of processes that a script ends by SIGTERM ends without a word."""
    global _frees_children
    before, _frees_children = _frees_children, True
    try:
        yield
    finally:
        _frees_children = before


def _begin_child() -> None:
    for number, handler in _before_command.items() if _frees_children else ():
        if signal.getsignal(number) is _raise_interrupt:
            signal.signal(number, handler)


os.register_at_fork(after_in_child=_begin_child)


def is_of_interruption(error: BaseException | None) -> bool:
    """True if an error stands for an interruption: NumPy, for one, makes an ImportError
    of it while it is being imported."""
    while error is not None and not isinstance(error, ImportError):
        error = error.__cause__ or error.__context__
    return _was_interrupted and error is not None


def forget_interruption() -> None:
    """Have Python end with the exit code that it is given after an interruption that has passed
    through `exec`, as in a dataclass that was being made: it would kill itself by SIGINT."""
    exec("")  # noqa: S102 # It is forgotten at the next `exec`, and in no other way.


def _raise_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Raise an interruption anew that came while Python ran a destructor or a callback of a weak
    reference, where it can only print and forget an exception."""
    global _is_dropping, _interrupted_at
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    _is_dropping, _interrupted_at = True, -math.inf
    again = threading.Timer(_AGAIN_S, _interrupt, (threading.get_ident(),))
    again.daemon = True  # The interpreter may be ending.
    again.start()
    _is_dropping = False  # Python looks for signals after the return that follows, not before.


def _interrupt(thread: int) -> None:
    """Raise KeyboardInterrupt in a thread, once it has left `_raise_again`."""
    while _is_dropping:
        time.sleep(_AGAIN_S)
    if signal.getsignal(signal.SIGTERM) is _raise_interrupt:
        signal.pthread_kill(thread, signal.SIGTERM)  # Ends what the thread waits for, too.
        return
    interruption = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), interruption)


def work_is_done() -> None:
    """Let these signals change nothing about a command that has only to report its results.

    Without this a signal that asks a run to end makes a finished run look failed. It has no effect
    outside of `as_command`: a program that calls dlio's functions has more work to do.
    """
    if _is_command:
        for number in heard_signals():
            signal.signal(number, _ignore)


def _ignore(number: int, _: object) -> None:
    """Do nothing. Unlike with SIG_IGN, children do not inherit it."""
    leave_closed_terminal(number)


def end_with(code: int, at_once: bool) -> None:
    """Let signals change nothing about the exit code of a process that ends now.

    They are ignored rather than handled, as Python gives up its handlers before MPI ends. With
    `at_once` SIGTERM ends this process; a rank of MPI cannot end so: it waits for the others.
    """

    def end(*_: object) -> None:
        os._exit(code)

    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end if at_once else signal.SIG_IGN)


class StopSignals:
    """Calls a function in the signal's handler at the first SIGTERM, SIGUSR1 or SIGHUP, once;
    or at the first of `numbers`.

    A SIGTERM that comes later than 1 s after that has its former effect. Only the main thread may
    call the methods.
    """

    def __init__(self, act: Callable[[], object], numbers: Sequence[int] = ()) -> None:
        self._act, self._numbers = act, numbers
        self._at = math.inf
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Begin to listen."""
        for number in self._numbers or heard_signals():
            self._before[number] = signal.signal(number, self._take)

    def stop(self) -> None:
        """Give the signals their former effect, unless they have got another one meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, _: object) -> None:
        leave_closed_terminal(number)
        if self._at == math.inf:
            self._at = time.monotonic()
            self._act()
        elif number == signal.SIGTERM and time.monotonic() > self._at + _SAME_S:
            self.stop()
            signal.raise_signal(number)


def say_nothing_is_saved() -> None:
    """Say that this run was told to end before its first step."""
    sys.stderr.write(NOTHING_SAVED)
    sys.stderr.flush()


class EndOrder:
    """The order to end for the ranks that this process starts; see `passing_on`."""

    def __init__(self, is_given: bool = False) -> None:
        self.is_given = is_given

    def explains(self, code: int) -> bool:
        """True if ranks ended with this code as they were told to."""
        return self.is_given and code in (RESUME_CODE, *_BEFORE_LISTENING)


_order = EndOrder()
"""Of the `passing_on` that this process is in."""
_has_had_receivers = False
"""True from the first one within it."""


@contextmanager
def passing_on(enabled: bool) -> Iterator[None]:
    """Within a `with` statement, the first SIGTERM, SIGUSR1 or SIGHUP goes to the receivers in
    place of ending this process. Before there is a receiver this process exits with `RESUME_CODE`;
    after the last one its work is done."""
    global _order, _has_had_receivers
    if not enabled:
        yield
        return
    _order, _has_had_receivers = order, _ = EndOrder(), False

    def act() -> None:
        order.is_given = True
        if not _has_had_receivers:
            raise KeyboardInterrupt
        for receiver in _receivers:
            receiver()

    asked = StopSignals(act)
    asked.listen()
    try:
        yield
    except KeyboardInterrupt:
        if not order.is_given or _has_had_receivers:
            raise
        say_nothing_is_saved()
        raise SystemExit(RESUME_CODE) from None
    finally:
        asked.stop()
        _order = EndOrder()


@contextmanager
def ending_at_once(enabled: bool) -> Iterator[None]:
    """Within a `with` statement, and until `begin_to_save`, SIGTERM and SIGUSR1 end this process
    with `RESUME_CODE`."""
    global _saves
    _saves = False
    if not enabled:
        yield
        return

    def act() -> None:
        if _saves:
            raise KeyboardInterrupt
        # Nothing is closed: others may wait for this rank, or this thread be inside of MPI.
        say_nothing_is_saved()
        os._exit(RESUME_CODE)

    # A launcher sends SIGUSR1 to all ranks; of those that go on or start again without one, SIGTERM
    # ends that one.
    survives = MIN_RANKS in os.environ or START in os.environ
    asked = StopSignals(act, (signal.SIGUSR1,) if survives else ())
    asked.listen()
    try:
        yield
    finally:
        asked.stop()


def begin_to_save() -> None:
    """End the time in which `ending_at_once` has an effect."""
    global _saves
    _saves = True


@contextmanager
def passing_on_warnings() -> Iterator[None]:
    """Within a `with` statement, SIGUSR1 goes to the receivers of `receiving`, each time.

    SIGTERM keeps its effect: for programs that may not know how to end at SIGUSR1.
    """

    def act(*_: object) -> None:
        for receiver in _receivers:
            receiver()

    before = signal.signal(signal.SIGUSR1, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def receiving(receiver: Callable[[], object]) -> Iterator[EndOrder]:
    """Within a `with` statement, have `passing_on` call a function."""
    global _has_had_receivers
    _receivers.append(receiver)
    _has_had_receivers = True
    try:
        yield _order
    finally:
        _receivers.remove(receiver)
