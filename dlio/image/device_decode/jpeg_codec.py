"""Decode and crop batches of JPEGs on a device, in independent slots.

A slot has a decoder of nvImageCodec, a queue of the device (a CUDA stream), and memory for pixels.
Batches in different slots overlap. In a slot, one batch is decoded to one flat buffer in its order,
cropped by one kernel, and waited for. nvJPEG copies coded bytes to page-locked memory of its own:
another copy of dlio's gained nothing.

An image that the device does not decode is decoded by the CPU, which names the damage if there is
any.
"""

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import DecodeError, DlioError
from dlio.image.decoder import decode_whole
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.image.device_decode.encoded_image import EncodedImage
from dlio.image.device_decode.nvimagecodec import NvImageCodec, PixelBuffer
from dlio.image.tensors import Normalize

_ALIGNMENT: Final = 64
"""Bytes at whose multiples images begin in a slot's memory."""


@dataclass(slots=True)
class DecodedCrops:
    """A batch of crops."""

    crops: torch.Tensor
    """Shape (n, 3, height, width), in channels-last memory; uint8, or normalised. Black where an
    image failed."""
    failed: dict[int, DecodeError] = field(default_factory=dict)
    """Error of each image that is damaged, by its number."""
    sent: int = 0
    """Coded bytes that the device was given."""
    by_cpu: list[int] = field(default_factory=list)
    """Numbers of images that the CPU decoded in place of the device."""


class HostQueue:
    """The order of work on a device; here of the CPU, which does everything at once.

    Everything that a decoder's slot does on a device goes through these methods, so that tests can
    record the order without a device. One thread uses it at a time.
    """

    device = torch.device("cpu")
    number = 0
    """The `cudaStream_t`; 0 on the CPU."""

    def running(self) -> AbstractContextManager[object]:
        """Queue torch's work here, and allocate its memory for here."""
        return nullcontext()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a host tensor to the device."""
        return tensor

    def wait(self) -> None:
        """Wait until everything queued so far is done. The GIL is released."""


class CudaQueue(HostQueue):
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # torch gives these constructors no types.
        self.device = device
        self._stream = cuda.Stream(device)
        # Waits in the driver, without spinning.
        self._done = cuda.Event(blocking=True)
        self.number = int(self._stream.cuda_stream)

    def running(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not page-locked: the driver has copied it to memory of its own when the call returns.
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()


def queue_for(device: torch.device) -> HostQueue:
    """Return a new queue of a device: "cpu" or "cuda"."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


class _DecoderSlot:
    """A decoder, a queue and memory. One batch at a time."""

    def __init__(self, library: NvImageCodec, order: HostQueue) -> None:
        self.library, self.queue = library, order
        self._pixels = torch.empty(0, dtype=torch.uint8, device=order.device)

    def pixels(self, size: int) -> torch.Tensor:
        """Return memory of the device for decoded images, flat; it is valid until the next call."""
        if len(self._pixels) < size:
            self._pixels = torch.empty(
                size + size // 4, dtype=torch.uint8, device=self.queue.device
            )
        return self._pixels


