"""Named groups of threads that are joined before the interpreter ends.

A daemon thread that is still running when the interpreter is finalized is killed at its next
return from C code. Inside C++ (torch, OpenCV) that aborts the process: "terminate called without
an active exception", exit code 134. An ordinary thread would keep the interpreter from ending if a
script never closes its loader.

So the threads of a `Workers` are daemons, and one `atexit` handler stops all groups that are still
alive, all at once, and joins them within a deadline. This is correct because of the order at exit:

1. `threading._shutdown` joins the user's own non-daemon threads, which may still use a loader.
2. `atexit` handlers run in reverse order of registration. This one is registered when this module
   is imported, so handlers that a script registers afterwards can still use its loader.
3. The interpreter is finalized, with no thread of dlio left.

A thread that does not end in time (a system call on a hung file system cannot be interrupted) is
reported in one line on the logger "dlio" and not waited for. A forked child has none of its
parent's threads: their groups are empty there, and it forgets them.
"""

import atexit
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Self

from dlio.util.printable import log_warning

_log = logging.getLogger("dlio")
_STOP_TIMEOUT_S: Final = 5.0
_LOOK_S: Final = 0.5


_ThreadWaiter = Callable[[Callable[[float], bool], float], bool]


class Workers:
    """A group of threads that run one function. The object that creates it closes it.

    Thread-safe. Call `start` at the end of the owner's constructor, when everything that the
    function uses exists. `run` and `wake` are often methods of the owner: a thread that has ended
    forgets the one, a group that is asked to stop the other, so that an owner which is dropped then
    goes at once, with all that it holds, and not when Python next looks for cycles.

    Args:
        name: prefix of the threads' names, `name-0`, `name-1` and so on; a single thread's name.
        run: called in each thread with the thread's number; returns soon after `stopping` is set.
        count: number of threads; may be 0.
        wake: called once after `stopping` is set, to end waits inside `run`.
        stop_timeout_s: time in seconds for the threads to end after a stop.
        serves_others: True if other groups need this one until they end, as groups that send
            messages need the thread that transports them. At exit it is stopped last.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[int], object],
        count: int = 1,
        *,
        wake: Callable[[], object] | None = None,
        stop_timeout_s: float = _STOP_TIMEOUT_S,
        serves_others: bool = False,
    ) -> None:
        self.stopping = threading.Event()
        self.stop_timeout_s = stop_timeout_s
        self.serves_others = serves_others
        self._wake: Callable[[], object] | None = wake
        self._lock = threading.Lock()
        self._reported = False
        self._threads = [
            threading.Thread(
                target=self._main,
                args=(run, k),
                name=name if count == 1 else f"{name}-{k}",
                daemon=True,
            )
            for k in range(count)
        ]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> Self:
        """Start the threads.

        Raises RuntimeError if the interpreter is ending, because they would not be joined.
        """
        _registry.add(self)
        for thread in self._threads:
            thread.start()
        return self

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """The threads, in the order of their numbers."""
        return tuple(self._threads)

    def alive(self) -> list[str]:
        """Names of the threads that are running."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all threads have ended by themselves; False after `timeout_s` seconds."""
        if not self._threads:
            return True
        while timeout_s is None:
            if _join_by(self._joined, _LOOK_S):
                return True
        return _join_by(self._joined, timeout_s)

    def stop(self) -> None:
        """Ask the threads to stop, without waiting for them."""
        with self._lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def close(self, timeout_s: float | None = None) -> list[str]:
        """Stop and join the threads. Return the names of those still alive after the deadline, in
        seconds, or `stop_timeout_s`.

        These are also logged, once. They end when the call that blocks them returns.
        """
        self.stop()
        return self._ended_within(self.stop_timeout_s if timeout_s is None else timeout_s)

    def _lose_threads(self) -> None:
        """Be an empty group that has stopped, in a forked child."""
        self._threads.clear()
        self._wake = None
        self.stopping.set()
        self._lock = threading.Lock()

    def _main(self, run: Callable[[int], object], number: int) -> None:
        # A method: a running thread thereby keeps its group alive, and in the registry.
        run(number)

    def _joined(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        current = threading.current_thread()
        for thread in self._threads:
            if thread is not current and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not current)

    def _ended_within(self, timeout_s: float) -> list[str]:
        """Join the threads; log and return the names of those that are still alive.

        A group that was reported before has used up its time and is not waited for again.
        """
        if self.wait(0.0 if self._reported else timeout_s):
            return []
        alive = self.alive()
        if alive and not self._reported:
            self._reported = True
            log_warning(
                "dlio: %s did not end within %g s after a request to stop, and will not be waited "
                "for: check for a file system or another rank that hangs",
                ", ".join(alive),
                round(timeout_s, 2),
            )
        return alive


def join_with(waiting: _ThreadWaiter) -> None:
    """Replace the function that waits while threads are joined, `waiting(wait, timeout_s)`.

    It alternates between `wait(seconds)` and work that other threads need done by the joining
    thread, and returns True once `wait` does.
    """
    global _join_by
    _join_by = waiting


_join_by: _ThreadWaiter = operator.call


class _WorkersRegistry:
    """All groups that were started and still exist.

    Invariant: no group is added once `end` has begun, so `end` misses none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[Workers] = weakref.WeakSet()
        self._ending = False

    def add(self, group: Workers) -> None:
        with self._lock:
            if self._ending:
                raise RuntimeError("dlio cannot start threads: the interpreter is ending")
            self._groups.add(group)

    def end(self) -> None:
        """Stop and join all groups, those with `serves_others` last."""
        with self._lock:
            self._ending = True
            groups = [group for group in self._groups if group.alive()]
        for serving in (False, True):
            ending = [group for group in groups if group.serves_others is serving]
            for group in ending:
                try:
                    group.stop()
                except Exception:  # Stop the other groups nevertheless.
                    _log.exception("dlio: stopping threads at exit")
            began = time.monotonic()
            for group in ending:
                waited = time.monotonic() - began
                group._ended_within(max(0.0, group.stop_timeout_s - waited))


_registry = _WorkersRegistry()


def _forget() -> None:
    global _registry
    for group in _registry._groups:
        group._lose_threads()
    _registry = _WorkersRegistry()


os.register_at_fork(after_in_child=_forget)
# Looks the registry up at exit: a forked child has another one.
atexit.register(lambda: _registry.end())
