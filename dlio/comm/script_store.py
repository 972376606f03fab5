"""The store of torch for scripts that make process groups of their own, in a process of its own.

    python -P -m dlio.comm.script_store LISTENER

torch's store keeps every connection that anybody opens. If it runs out of descriptors, the launcher
and the ranks still have theirs. It ends with standard input.
"""

import contextlib
import resource
import socket
import sys

from dlio.comm.common_store import serve_store


def main(descriptor: int, timeout_s: float) -> None:
    """Serve at the listening socket of a descriptor until standard input ends."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.socket(fileno=descriptor) as listener:
        served = serve_store(listener, listener.getsockname()[0], timeout_s)
    sys.stdin.read()
    del served


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
