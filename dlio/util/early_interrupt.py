"""Ctrl-C while a command is being loaded. This module loads next to nothing itself."""

import os
import signal

INTERRUPTED = 130
"""Exit code of a command that was interrupted, as shells have it."""


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process in one line from here on, whatever is being imported. A shell
    that ignores it is left alone, as is a program that handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def end(*_: object) -> None:
    """Handle an interruption: there is nothing yet to release, or nothing any more."""
    os.write(2, b"dlio: interrupted\n")
    os._exit(INTERRUPTED)