class JpegCodec:
    """Decodes JPEGs on a device, and crops them. Thread-safe; owner: who closes it.

    There are `slots` batches decoded at a time, each by so many `threads` of the CPU; `timeout_s`
    is for the wait for a slot. A slot holds `most_bytes` of decoded images at a time: a larger
    batch is decoded in parts, but for a single image that is larger. `library` and `queue_of` make
    the parts of a slot; others than nvImageCodec and CUDA for tests.

    Raises UsageError where nvImageCodec is not installed.
    """

    def __init__(
        self,
        device: torch.device,
        slots: int,
        threads: int,
        timeout_s: float,
        most_bytes: int = 1 << 30,
        library: Callable[[torch.device, int], NvImageCodec] = NvImageCodec,
        queue_of: Callable[[torch.device], HostQueue] = queue_for,
    ) -> None:
        self.device = device
        self._timeout_s, self._most_bytes = timeout_s, most_bytes
        self._slots = [
            _DecoderSlot(library(device, threads), queue_of(device)) for _ in range(slots)
        ]
        self._free: queue.SimpleQueue[_DecoderSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    def close(self) -> None:
        """End the decoders' threads. No batch may be under way."""
        for slot in self._slots:
            slot.library.close()
        self._slots.clear()

    def prepare(self, image: EncodedImage) -> None:
        """Have the library read an image's header. From any thread, and before `crops`, whose one
        thread would read the headers of a whole batch."""
        box = image.part
        sides = box.top, box.left, box.top + box.height, box.left + box.width
        image.source = self._slots[0].library.source(image.data, sides)

    def crops(
        self,
        images: Sequence[EncodedImage],
        rows: Sequence[Sequence[int]],
        size: tuple[int, int],
        ready: dict[int, npt.NDArray[np.uint8]],
        count: int,
        normal: Normalize | None = None,
    ) -> DecodedCrops:
        """Decode images and cut their crops out; return when the device is done.

        `rows` are the rows of the result for each image's crops, `count` are those of all of it,
        and those in `ready` are crops already, of shape (height, width, 3). The sides are (height,
        width); pixels are uint8 without `normal`.

        Raises DlioError if no slot becomes free in time.
        """
        with self._slot() as slot, slot.queue.running():
            order = slot.queue
            shape = (count, *size, 3)
            dtype = torch.uint8 if normal is None else normal.dtype
            out = torch.zeros(shape, dtype=dtype, device=self.device)
            made = DecodedCrops(out.permute(0, 3, 1, 2))
            try:
                for run in _runs(images, self._most_bytes):
                    self._decode(slot, images, rows, run, normal, made)
                    # Its memory is for the next run, or the next batch.
                    order.wait()
                if ready:
                    crops = order.send(torch.from_numpy(np.stack(list(ready.values()))))
                    crops = crops if normal is None else normal.of_bytes(crops)
                    numbers = order.send(torch.tensor(list(ready)))
                    made.crops[numbers] = crops.permute(0, 3, 1, 2)
            finally:
                order.wait()
            return made

    def _decode(
        self,
        slot: _DecoderSlot,
        images: Sequence[EncodedImage],
        rows: Sequence[Sequence[int]],
        run: range,
        normal: Normalize | None,
        made: DecodedCrops,
    ) -> None:
        own, order = images[run.start : run.stop], slot.queue
        rooms = [-(-_bytes(image) // _ALIGNMENT) * _ALIGNMENT for image in own]
        *places, total = itertools.accumulate(rooms, initial=0)
        pixels = slot.pixels(total)
        into = [
            PixelBuffer(pixels, at, image.part.height, image.part.width)
            for image, at in zip(own, places, strict=True)
        ]
        made.sent += sum(len(image.data) for image in own)
        for image in own:
            if image.source is None:
                self.prepare(image)
        known = [k for k, image in enumerate(own) if image.source is not None]
        sources = [own[k].source for k in known]
        done = slot.library.decode(sources, [into[k] for k in known], order.number)
        decoded = {k for k, is_done in zip(known, done, strict=True) if is_done}
        lost = set()
        for k in range(len(own)):
            if k not in decoded:
                made.by_cpu.append(run[k])
                try:
                    into[k].tensor().copy_(order.send(_by_cpu(own[k])))
                except DecodeError as error:
                    made.failed[run[k]] = error
                    lost.add(k)
        about = _about(own, places, lost)
        numbers, boxes, factors = (order.send(each) for each in about)
        wanted = [row for k in run for row in rows[k]]
        size = made.crops.shape[2], made.crops.shape[3]
        if wanted == list(range(len(made.crops))):
            crop_batch(pixels, numbers, boxes, size, made.crops, normal, factors)
        else:
            crops = crop_batch(pixels, numbers, boxes, size, None, normal, factors)
            made.crops[order.send(torch.tensor(wanted))] = crops

    @contextmanager
    def _slot(self) -> Iterator[_DecoderSlot]:
        try:
            slot = self._free.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DlioError(
                f"no decoder of {self.device} became free within {self._timeout_s:.0f} s: the "
                "device may hang (DLIO_TIMEOUT sets the deadline)"
            ) from None
        try:
            yield slot
        finally:
            self._free.put(slot)


def _bytes(image: EncodedImage) -> int:
    """Bytes of an image's part, decoded."""
    return 3 * image.part.height * image.part.width


def _runs(images: Sequence[EncodedImage], most: int) -> Iterator[range]:
    """Yield runs of images that are decoded at a time: of so many bytes, or of one image."""
    start = held = 0
    for k, image in enumerate(images):
        if held and held + _bytes(image) > most:
            yield range(start, k)
            start, held = k, 0
        held += _bytes(image)
    if held:
        yield range(start, len(images))


def _about(
    images: Sequence[EncodedImage], places: Sequence[int], lost: set[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (images, boxes, factors) for `crop_batch`, of all crops of some images in order; those
    of lost images are black."""
    about, boxes, factors = [], [], []
    for k, (image, at) in enumerate(zip(images, places, strict=True)):
        for box, factor in image.crops:
            height = 0 if k in lost else box.height
            about.append((at, image.part.height, image.part.width))
            boxes.append((box.top, box.left, height, box.width, box.flip, box.upend))
            factors.append(factor)
    return (
        torch.tensor(about, dtype=torch.int64),
        torch.tensor(boxes, dtype=torch.int32),
        torch.tensor(factors, dtype=torch.int32),
    )


def _by_cpu(image: EncodedImage) -> torch.Tensor:
    """Decode the part of an image. Raises DecodeError."""
    part = image.part
    pixels = decode_whole(image.data.data, image.name)
    pixels = pixels[part.top : part.top + part.height, part.left : part.left + part.width]
    return torch.from_numpy(np.ascontiguousarray(pixels))
