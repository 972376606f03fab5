"""Signals that end a process."""

import signal

__all__ = ["terminate_as_interrupt"]


def terminate_as_interrupt() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that its resources are released."""
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
