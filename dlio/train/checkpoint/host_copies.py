"""Host copies of a run's tensors, taken while the next step computes.

Parameters and the optimizer's state change only in an optimizer step. Their copies are therefore
made by another thread during the next forward and backward pass, and only the next optimizer step
waits for them. All other tensors are copied at once.

Source: Mohan, Phanishayee and Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing"
(FAST 2021), section 4.1.
"""

import threading
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import torch

_cuda: Final[Any] = torch.cuda  # Without types of its own.
_CHUNK: Final = 8 << 20
"""Bytes that are copied between two looks at the interpreter's lock."""


class HostCopies:
    """Copies of tensors in host memory, which is used again by the next ones.

    `begin` is called by the thread that trains, `finish` by the one that writes, and `wait` by the
    first before it changes a tensor.
    """

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        """Copies by name; complete when `finish` has returned. Shapes and strides are the
        tensors'."""
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Mapping[str, torch.Tensor], later: Collection[str]) -> None:
        """Copy tensors, and note those named by `later` for `finish`.

        The tensors of `later` must stay as they are until `wait` has returned True.
        """
        for name in self.held.keys() - tensors.keys():
            del self.held[name]
        self._later = []
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            held = self.held.get(name)
            if held is None or not _fits(held, tensor):
                held = self.held[name] = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda
                ).zero_()  # Its pages are there then.
            if name in later and tensor.numel():
                self._later.append((held, tensor))
            else:
                held.copy_(tensor)
        self._event = None
        if any(tensor.is_cuda for _, tensor in self._later):
            self._event = _cuda.Event()
            self._event.record()
        if self._later:
            self._done.clear()

    def finish(self) -> None:
        """Make the copies that `begin` left; `wait` returns True then, also after an error."""
        try:
            on_device = [pair for pair in self._later if pair[1].is_cuda]
            if on_device:
                _copy_from_device(on_device, self._event)
            for held, tensor in self._later:
                if not tensor.is_cuda:
                    _copy(held, tensor)
        finally:
            self._later = []
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Return True when all copies are made, False if that takes longer."""
        return self._done.wait(timeout_s)


def _fits(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (held.shape, held.dtype) == (tensor.shape, tensor.dtype) and (
        held.stride() == tensor.stride() or not _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill a range of memory, in whatever order of the dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda k: (-strides[k], k))
    return tensor.permute(order).is_contiguous()


def _flat(tensor: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return the bytes of a dense tensor in the order of its memory."""
    line = tensor.as_strided((tensor.numel(),), (1,))
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = line.view(torch.uint8).numpy()
    return flat


def _copy(held: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of host memory in this thread alone: torch would take a core for each part."""
    if not _is_dense(tensor) or held.stride() != tensor.stride():
        held.copy_(tensor)
        return
    into, source = _flat(held), _flat(tensor)
    for start in range(0, len(source), _CHUNK):
        np.copyto(into[start : start + _CHUNK], source[start : start + _CHUNK])


def _copy_from_device(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], event: torch.cuda.Event | None
) -> None:
    """Copy tensors of a device on a stream of its own, from when `event` has passed."""
    stream = _cuda.Stream(pairs[0][1].device)
    if event is not None:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        for held, tensor in pairs:
            held.copy_(tensor, non_blocking=True)
    stream.synchronize()
