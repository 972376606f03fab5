"""Gloo's listener is closed to strangers, whichever other listeners a process makes."""

import os
import socket
import threading

from dlio.comm.net.address import LOOPBACK, making_listeners
from dlio.comm.net.gloo_gate import GlooGate, _listeners

LIMIT_S = 60.0
_GET_FILTER = 26
"""SO_GET_FILTER: returns the filter that SO_ATTACH_FILTER has set."""


def _is_closed(listener: int) -> bool:
    with socket.socket(fileno=os.dup(listener)) as own:
        return len(own.getsockopt(socket.SOL_SOCKET, _GET_FILTER, 8)) > 0


def test_a_gate_finds_its_listener_though_another_gate_duplicates_it_meanwhile() -> None:
    before = _listeners(LOOPBACK)
    gate = GlooGate(LOOPBACK)
    (listener,) = (number for inode, number in _listeners(LOOPBACK).items() if inode not in before)
    assert _is_closed(listener)
    inside, leave = threading.Event(), threading.Event()

    def let_in() -> None:
        with gate.opened():
            inside.set()
            leave.wait(LIMIT_S)

    opener = threading.Thread(target=let_in)
    with making_listeners:  # As another gate has it while it looks for its own listener.
        copy = os.dup(listener)
        opener.start()
        assert not inside.wait(0.2)
        os.close(copy)
    assert inside.wait(LIMIT_S)
    assert not _is_closed(listener)
    leave.set()
    opener.join(LIMIT_S)
    assert _is_closed(listener)
