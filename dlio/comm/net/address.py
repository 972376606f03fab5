"""The address at which this rank listens: that of the interface by which ranks reach each other.

Ranks of one node listen at the loopback interface, where nobody outside of it can connect.
"""

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

from dlio.errors import CommError
from dlio.util.units import counted

LOOPBACK: Final = "127.0.0.1"
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""Variable with names of the interfaces that ranks use, the first that exists counts (torch's)."""
_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR."""
_BACKLOG: Final = 1024
_CONNECT_TIMEOUT_S: Final = 5.0
making_listeners: Final = threading.Lock()
"""Held while a listener is made, so that it can be told from others."""
_DISCARD: Final = 9
"""Any port: nothing is sent."""


def own_place() -> str:
    """Name of all processes that reach each other by loopback: a machine, a network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:
        machine = socket.gethostname()
    try:
        # Containers on one machine have loopback interfaces of their own.
        return f"{machine} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{machine} {socket.gethostname()}"


def meeting_address(gather: Callable[[str], Sequence[str]]) -> str:
    """Return the address at which this rank listens. Collective over those that `gather` asks.

    Raises CommError if ranks are on several nodes and no address is known that others can reach.
    """
    return candidates(gather(own_place()), os.environ.get("MASTER_ADDR"))[0]


def candidates(places: Sequence[str], master: str | None = None) -> list[str]:
    """Return addresses at which others may reach this rank, the likeliest first.

    `places` are `own_place()` of all ranks, `master` a host that all can reach. Raises CommError.
    """
    if len(set(places)) <= 1:
        return [LOOPBACK]
    if names := os.environ.get(INTERFACE):
        return [_of_interfaces(names)]
    addresses = [_facing(master)] if master else []
    # The name of a node often stands for 127.0.1.1 in its own /etc/hosts: such addresses are left
    # out below.
    addresses += [*_of_host(socket.gethostname()), *_of_all_interfaces()]
    outside = [address for address in addresses if address and not address.startswith("127.")]
    if not outside:
        raise CommError(
            f"the ranks are on {counted(len(set(places)), 'node')}, and {socket.gethostname()} "
            "knows no "
            f"address of its own but loopback: set {INTERFACE} to the network interface that the "
            "ranks use"
        )
    return list(dict.fromkeys(outside))


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of an address, without blocking."""
    with making_listeners:
        listener = socket.create_server((address, 0), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def reaches(host: str, port: int) -> bool:
    """True if somebody listens there, as far as this rank can see."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _of_interfaces(names: str) -> str:
    """Return the address of the first interface that has one. Raises CommError."""
    for name in names.split(","):
        if address := _of_interface(name.strip()):
            return address
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise CommError(f"{INTERFACE}={names}: this node has {known}; name one with an IPv4 address")


def _of_all_interfaces() -> list[str | None]:
    return [_of_interface(name) for _, name in socket.if_nameindex()]


def _of_interface(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24])
        except OSError:
            return None


def _facing(host: str) -> str | None:
    """Return the own address from which packets go to a host; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it asks the kernel for the route.
            probe.connect((socket.gethostbyname(host), _DISCARD))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def _of_host(name: str) -> list[str]:
    try:
        addresses = socket.getaddrinfo(name, None, family=socket.AF_INET)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in addresses]
