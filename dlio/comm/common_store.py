"""A store of torch.distributed that the ranks of any communicator share."""

import contextlib
import socket
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store, TCPStore

from dlio.comm.comm_protocol import Communicator
from dlio.comm.net.address import INTERFACE, candidates, listen, own_place, reaches
from dlio.errors import CommError


def common_store(comm: Communicator, timeout_s: float) -> Store:
    """Start a store on rank 0 and connect every rank to it. Collective.

    It listens at one address only, which all ranks reach: loopback on one node.

    Raises CommError if they do not all reach one.
    """
    if comm.size == 1:
        return HashStore()
    machines = comm.allgather(own_place())
    listeners = _listeners(machines) if comm.rank == 0 else []
    with contextlib.ExitStack() as stack:
        for each in listeners:
            stack.callback(each.close)
        places = [listener.getsockname() for listener in listeners]
        places = [(str(host), int(port)) for host, port in comm.tell(places)]
        seen = comm.allgather([reaches(*place) for place in places])
        common = [k for k in range(len(places)) if all(each[k] for each in seen)]
        if not common:
            names = ", ".join(host for host, _ in places) or "no address"
            raise CommError(
                f"the ranks do not all reach rank 0 at any of {names}: is there a firewall between "
                f"compute nodes? {INTERFACE} names the network interface to use"
            )
        host, port = places[common[0]]
        if comm.rank > 0:
            limit = timedelta(seconds=timeout_s)
            return TCPStore(host, port, timeout=limit, wait_for_workers=False)
        listener = listeners.pop(common[0])
        listener.setblocking(True)
        return serve_store(listener, host, timeout_s)


def serve_store(
    listener: socket.socket, host: str, timeout_s: float, multi_tenant: bool = False
) -> TCPStore:
    """Serve torch's store at a socket that listens, and that it takes over."""
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
    )


def _listeners(places: list[str]) -> list[socket.socket]:
    """Listen at each address that others may reach; none if none is known."""
    try:
        return [listen(address) for address in candidates(places)]
    except (CommError, OSError):
        return []
