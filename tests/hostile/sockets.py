"""The kernel's tables of a process's sockets."""

import contextlib
import os
import socket
from pathlib import Path

__all__ = ["listening"]

_LISTENING = "0A"


def listening(process: int) -> set[tuple[str, int]]:
    """Return the addresses and ports at which a process listens, by the kernel's tables."""
    links = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(os.readlink(entry))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{process}/net/{table}").read_text("ascii").splitlines()[1:]:
            fields = row.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in links:
                host, port = fields[1].split(":")
                raw = bytes.fromhex(host)
                name = socket.inet_ntoa(raw[::-1]) if len(raw) == 4 else host
                addresses.add((name, int(port, 16)))
    return addresses
