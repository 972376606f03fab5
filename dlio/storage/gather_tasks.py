"""The queue of a gathering: wanted samples in their order, before those that nobody waits for."""

import heapq
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlio.data.abilities import joins_neighbours, reads_together
from dlio.data.reader import Reader
from dlio.data.schema import Buffer

_TOGETHER: Final = 32
"""Samples of one request, at most."""
_RUN_BYTES: Final = 1 << 20
"""Bytes of neighbours that one request asks for, at most."""


@dataclass(slots=True, eq=False)
class SampleRead:
    """A sample that is to be read."""

    sample: int
    block: int
    place: int
    wanted: bool
    """Somebody is going to take it."""
    begun: bool = False
    done: bool = False
    """It can be taken, or has failed."""
    added: bool = False
    """It is done, and has been added to its block, if a tier keeps that."""
    payload: Buffer | None = None
    """The sample; None where it failed, or another process is reading it."""
    kind: str = "source"
    """The kind of the tier that had it, or `source`."""
    error: Exception | None = None
    ended: threading.Event | None = None
    """Set when it is done, once somebody waits for it."""


class ReadQueue:
    """Samples that are queued, being read, or read and not taken yet. The caller holds a lock.

    Args:
        reader: of the source; not owned.
    """

    def __init__(self, reader: Reader) -> None:
        self._sizes = reader.sizes
        self._most = _TOGETHER if reads_together(reader) else 1
        self._joins = joins_neighbours(reader)
        self._tasks: dict[int, SampleRead] = {}
        self._queue: list[tuple[bool, int, SampleRead]] = []
        """A heap of (True if nobody waits for it, ticket, task); stale entries are passed over."""
        self._ticket = itertools.count()
        self.spare = 0
        """Tasks that are queued and that nobody waits for."""
        self.ready = 0
        """Tasks that are done and that somebody is going to take."""

    def __contains__(self, sample: int) -> bool:
        return sample in self._tasks

    @property
    def queued(self) -> bool:
        """True if there may be something to read."""
        return bool(self._queue)

    def get(self, sample: int) -> SampleRead | None:
        """Return the task of a sample, if there is one."""
        return self._tasks.get(sample)

    def add(self, task: SampleRead) -> None:
        """Queue a new task, or one that is to be read again."""
        self._tasks[task.sample] = task
        self.spare += not task.wanted
        heapq.heappush(self._queue, (not task.wanted, next(self._ticket), task))

    def want(self, task: SampleRead) -> None:
        """Say that somebody is going to take a task's sample: if it is queued, it moves forward."""
        if not task.wanted:
            task.wanted = True
            self.ready += task.done
            if not task.begun:
                self.spare -= 1
                heapq.heappush(self._queue, (False, next(self._ticket), task))

    def let_go(self, task: SampleRead) -> None:
        """Say that nobody is going to take a task's sample any more; its task ends with that."""
        self.ready -= task.wanted and task.done
        task.wanted = False
        if task.added:
            self.remove(task)

    def finish(self, task: SampleRead) -> None:
        """Say that a task's sample can be taken, or has failed."""
        if not task.done:
            task.done = True
            self.ready += task.wanted
        if task.ended is not None:
            task.ended.set()

    def remove(self, task: SampleRead) -> None:
        """Forget a task, unless another one has taken its place."""
        if self._tasks.get(task.sample) is task:
            del self._tasks[task.sample]

    def begin(self, spare_too: bool) -> list[SampleRead]:
        """Return the tasks of the next request, which begins.

        Args:
            spare_too: those that nobody waits for, too; never together with others.
        """
        tasks: list[SampleRead] = []
        while self._queue and len(tasks) < self._most:
            spare, _, task = self._queue[0]
            if task.begun or spare is task.wanted or self._tasks.get(task.sample) is not task:
                heapq.heappop(self._queue)  # It was moved forward, or forgotten.
                continue
            if spare and (not spare_too or (tasks and tasks[0].wanted)):
                break  # Those that somebody waits for do not wait for others.
            heapq.heappop(self._queue)
            for each in (task, *self._neighbours(task)):
                each.begun = True
                self.spare -= not each.wanted
                tasks.append(each)
        return tasks

    def _neighbours(self, first: SampleRead) -> list[SampleRead]:
        """Return the tasks of the samples that lie behind one in its block, for its request."""
        run: list[SampleRead] = []
        size = int(self._sizes[first.sample]) if self._joins else _RUN_BYTES
        while size < _RUN_BYTES and len(run) + 1 < _TOGETHER:
            task = self._tasks.get(first.sample + len(run) + 1)
            if task is None or task.begun or task.block != first.block:
                break
            size += int(self._sizes[task.sample])
            if task.wanted is not first.wanted or size > _RUN_BYTES:
                break
            run.append(task)
        return run


def by_block(tasks: Sequence[SampleRead]) -> dict[int, list[SampleRead]]:
    """Group tasks by their blocks."""
    groups: dict[int, list[SampleRead]] = {}
    for task in tasks:
        groups.setdefault(task.block, []).append(task)
    return groups
