"""Ranks of torch.distributed on several hosts, by a remote shell and one agent on each host.

For allocations of PBS and LSF where no MPI is installed. The agent (`dlio.launch.node_ranks`) gets
its orders on its standard input, where nobody else on the host reads the job's secret, and ends
its ranks when that closes.
"""

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

from dlio.comm.launch_detection import meeting_port
from dlio.launch.agent_links import no_agent, remote_shell
from dlio.launch.spread import passed_variables
from dlio.util.child_processes import kill_groups_after, module_command
from dlio.util.settings import SECRET
from dlio.util.signals import receiving

_LOOK_S: Final = 0.1
_END_TIMEOUT_S: Final = 15.0
_NO_SHELL: Final = 255
"""Exit code of ssh where it does not reach the host."""


def run_by_remote_shell(argv: Sequence[str], counts: Mapping[str, int]) -> int:
    """Run a program on the hosts of `counts`, and return the first failure's exit code.

    SIGUSR1 is passed on to the ranks. The end of one host's ranks by a failure ends all.
    """
    orders = _orders(argv, counts)
    with ExitStack() as stack:
        agents = []
        for host, order in zip(counts, orders, strict=True):
            agent = _started(host)
            stack.callback(_end, agent)
            agents.append(agent)
            _send(agent, order)

        def ask_to_end() -> None:
            for agent in agents:
                _send(agent, {"signal": "USR1"})

        with receiving(ask_to_end):
            return _wait(agents, list(counts))


def _orders(argv: Sequence[str], counts: Mapping[str, int]) -> list[dict[str, object]]:
    """Return the first order of each host's agent: its ranks and their environment."""
    common = {name: os.environ[name] for name in passed_variables(os.environ)}
    common |= {
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or next(iter(counts)),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(meeting_port(secrets.randbits(32))),
        "WORLD_SIZE": str(sum(counts.values())),
        SECRET: os.environ.get(SECRET) or secrets.token_hex(32),
    }
    orders: list[dict[str, object]] = []
    first = 0
    for node, count in enumerate(counts.values()):
        environment = {**common, "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(node)}
        orders.append(
            {
                "argv": list(argv),
                "folder": os.getcwd(),
                "first": first,
                "count": count,
                "environment": environment,
            }
        )
        first += count
    return orders


def _started(host: str) -> "subprocess.Popen[bytes]":
    paths = os.environ.get("PYTHONPATH")
    command = module_command("dlio.launch.node_ranks")
    if paths:
        command = ["env", f"PYTHONPATH={paths}", *command]
    if host not in ("localhost", socket.gethostname()):
        command = [*remote_shell(), host, f"exec {shlex.join(command)}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _send(agent: "subprocess.Popen[bytes]", order: Mapping[str, object]) -> None:
    """Send an order; if the agent is gone, its end is seen next."""
    assert agent.stdin is not None
    with suppress(OSError, ValueError):
        agent.stdin.write(json.dumps(order).encode() + b"\n")
        agent.stdin.flush()


def _wait(agents: "Sequence[subprocess.Popen[bytes]]", hosts: Sequence[str]) -> int:
    while True:
        codes = [agent.poll() for agent in agents]
        for host, code in zip(hosts, codes, strict=True):
            if code == _NO_SHELL:
                sys.stderr.write(f"dlio: error: {no_agent(host)}\n")
            if code:
                return 128 - code if code < 0 else code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_LOOK_S)


def _end(agent: "subprocess.Popen[bytes]") -> None:
    """Close an agent's input, which ends its ranks, and kill its remote shell after a deadline."""
    assert agent.stdin is not None
    with suppress(OSError):
        agent.stdin.close()
    kill_groups_after([agent], _END_TIMEOUT_S)
