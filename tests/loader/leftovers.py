"""Threads of dlio that a test leaves behind."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["nothing_is_left"]


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Fail if threads of dlio that began in the body have not ended."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    began = [t.name for t in threading.enumerate() if t not in before]
    assert [name for name in began if name.startswith("dlio")] == []
