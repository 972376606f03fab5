"""The agent of a job on one node: keeps what outlives ranks, and ends with the launcher.

    python -P -m dlio.launch.node.node_agent TOKEN

The launcher starts it, through ssh or by itself, and talks to it over standard input and output,
one JSON object per line. When standard input ends, whatever the reason, or the launcher gives no
sign of life, the agent kills the ranks, lets go of all that it keeps, and ends: beyond a cut of the
network, the job goes on without this node.

| the launcher sends | the agent answers |
|---|---|
| `environment`, `modules`, `folder`, `silence_s` | `node`, at once: shims wait for the zygote |
| `beat`, twice a second | |
| `start`: number, `environment` | |
| `file`: name, `text` | |
| `stop` | `stopped` with `done` and `newest` when no rank is left |

Besides, it sends `beat` twice a second, `ready` when the zygote is, `done` with an exit code when a
rank has left one, and `paused` with a time when ranks have said that all of them have.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from dlio.launch.node.agent_protocol import (
    BEAT_S,
    KEEPER,
    STATE,
    ZYGOTE,
    PeerSilence,
    folder_name,
    receive_exactly,
)
from dlio.launch.node.snapshot_slots import newest_turn
from dlio.launch.node.zygote_process import ZygoteProcess
from dlio.util.folders import open_working, remove_entry
from dlio.util.input_files import MOST_SETTINGS, read_text
from dlio.util.private_sockets import listen
from dlio.util.settings import AGENT, DONE, LAUNCHER
from dlio.util.shared_folders import SharedFolder
from dlio.util.whole_files import write_whole

_LOOK_S: Final = 0.05
_TIMEOUT_S: Final = 5.0
_MOST_KEPT: Final = 8
"""Locks that one message may carry."""
_LARGEST_LINE: Final = 1 << 22
_ZYGOTES: Final = 20
"""Zygotes that may die before no more are started."""


class NodeAgent:
    """The agent's state; `run` returns when the launcher, which writes to the descriptor `orders`
    and reads `answers`, is gone.
    """

    def __init__(self, token: str, orders: int, answers: int) -> None:
        self._node = socket.gethostname()
        self._orders, self._answers = orders, answers
        self._shared = SharedFolder(folder_name(token, self._node))
        self._folder = self._shared.path
        os.close(open_working(self._shared.descriptor, STATE, marked=False))
        self._listener = listen(self._shared.descriptor, ZYGOTE)
        self._keeper = listen(self._shared.descriptor, KEEPER)
        self._kept: list[int] = []
        """Descriptors whose locks outlive ranks."""
        self._environment: dict[str, str] = {}
        self._modules: list[str] = []
        self._start = -1
        self._started: dict[str, object] | None = None
        """The order that the zygote has got last."""
        self._zygote: ZygoteProcess | None = None
        self._zygotes = 0
        self._is_ready = self._stopping = False
        self._results: dict[str, float] = {}
        """Exit code `done` and time `paused` that ranks of this start have left."""
        self._files: set[str] = set()
        """Files that the launcher has asked for in this start."""
        self._line = b""
        self._silence, self._silence_s = PeerSilence(), math.inf
        """For how long the launcher gives no sign of life, and for how long it may."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        self._selector.register(self._keeper, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the launcher is gone, or silent."""
        beat = 0.0
        try:
            while True:
                for key, _ in self._selector.select(_LOOK_S):
                    if key.fileobj is self._keeper:
                        self._keep()
                    elif key.data is not None:
                        self._heard(key.data)
                    elif not self._read():
                        return
                # After the selector: if this process was stopped, there are signs to read.
                if self._silence.looked() > self._silence_s:
                    return
                self._look_for_end()
                if time.monotonic() - beat >= BEAT_S:
                    beat = time.monotonic()
                    self._answer({"beat": self._start})
        except BrokenPipeError:
            return
        finally:
            self.close()

    def close(self) -> None:
        """Kill the ranks, and remove all that this job has on this node."""
        if self._zygote is not None:
            self._zygote.close(_TIMEOUT_S)
        self._listener.close()
        self._keeper.close()
        for descriptor in self._kept:
            _let_go(descriptor)
        self._kept = []
        self._shared.close()

    def _read(self) -> bool:
        """Take the launcher's orders; False if it is gone."""
        piece = os.read(self._orders, 1 << 16)
        if not piece or len(self._line) > _LARGEST_LINE:
            return False
        self._silence.heard()
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return True

    def _obey(self, order: Mapping[str, Any]) -> None:
        if "modules" in order:
            self._environment, self._modules = order["environment"], order["modules"]
            self._silence_s = order["silence_s"]
            with contextlib.suppress(OSError):
                os.chdir(order["folder"])
            self._answer({"node": self._node})
            self._spawn()
        elif "beat" in order:
            pass
        elif "start" in order:
            self._begin(order["start"], order["environment"])
        elif "file" in order:
            self._write(order["file"], order["text"])
        else:
            self._stop()

    def _begin(self, start: int, environment: Mapping[str, str]) -> None:
        """Let the zygote fork the ranks of a start."""
        for name in self._files:
            remove_entry(self._shared.descriptor, name)
        self._files = set()
        self._start, self._results = start, {}
        memory = os.path.join(self._folder, f"mpi-{start}")
        os.close(open_working(self._shared.descriptor, f"mpi-{start}", marked=False))
        own = {
            AGENT: self._folder,
            DONE: os.path.join(self._folder, f"done-{start}"),
            LAUNCHER: str(os.getpid()),
            "OMPI_MCA_btl_sm_backing_directory": memory,
        }
        full = {**self._environment, **environment, **own}
        self._started = {"start": start, "environment": full}
        self._order(self._started)

    def _write(self, name: str, text: str) -> None:
        """Write a file for the ranks of this start, whole or not at all."""
        name = os.path.basename(name)
        self._files.add(name)
        write_whole(os.path.join(self._folder, name), lambda file: file.write(text.encode()))

    def _stop(self) -> None:
        """Kill the ranks; answers when they are gone."""
        self._stopping, self._started = True, None
        if self._is_ready:
            self._order({"stop": True})
        else:
            self._stopped()  # A zygote that is not ready has not forked any.

    def _stopped(self) -> None:
        self._stopping = False
        self._look_for_end()
        remove_entry(self._shared.descriptor, f"mpi-{self._start}")
        newest = newest_turn(os.path.join(self._folder, STATE))
        self._answer({"stopped": self._start, "done": self._results.get("done"), "newest": newest})

    def _spawn(self) -> None:
        self._zygotes += 1
        environment = {**os.environ, **self._environment}
        self._zygote = ZygoteProcess(self._modules, environment, self._listener)
        self._is_ready = False
        self._selector.register(self._zygote.control, selectors.EVENT_READ, self._zygote)
        if self._started is not None:
            self._order(self._started)

    def _order(self, order: Mapping[str, object]) -> None:
        if self._zygote is not None:
            self._zygote.order(order)

    def _heard(self, zygote: ZygoteProcess) -> None:
        """Take a message of the zygote, or replace it if it has died."""
        try:
            message = zygote.receive()
        except (EOFError, OSError):
            self._selector.unregister(zygote.control)
            zygote.close(0.0)
            self._zygote, self._is_ready = None, False
            if self._stopping:
                self._stopped()  # The kernel has killed its ranks.
            if self._zygotes < _ZYGOTES:
                self._spawn()
            return
        if "ready" in message:
            self._is_ready = True
            self._answer({"ready": True})
        elif self._stopping:
            self._stopped()

    def _keep(self) -> None:
        """Take over locks of a rank."""
        connection, _ = self._keeper.accept()
        with connection:
            connection.settimeout(_TIMEOUT_S)
            with contextlib.suppress(OSError, EOFError, ValueError):
                _, descriptors = receive_exactly(connection, _MOST_KEPT)
                self._kept += descriptors
        self._forget_twins()

    def _forget_twins(self) -> None:
        """Keep one lock of each file."""
        seen = set()
        for descriptor in list(self._kept):
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) in seen:
                self._kept.remove(descriptor)
                os.close(descriptor)
            seen.add((status.st_dev, status.st_ino))

    def _look_for_end(self) -> None:
        """Tell the launcher when a rank has left its exit code, or the time of a pause."""
        for kind, parse in (("done", int), ("paused", float)):
            if self._start < 0 or kind in self._results:
                continue
            with contextlib.suppress(FileNotFoundError, ValueError):
                name = os.path.join(self._folder, f"{kind}-{self._start}")
                self._results[kind] = parse(read_text(name, MOST_SETTINGS))
                self._answer({kind: self._results[kind], "start": self._start})

    def _answer(self, message: Mapping[str, object]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]


def _let_go(descriptor: int) -> None:
    """Close a lock, and remove the folder that it was the last to hold."""
    from dlio.util.shared_folders import sweep_shared_memory

    name = ""
    with contextlib.suppress(OSError):
        name = os.path.basename(os.path.dirname(os.readlink(f"/proc/self/fd/{descriptor}")))
    os.close(descriptor)
    if name:
        sweep_shared_memory(name)


def main(token: str) -> None:
    """Run the agent on standard input and output."""
    # Signals for the whole terminal are the launcher's, which then closes standard input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # Only answers go to the launcher.
    os.close(nothing)
    NodeAgent(token, orders, answers).run()


if __name__ == "__main__":
    main(sys.argv[1])
