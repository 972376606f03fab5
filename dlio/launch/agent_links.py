"""The launcher's side of the agents: one per node, over the streams of a remote shell."""

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlio.comm.allocation import check_host
from dlio.errors import UsageError
from dlio.launch.node.agent_protocol import BEAT_S, PeerSilence
from dlio.util.child_processes import kill_groups_after, module_command
from dlio.util.closable import Closable
from dlio.util.settings import settings
from dlio.util.threads import Workers

_READY_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 5.0
_END_TIMEOUT_S: Final = 15.0
_LOOK_S: Final = 0.2
_BEAT: Final = b'{"beat": true}\n'
_OF_HOST: Final = ("SSH_", "HOSTNAME", "DISPLAY", "XDG_", "PMIX_", "PRTE_", "PMI_", "_", "PWD")
"""Beginnings of variables that mean something on the launcher's host alone."""


class NodeProcess:
    """A process on a node, which takes orders on its standard input, and ends with that."""

    def __init__(self, node: str, module: str, *argv: str, output: int | None = None) -> None:
        self.node = node
        # A session of its own: Ctrl-C is the launcher's, which then closes the process's input.
        self.process = subprocess.Popen(
            _command(node, module, *argv),
            stdin=subprocess.PIPE,
            stdout=output,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self._orders = self.process.stdin
        self._lock = threading.RLock()
        """Of its input: signs of life are sent by a thread, and orders by handlers of signals."""

    def order(self, order: Mapping[str, object]) -> None:
        """Send an order. If the process is gone, its end is seen next."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def close(self) -> None:
        """Close its input, which ends it and all that it has started."""
        with contextlib.suppress(OSError):
            self._orders.close()

    def end(self, timeout_s: float) -> None:
        """Wait for its end, and kill its remote shell after a deadline."""
        kill_groups_after([self.process], timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()


class _AgentLink(NodeProcess):
    """One agent. Owned by `Agents`."""

    def __init__(self, node: str, token: str) -> None:
        super().__init__(node, "dlio.launch.node.node_agent", token, output=subprocess.PIPE)
        assert self.process.stdout is not None
        self.answers = self.process.stdout.fileno()
        os.set_blocking(self.answers, False)
        self.name: str | None = None
        """Name that the node has for itself; None until its agent has answered."""
        self.stopped: dict[str, Any] | None = None
        """Its answer to the last order to stop."""
        self.ready = False
        """True if it can fork ranks."""
        self.done: int | None = None
        """Exit code that its ranks have left in this start."""
        self.paused: float | None = None
        """When all ranks of this start had paused."""
        self.silence = PeerSilence()
        self._line = b""

    def beat(self) -> None:
        """Send a sign of life, unless an order is being sent."""
        if self._lock.acquire(blocking=False):
            try:
                self._orders.write(_BEAT)
                self._orders.flush()
            except (OSError, ValueError):
                pass  # It is gone, which is seen next.
            finally:
                self._lock.release()

    def read(self) -> bool:
        """Take its answers; False if it is gone."""
        try:
            piece = os.read(self.answers, 1 << 16)
        except BlockingIOError:
            return True
        if not piece:
            return False
        self.silence.heard()
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "node" in answer:
                self.name = answer["node"]
            elif "ready" in answer:
                self.ready = True
            elif "paused" in answer:
                self.paused = answer["paused"]
            elif "stopped" in answer:
                self.stopped = answer
                self.done = answer["done"] if self.done is None else self.done
            elif "done" in answer:
                self.done = answer["done"]
        return True


class Agents(Closable):
    """The agents of the job `token`; a context manager. Nodes are called as the user calls them.

    `environment` is that of the ranks, apart from variables that mean something on this host alone;
    `modules` are those that the zygotes import.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        token: str,
        environment: Mapping[str, str],
        modules: Sequence[str],
    ) -> None:
        self.lost: list[str] = []
        """Nodes whose agents are gone."""
        self._agents: dict[str, _AgentLink] = {}
        self._dismissed: list[_AgentLink] = []
        self._joining: dict[str, tuple[_AgentLink, float]] = {}
        """Agents that are not ready, with the times when they were started."""
        self._selector = selectors.DefaultSelector()
        passed = {k: v for k, v in environment.items() if not k.startswith(_OF_HOST)}
        self._hello: dict[str, object] = {
            "environment": passed,
            "modules": list(modules),
            "folder": os.getcwd(),
            "silence_s": settings().node_timeout_s,
        }
        self._silence_s = settings().node_timeout_s
        self._token = token
        self._beating = Workers("dlio-agents-beat", lambda _: self._beat())
        self._beating.start()
        try:
            for node in nodes:
                self._agents[node] = self._started(node)
            self._await_names()
        except BaseException:
            self.close()
            raise

    @property
    def living(self) -> list[str]:
        """Nodes whose agents are there, in the user's order."""
        return [node for node in self._agents if node not in self.lost]

    @property
    def done(self) -> int | None:
        """Exit code that ranks have left in this start: a failure if there is one; or None."""
        codes = [agent.done for agent in self._agents.values() if agent.done is not None]
        return max(codes, default=None)

    @property
    def paused(self) -> float | None:
        """Time when all ranks of this start had paused; None while they train."""
        return next((a.paused for a in self._agents.values() if a.paused is not None), None)

    def pause(self) -> None:
        """Have all ranks pause between the same two batches; see `paused`."""
        from dlio.comm.survival.active_ranks import RankRequest
        from dlio.comm.survival.rank_requests import WANTED, wanted_text

        for node in self.living:
            self._agents[node].order({"file": WANTED, "text": wanted_text(RankRequest(1, 0), 0)})

    def prepare(self, node: str) -> None:
        """Start the agent of a node that is to join; see `prepared`."""
        self._joining[node] = (self._started(node), time.monotonic())

    def prepared(self, node: str) -> bool | None:
        """Return whether a node can join: True if its zygote is ready, False if its agent does not
        start, None if that is open."""
        if node not in self._joining:
            return False
        agent, since = self._joining[node]
        if not agent.ready and time.monotonic() > since + _READY_TIMEOUT_S:
            self.dismiss(node)
            return False
        return agent.ready or None

    def admit(self, node: str) -> None:
        """Take in a node that is prepared, behind the others."""
        if node in self.lost:
            self.lost.remove(node)
            self._agents.pop(node).end(_STOP_TIMEOUT_S)
        self._agents[node] = self._joining.pop(node)[0]

    def dismiss(self, node: str) -> None:
        """End the agent of a node, which is not lost."""
        agent = self._joining.pop(node)[0] if node in self._joining else self._agents.pop(node)
        self._selector.unregister(agent.answers)
        agent.close()
        self._dismissed.append(agent)

    def start(self, number: int, environment: Mapping[str, str]) -> None:
        """Have the zygotes fork the ranks of a start."""
        for node in self.living:
            agent = self._agents[node]
            agent.stopped = agent.done = agent.paused = None
            agent.order({"start": number, "environment": environment})

    def stop(self) -> int:
        """Kill all ranks; agents that do not answer within five seconds are lost.

        Returns the newest turn of which a living node has a snapshot, -1 if there is none.
        """
        for node in self.living:
            self._agents[node].order({"stop": True})
        silence = PeerSilence()
        while waiting := [n for n in self.living if self._agents[n].stopped is None]:
            if silence.looked() > _STOP_TIMEOUT_S:
                for node in waiting:
                    self._lose(self._agents[node])
                break
            self.look(None)
        answers = [self._agents[node].stopped for node in self.living]
        return max((each["newest"] for each in answers if each is not None), default=-1)

    def look(self, process: int | None) -> bool:
        """Take answers for a moment, and note lost nodes; True if mpirun (a pidfd) has ended."""
        ended = False
        if process is not None:
            self._selector.register(process, selectors.EVENT_READ)
        try:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data is None:
                    ended = True
                elif not key.data.read():
                    self._lose(key.data)
        finally:
            if process is not None:
                self._selector.unregister(process)
        for node in self.living:
            # Longer than the agent waits: it has killed its ranks before others start.
            if self._agents[node].silence.looked() > self._silence_s + 2 * BEAT_S:
                self._lose(self._agents[node])
        return ended

    def close(self) -> None:
        """End the agents, and with them all that they have started."""
        self._beating.close()
        for node in list(self._joining):
            self.dismiss(node)
        for agent in self._agents.values():
            agent.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for agent in (*self._agents.values(), *self._dismissed):
            agent.end(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    def _beat(self) -> None:
        while not self._beating.stopping.wait(BEAT_S):
            joining = [agent for agent, _ in list(self._joining.values())]
            for agent in (*list(self._agents.values()), *joining):
                agent.beat()

    def _started(self, node: str) -> _AgentLink:
        agent = _AgentLink(node, self._token)
        self._selector.register(agent.answers, selectors.EVENT_READ, agent)
        agent.order(self._hello)
        return agent

    def _await_names(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while any(agent.name is None for agent in self._agents.values()):
            self.look(None)
            silent = [n for n, each in self._agents.items() if each.name is None]
            if bad := self.lost or (silent if time.monotonic() > deadline else []):
                raise UsageError(f"--nodes: {no_agent(bad[0])}")

    def _lose(self, agent: _AgentLink) -> None:
        if self._joining.get(agent.node, (None,))[0] is agent:
            self.dismiss(agent.node)
            return
        if agent.node in self.lost:
            return
        self.lost.append(agent.node)
        self._selector.unregister(agent.answers)
        agent.close()
        # Its remote shell would wait for a node that does not answer.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.process.pid, signal.SIGKILL)


def no_agent(node: str) -> str:
    """Return the message about a node on which no agent starts."""
    shell = " ".join(remote_shell())
    return (
        f"no agent starts on {node}: check `{shell} {node} {sys.executable} -V`, which has to work "
        "without a password"
    )


def remote_shell() -> list[str]:
    """Return the command that runs another one on a node, without the node's name."""
    return shlex.split(settings().remote_shell or "ssh -x")


def _command(node: str, module: str, *argv: str) -> list[str]:
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    command = ["env", f"PYTHONPATH={paths}", *module_command(module, *argv)]
    if node in ("localhost", socket.gethostname()):
        return command
    shell = remote_shell()
    end = ["--"] if os.path.basename(shell[0]) == "ssh" else []
    return [*shell, *end, check_host(node), f"exec {shlex.join(command)}"]
