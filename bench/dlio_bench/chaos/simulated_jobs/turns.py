"""Threads of which one runs at a time; a seed decides which one is next."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Self

from dlio.util.threads import Workers


class TaskEnd(BaseException):
    """Ends a task: its ranks are lost, or another task has failed."""


class Deadlock(Exception):
    """All tasks wait for each other."""


class Turns:
    """Runs tasks, one at a time, `most` in all. A context manager, which ends its threads."""

    def __init__(self, most: int) -> None:
        self._go = [threading.Semaphore(0) for _ in range(most)]
        self._back = threading.Semaphore(0)
        self._tasks: list[Callable[[], None]] = []
        self._ready: list[Callable[[], bool] | None] = []
        """Per task: true once it can go on; None for one that has ended."""
        self._rng = random.Random(0)
        self._now = 0
        self._error: BaseException | None = None
        self._workers = Workers("dlio-simulated", self._serve, most, wake=self._wake).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def run(self, tasks: Sequence[Callable[[], None]], rng: random.Random) -> None:
        """Run tasks until all have ended.

        Raises the first exception of a task, Deadlock if none can go on.
        """
        self._tasks, self._rng, self._error = list(tasks), rng, None
        self._ready = [lambda: True] * len(tasks)
        self._go[self._next()].release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let other tasks run until `ready()`; called by the task that runs.

        Raises TaskEnd if another task has failed.
        """
        me = self._now
        self._ready[me] = ready
        following = self._next()
        if following != me:
            self._go[following].release()
            self._go[me].acquire()
        if self._error is not None:
            raise TaskEnd

    def _next(self) -> int:
        left = [k for k, ready in enumerate(self._ready) if ready is not None]
        able = left
        if self._error is None:
            able = [k for k in left if (ready := self._ready[k]) is not None and ready()]
            if not able:
                self._error = Deadlock("all ranks wait for each other")
                able = left
        self._now = able[0] if len(able) == 1 else self._rng.choice(able)
        return self._now

    def _serve(self, number: int) -> None:
        while True:
            self._go[number].acquire()
            if self._workers.stopping.is_set():
                return
            try:
                if self._error is None:
                    self._tasks[number]()
            except TaskEnd:
                pass
            except BaseException as error:
                self._error = self._error or error
            self._ready[number] = None
            if any(ready is not None for ready in self._ready):
                self._go[self._next()].release()
            else:
                self._back.release()

    def _wake(self) -> None:
        for go in self._go:
            go.release()
