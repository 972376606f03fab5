"""Sends a signal to a command at a moment that one of its processes comes to; as sitecustomize.

SIGNAL_AT is `NUMBER PLACE MODULE`: the process at that place, `command` or a rank's number, is
about to import the module, or to end if it is `exit`. It then waits there for the
signal's effect, unless that is a step, in which it may come at any time.
"""

import atexit
import os
import sys
import time
from importlib.machinery import ModuleSpec

_PATIENCE_S = 120.0


def _fire(number: int, target: int, waits: bool) -> None:
    try:
        os.close(os.open(os.environ["SIGNAL_SENT"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(target, number)
    end = time.monotonic() + _PATIENCE_S
    while waits and time.monotonic() < end:
        time.sleep(0.01)


class _Watching:
    def __init__(self, number: int, target: int, module: str) -> None:
        self._number, self._target, self._module = number, target, module

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name == self._module:
            _fire(self._number, self._target, waits=name != "moment_of_step")
        return None


def _begin() -> None:
    number, place, module = os.environ["SIGNAL_AT"].split()
    is_rank = "DLIO_LAUNCHER_PID" in os.environ
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK"))
    if place != (rank if is_rank else "command"):
        return
    target = int(os.environ["DLIO_LAUNCHER_PID"]) if is_rank else os.getpid()
    if module == "exit":
        atexit.register(_fire, int(number), target, waits=False)
    else:
        sys.meta_path.insert(0, _Watching(int(number), target, module))


if "SIGNAL_AT" in os.environ:
    _begin()
