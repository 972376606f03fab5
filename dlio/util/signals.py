"""Signals that end a process."""

import signal


def terminate_as_interrupt() -> None:
    """Let SIGTERM end this process as Ctrl-C does: with what it holds given back."""
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
