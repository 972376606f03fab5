"""Present tensors to MPI as contiguous host memory.

Tensors that are consecutive in host memory, such as the chunks of one tensor, are used in place;
all others are copied through reused scratch memory. An accelerator's tensors go through pinned
memory: their copies are enqueued on streams, and MPI starts once they are complete.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from dlio.errors import UsageError
from dlio.util.buffer_pool import BufferPool

_MOST_COUNT: Final = 2**31 - 1
"""Largest element count of one MPI call: counts are C ints."""
_WORD: Final = 8
_OVERLAPS: Final = 1
"""torch's word for a tensor whose elements certainly share memory."""
MpiBuffer = list[Any]
"""mpi4py's description of a buffer: [memory, count or (counts, offsets), datatype]."""


def whole(flat: torch.Tensor) -> MpiBuffer:
    """Describe a flat tensor to MPI as bytes, for operations that only move them."""
    size = size_of(flat)
    kind, width = _unit([size])
    return [_memory(flat), size // width, kind]


def split(flat: torch.Tensor, sizes: Sequence[int]) -> MpiBuffer:
    """Describe a flat tensor to MPI as consecutive parts of `sizes` bytes."""
    assert sum(sizes) == size_of(flat), "MPI would read or write outside the memory"
    kind, width = _unit(sizes)
    counts = [size // width for size in sizes]
    return [_memory(flat), (counts, offsets(counts)), kind]


def typed(flat: torch.Tensor, kind: MPI.Datatype) -> MpiBuffer:
    """Describe a flat tensor to MPI as elements of type `kind`, for reductions.

    Raises UsageError for more elements than an MPI count can express.
    """
    count = size_of(flat) // kind.Get_size()
    if count > _MOST_COUNT:
        raise UsageError(f"a reduction of {count} numbers: MPI takes {_MOST_COUNT}; split it")
    return [_memory(flat), count, kind]


def offsets(counts: Sequence[int]) -> list[int]:
    """Return where each of consecutive parts begins, for parts of `counts` elements."""
    return list(accumulate(counts, initial=0))[:-1]


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def check_results(tensors: Sequence[torch.Tensor]) -> None:
    """Raise UsageError for tensors that are not dense, or whose elements share memory."""
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise UsageError("results need dense tensors: call to_dense()")
    if any(torch._debug_has_internal_overlap(tensor) == _OVERLAPS for tensor in tensors):
        raise UsageError(
            "elements of a result share memory, as in an expanded tensor: give a clone()"
        )


class OperationMemory:
    """Host memory of one operation, whose tensors are on one device: `source` copies inputs in,
    `finish` copies results out.
    """

    def __init__(self, scratch: BufferPool, device: torch.device) -> None:
        self.device = device
        self._scratch = scratch
        self._taken: list[npt.NDArray[np.uint8]] = []
        self._homeward: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self._loaded = self._stored = None
        self._stream: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def source(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all tensors as contiguous bytes, copied if necessary; shape (bytes,), uint8.

        For an accelerator's tensors, the copy is complete once `ready()` is true.
        """
        flat = self._as_one(tensors)
        if flat is not None:
            return flat
        flat = self.spare(sum(size_of(tensor) for tensor in tensors))
        at = 0
        for tensor in tensors:
            straight = tensor.detach().resolve_conj().resolve_neg().contiguous()
            flat[at : at + size_of(tensor)].copy_(_bytes(straight), non_blocking=True)
            at += size_of(tensor)
        if self.device.type == "cuda":
            self._loaded = torch.cuda.current_stream(self.device).record_event()
        return flat

    @torch.inference_mode()
    def sink(self, tensors: Sequence[torch.Tensor], apart: bool = False) -> torch.Tensor:
        """Return memory that `finish` copies into the tensors; shape (bytes,), uint8.

        It is `apart` from memory of the tensors' own that could be used, where MPI still reads
        them. Raises UsageError as `check_results`.
        """
        check_results(tensors)
        flat = None if apart else self._as_one(tensors)
        if flat is None:
            flat = self.spare(sum(size_of(tensor) for tensor in tensors))
            self._homeward.append((tensors, flat))
            if self.device.type == "cuda":
                # Results are written once the caller's stream has finished with the tensors.
                self._loaded = torch.cuda.current_stream(self.device).record_event()
        return flat

    def spare(self, size: int) -> torch.Tensor:
        """Return scratch memory that is valid until `finish`; shape (size,), uint8."""
        if self.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._taken.append(self._scratch.take(size))
        return torch.from_numpy(self._taken[-1][:size])

    def ready(self) -> bool:
        """True once the copies started by `source` are complete."""
        return self._loaded is None or self._loaded.query()

    @torch.inference_mode()
    def finish(self) -> None:
        """Copy results into their tensors; on an accelerator, enqueue the copies."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with self.on_stream():
            if self._stream is not None and self._loaded is not None:
                self._stream.wait_event(self._loaded)
            for tensors, flat in self._homeward:
                _unpack(flat, tensors)
                if self._stream is not None:
                    for tensor in tensors:
                        tensor.record_stream(self._stream)
            if self._stream is not None:
                self._stored = self._stream.record_event()
        self._homeward.clear()
        while self._taken:
            self._scratch.give_back(self._taken.pop())

    def synchronize(self) -> None:
        """Make the current stream wait for the results."""
        if self._stored is not None:
            torch.cuda.current_stream(self.device).wait_event(self._stored)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the stream that copies results current; without effect on the CPU."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def _as_one(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the tensors' own memory if it is contiguous host memory, else None."""
        if self.device.type != "cpu":
            return None
        filled = [tensor for tensor in tensors if tensor.numel()]
        if not filled:
            return torch.empty(0, dtype=torch.uint8)
        if any(not t.is_contiguous() or t.is_conj() or t.is_neg() for t in filled):
            return None
        if len(filled) == 1:
            return _bytes(filled[0].detach())
        storage = filled[0].untyped_storage()
        at = filled[0].data_ptr()
        for tensor in filled:
            if tensor.data_ptr() != at or tensor.untyped_storage().data_ptr() != storage.data_ptr():
                return None
            at += size_of(tensor)
        start = filled[0].data_ptr() - storage.data_ptr()
        size = at - filled[0].data_ptr()
        return torch.empty(0, dtype=torch.uint8).set_(storage, start, (size,), (1,))


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    at = 0
    for tensor in tensors:
        part = flat[at : at + size_of(tensor)]
        at += size_of(tensor)
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            _bytes(tensor.detach()).copy_(part, non_blocking=True)
        else:
            straight = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            _bytes(straight).copy_(part, non_blocking=True)
            tensor.detach().copy_(straight)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes; shape (bytes,), uint8."""
    # reshape would not do: a tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _memory(flat: torch.Tensor) -> Any:
    return MPI.memory.fromaddress(flat.data_ptr(), size_of(flat))


def _unit(sizes: Sequence[int]) -> tuple[MPI.Datatype, int]:
    """Return the MPI datatype in which parts of `sizes` bytes are counted, and its size in bytes.

    Words instead of bytes allow longer messages. Raises UsageError for parts that are too long.
    """
    if sum(sizes) <= _MOST_COUNT:
        return MPI.BYTE, 1
    if sum(sizes) // _WORD <= _MOST_COUNT and not any(size % _WORD for size in sizes):
        return MPI.INT64_T, _WORD
    raise UsageError(
        f"a message of {sum(sizes)} bytes: MPI takes {_MOST_COUNT}, or {_WORD} times as many in "
        f"parts that are multiples of {_WORD} bytes; split it"
    )
