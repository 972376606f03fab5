"""The end of a backward pass, in the thread that asked for it.

Autograd runs a GPU's part of a backward, its hooks and its callbacks, in a thread of the device,
while the thread that called `backward` waits without looking up. Where that thread alone may call
MPI (MPI_THREAD_FUNNELED), nothing can be sent before it is back.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dlio.comm.funnel import funnel_in_use


def sends_after_backward(devices: Iterable[torch.device]) -> bool:
    """Whether gradients on these devices are made where they cannot be sent from."""
    return funnel_in_use() and any(device.type == "cuda" for device in devices)


_lock = threading.Lock()
_called: list[Callable[[], None]] = []
_original: Any = None


def after_backward(function: Callable[[], None]) -> Callable[[], None]:
    """Have `function` called when a `backward` returns, in the thread that asked for it.

    Returns what ends that.
    """
    global _original
    with _lock:
        if _original is None:
            _original = torch.autograd.backward
            torch.autograd.backward = _backward
        _called.append(function)

    def end() -> None:
        global _original
        with _lock:
            _called.remove(function)
            if not _called:
                torch.autograd.backward = _original
                _original = None

    return end


def _backward(*args: Any, **options: Any) -> None:
    original = _original
    original(*args, **options)
    for function in tuple(_called):
        function()
