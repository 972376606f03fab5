"""The end of a backward pass, in the thread that called it.

Autograd runs a GPU's part of a backward, with its hooks and callbacks, in a thread of the device,
while the thread that called `backward` blocks. If only that thread may call MPI
(MPI_THREAD_FUNNELED), nothing can be sent before `backward` returns. torch has no hook for that
moment, so `torch.autograd.backward` is replaced while somebody listens.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dlio.comm.funnel import funnel_in_use

_lock = threading.Lock()
_listeners: list[Callable[[], None]] = []
_original: Any = None


def sends_after_backward(devices: Iterable[torch.device]) -> bool:
    """True if gradients on these devices are computed in a thread that may not send them."""
    return funnel_in_use() and any(device.type == "cuda" for device in devices)


def after_backward(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` whenever a `backward` returns, in the thread that called it.

    Returns a function that ends this.
    """
    global _original
    with _lock:
        if _original is None:
            _original = torch.autograd.backward
            torch.autograd.backward = _backward
        _listeners.append(function)

    def end() -> None:
        global _original
        with _lock:
            _listeners.remove(function)
            if not _listeners:
                torch.autograd.backward = _original
                _original = None

    return end


def _backward(*args: Any, **options: Any) -> None:
    original = _original
    original(*args, **options)
    for function in tuple(_listeners):
        function()
