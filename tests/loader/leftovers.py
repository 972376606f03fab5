"""Threads of dlio that a test leaves behind."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.conftest import in_time

__all__ = ["nothing_is_left"]


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Fail if threads of dlio that began in the body do not end.

    The last collection of garbage may have told some to end; on a busy machine they take a while.
    """
    # Objects that earlier tests left are not the body's; to search them after each takes seconds.
    gc.collect()
    gc.freeze()
    before = set(threading.enumerate())

    def left() -> list[str]:
        began = [thread.name for thread in threading.enumerate() if thread not in before]
        return [name for name in began if name.startswith("dlio")]

    yield
    gc.collect()
    in_time(lambda: not left(), 60)
    assert left() == []
