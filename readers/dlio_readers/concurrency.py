"""The same question about many files, put to a network's storage many at a time."""

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from dlio.storage.file_system_kind import file_system_of

_THREADS: Final = 32

T = TypeVar("T")
R = TypeVar("R")


def concurrently(function: Callable[[T], R], items: Sequence[T], path: str) -> list[R]:
    """Call `function` on each item and return the results in order.

    Over a network each call takes a round trip or more, and 32 are under way at a time; on a disk
    they follow one another. All threads have ended when this returns. Raises the first error.

    Args:
        path: where the files are.
    """
    if len(items) < 2 or not file_system_of(path).network:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items)), "dlio-ask") as pool:
        context = contextvars.copy_context
        tasks = [pool.submit(context().run, function, item) for item in items]
        try:
            return [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
