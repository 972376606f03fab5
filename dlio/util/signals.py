"""Signals that end a process."""

import signal

__all__ = ["terminate_as_interrupt"]


def terminate_as_interrupt() -> None:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that resources are released."""
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
