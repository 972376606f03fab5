"""The ranks of one host, started by `dlio launch` through a remote shell.

    python -m dlio.launch.node_ranks < orders

Orders are lines of JSON: the first one describes the ranks, each later one names a signal for
them. When the input closes, the ranks are ended.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, Final

from dlio.launch.rank_environment import rank_environment
from dlio.util.child_processes import end_groups

_LOOK_S: Final = 0.1
_END_TIMEOUT_S: Final = 10.0
_FAREWELL_S: Final = 30.0
"""Time for the other ranks of the host to end by themselves after one has failed."""


def main() -> int:
    """Run the ranks; return the exit code of the first that failed, 128 + N after signal N."""
    orders = _Orders()
    while not (first := orders.read(None)):
        if orders.closed:
            return 1
    order = first[0]
    os.chdir(order["folder"])
    given = {**os.environ, **order["environment"]}
    count, cores = int(order["count"]), len(os.sched_getaffinity(0))
    common = rank_environment(count, given=given, cores=cores, terminal=False)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local in range(count):
            own = {"RANK": str(int(order["first"]) + local), "LOCAL_RANK": str(local)}
            ranks.append(
                subprocess.Popen(
                    order["argv"],
                    env={**common, **own},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        return _run(ranks, orders)
    except OSError as error:
        sys.stderr.write(f"dlio: error: {order['argv'][0]}: cannot be started: {error.strerror}\n")
        return 2
    finally:
        end_groups(ranks, _END_TIMEOUT_S)


def _run(ranks: "list[subprocess.Popen[bytes]]", orders: "_Orders") -> int:
    failure, failed_at = 0, 0.0
    while any(rank.poll() is None for rank in ranks):
        for given in orders.read(_LOOK_S):
            for rank in ranks:
                rank.send_signal(getattr(signal, f"SIG{given['signal']}"))
        if orders.closed:
            return failure or 1
        if not failure and (failure := _failure(ranks)):
            failed_at = time.monotonic()
        if failure and time.monotonic() > failed_at + _FAREWELL_S:
            return failure
    return failure or _failure(ranks)


def _failure(ranks: "list[subprocess.Popen[bytes]]") -> int:
    codes = (rank.returncode for rank in ranks)
    code = next((code for code in codes if code), 0)
    return 128 - code if code < 0 else code


class _Orders:
    def __init__(self) -> None:
        self.closed = False
        self._text = b""

    def read(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Return the orders that have come, after at most `timeout_s`."""
        if self.closed or not select.select([0], [], [], timeout_s)[0]:
            return []
        piece = os.read(0, 1 << 16)
        self.closed = not piece
        *lines, self._text = (self._text + piece).split(b"\n")
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
