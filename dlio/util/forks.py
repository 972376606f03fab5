"""Locks and objects that work in a forked child, such as a worker process of torch's loader.

A child has a copy of its parent's memory, but of its threads only the one that forked it. A lock
that another thread held then stays locked in the child for ever, and what another thread was about
to do is never done. So locks that a child may take are made here, and are free in each child;
objects that wait for threads of their own process have a method called there.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_methods: list["weakref.WeakMethod[Callable[[], object]]"] = []


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, whoever held it in the parent."""
    made = threading.Lock()
    _locks.add(made)
    return made


def new_rlock() -> "threading.RLock":
    """As `new_lock`, a lock that its holder may take again."""
    made = threading.RLock()
    _locks.add(made)
    return made


def call_in_child(method: Callable[[], object]) -> None:
    """Call a bound method in each forked child, after its locks are free.

    Its object is not kept alive. It starts no thread and waits for nothing.
    """
    _methods[:] = [each for each in _methods if each() is not None]
    _methods.append(weakref.WeakMethod(method))


def _begin_child() -> None:
    for lock in list(_locks):
        # Of CPython; its own threading and logging use it so.
        lock._at_fork_reinit()
    for each in _methods:
        method = each()
        if method is not None:
            method()


os.register_at_fork(after_in_child=_begin_child)
