"""Batches of crops that a device decodes (`decode="device"`).

The loader's threads only read headers, draw crops, and copy the bytes that the crops need. A batch
is decoded when all its samples are there. Order, labels and the parts that crops show are those of
`CropBatchBuilder`, and so are its errors where the damage shows in a file's structure.

Images that the device does not take are decoded by those threads, as `CropBatchBuilder` has it.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm.deadlines import default_timeout_s
from dlio.data.reader_contract import SampleName
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.image.crop_geometry import CropGeometry
from dlio.image.device_decode.encoded_image import EncodedImage, encoded, header_of
from dlio.image.device_decode.jpeg_codec import JpegCodec
from dlio.loader.contract import BatchData, CollateFn
from dlio.loader.planned_engine.mixup_partners import BatchPartners
from dlio.loader.recipe import Recipe
from dlio.storage.counters import Counters
from dlio.util.buffer_pool import BufferPool

_log = logging.getLogger("dlio")
_MOST_SPARE: Final = 64
_MOST_SLOTS: Final = 3
"""Batches that a device decodes at a time: one is copied, one decoded, one cropped."""


class DeviceDecodeBuilder:
    """Images as crops on a device, in batches like those of `CropBatchBuilder`. Owner: the engine.

    Args:
        recipe: one that `dlio.loader.decode_device.check_recipe` lets pass.
        collate: a collate function of the user, which gets crops on the device; None for torch's.
        device: "cpu" or a CUDA device.
        threads: of the loader.
        counters: get the counts of images and bytes.
    """

    owns_payloads = False

    def __init__(
        self,
        recipe: Recipe,
        batch_size: int,
        collate: CollateFn | None,
        device: torch.device,
        threads: int,
        counters: Counters,
    ) -> None:
        self.recipe, self.collate, self.counters = recipe, collate, counters
        steps = recipe.batch_transform
        self.normal = None if steps is None else steps.normal
        """Done by the kernel that crops; the other steps of a whole batch follow."""
        self.batch_bytes = batch_size * int(np.prod(recipe.crop.shape))
        slots = min(_MOST_SLOTS, threads)
        each = max(1, threads // slots)
        self.codec = JpegCodec(device, slots, each, default_timeout_s())
        self.coded = BufferPool(_MOST_SPARE)
        """Memory for the bytes of batches: with fresh memory, threads would wait for its pages."""
        self._to_say = threading.Lock()
        """Held from the first word about the CPU's part on."""

    def begin(
        self, epoch: int, samples: npt.NDArray[np.int64], pairs: BatchPartners | None = None
    ) -> "_DeviceCrops":
        return _DeviceCrops(self, epoch, samples, pairs)

    def close(self) -> None:
        """End the decoders."""
        self.codec.close()

    def by_cpu(self, names: Sequence[object]) -> None:
        """Count images that the CPU decodes in place of the device, and say so once."""
        self.counters.add("fallbacks", len(names))
        if names and self._to_say.acquire(blocking=False):
            _log.warning(
                "%s is decoded by the CPU, as nvImageCodec does not take it: baseline JPEGs alone "
                "are decoded on the device (stats()['fallbacks'] counts the others)",
                names[0],
            )


class _DeviceCrops:
    """One batch: slots are rows of images, in order; partners that are mixed in come behind."""

    def __init__(
        self,
        maker: DeviceDecodeBuilder,
        epoch: int,
        samples: npt.NDArray[np.int64],
        pairs: BatchPartners | None,
    ) -> None:
        self._maker, self._recipe, self._pairs = maker, maker.recipe, pairs
        self._epoch, self._samples = epoch, samples
        self._uniforms = maker.recipe.decoder.draw(epoch, samples)
        sizes = maker.recipe.reader.sizes[samples]
        self._ends = np.cumsum(sizes).tolist()
        self._coded = maker.coded.lend(int(sizes.sum())).data
        """Memory for the bytes of all samples, one behind another."""
        self._encoded: dict[int, EncodedImage] = {}
        self._ready: dict[int, npt.NDArray[np.uint8]] = {}
        """Crops of images that the CPU has decoded."""
        self._companions: dict[int, Any] = {}
        self._crops: torch.Tensor | None = None
        self._partners: dict[int, int] = {}
        """Row of each partner that is not among the samples."""

    def make(self, slot: int, sample: int, payload: Buffer) -> float:
        self._gather(slot, sample, payload, self._uniforms[slot])
        return 0.0

    def _gather(
        self, row: int, sample: int, payload: Buffer, uniforms: npt.NDArray[np.float64]
    ) -> None:
        recipe = self._recipe
        assert recipe.companion is not None
        values, name = recipe.fields(sample, payload), SampleName(recipe.reader, sample)
        image = values[recipe.companion.image]
        header = header_of(image)
        if header is None:
            crop = np.empty(recipe.crop.shape, np.uint8)
            self._companions[row] = recipe.into(crop, sample, payload, uniforms)
            self._ready[row] = crop
            self._maker.by_cpu([name])
            return
        room = self._room(row, len(image))
        made = encoded(image, header, recipe.decoder, uniforms.tolist(), name, room)
        self._maker.codec.prepare(made)
        move = CropGeometry(made.shown, recipe.crop.size, recipe.crop.width)
        self._companions[row] = recipe.accompanying(values, move, sample)
        self._encoded[row] = made

    def _room(self, row: int, size: int) -> memoryview | None:
        """Return memory for the bytes of a sample; None for partners, and for a sample that has
        become larger in its source."""
        if row >= len(self._ends):
            return None
        room = self._coded[self._ends[row - 1] if row else 0 : self._ends[row]]
        return room if len(room) >= size else None

    def settle(self, intact: Sequence[int]) -> dict[int, Exception]:
        """Decode the batch; return the errors of slots.

        Args:
            intact: slots that have been made.
        """
        rows = list(intact)
        count = len(self._samples)
        if self._pairs is not None:
            rows += self._gather_partners(rows)
            count += len(self._partners)
        coded = [row for row in rows if row in self._encoded]
        crops = self._recipe.crop.crops
        made = self._maker.codec.crops(
            [self._encoded[row] for row in coded],
            [range(row * crops, (row + 1) * crops) for row in coded],
            (self._recipe.crop.size, self._recipe.crop.width),
            self._ready_rows(rows),
            count * crops,
            self._maker.normal,
        )
        self._crops = made.crops
        counters = self._maker.counters
        counters.add("device_images", len(coded) - len(made.by_cpu))
        counters.add("device_bytes", made.sent)
        self._maker.by_cpu([self._encoded[coded[k]].name for k in made.by_cpu])
        failed: dict[int, Exception] = {coded[k]: error for k, error in made.failed.items()}
        self._encoded.clear()
        self._ready.clear()
        self._coded = memoryview(b"")
        return self._without_partners(failed)

    def _ready_rows(self, rows: Sequence[int]) -> dict[int, npt.NDArray[np.uint8]]:
        """Return the rows of `JpegCodec.crops` for crops that the CPU has made."""
        crops, shape = self._recipe.crop.crops, self._recipe.crop.shape[-3:]
        return {
            row * crops + k: part
            for row in rows
            if row in self._ready
            for k, part in enumerate(self._ready[row].reshape(-1, *shape))
        }

    def _gather_partners(self, slots: Sequence[int]) -> list[int]:
        """Gather partners that are not among the samples; return their rows."""
        assert self._pairs is not None
        pairs = self._pairs.of(slots)
        own = set(self._samples[list(slots)].tolist())
        missing = [each for each in dict.fromkeys(pairs.partners.tolist()) if each not in own]
        uniforms = self._recipe.decoder.draw(self._epoch, np.array(missing, np.int64))
        for sample, drawn in zip(missing, uniforms, strict=True):
            row = len(self._samples) + len(self._partners)
            try:
                self._gather(row, sample, pairs.fetch(sample), drawn)
            except (SourceError, CorruptBlock):
                if not pairs.skip:
                    raise
                continue
            self._partners[sample] = row
        return list(self._partners.values())

    def _without_partners(self, failed: dict[int, Exception]) -> dict[int, Exception]:
        """Leave out partners that failed; return the errors of slots. Raises a partner's error."""
        for sample, row in list(self._partners.items()):
            error = failed.pop(row, None)
            if error is not None:
                assert self._pairs is not None
                if not self._pairs.skip:
                    raise error
                del self._partners[sample]
        return failed

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        recipe, crops, samples = self._recipe, self._crops, self._samples
        assert recipe.companion is not None
        assert crops is not None
        chosen = range(len(samples)) if slots is None else slots
        companions = [self._companions[slot] for slot in chosen]
        samples = samples[list(chosen)]
        mixed: tuple[npt.NDArray[np.int64], ...] = ()  # Samples behind the others, and partners.
        rows = list(chosen)
        if self._pairs is not None:
            wanted = self._pairs.of(chosen).partners.tolist()
            places = {sample: k for k, sample in reversed(list(enumerate(samples.tolist())))}
            extra = list(self._partners)
            for sample in extra:
                places[sample] = len(rows)
                rows.append(self._partners[sample])
                companions.append(self._companions[self._partners[sample]])
            partners = [places.get(sample, k) for k, sample in enumerate(wanted)]
            mixed = np.array(extra, np.int64), np.array(partners, np.int64)
        made = crops
        if recipe.crop.crops > 1:
            made = crops.view(-1, recipe.crop.crops, *crops.shape[1:])
        if rows != list(range(len(made))):
            # In channels-last memory, as selecting rows would not leave it.
            last = made.movedim(-3, -1)
            made = last[torch.tensor(rows, dtype=torch.int64, device=last.device)].movedim(-1, -3)
            _wait(made)
        collate, companion = self._maker.collate, recipe.companion
        if collate is None:
            batch = companion.batch(made, companions)
            return (*batch, *mixed) if mixed else batch
        firsts: BatchData = made
        if recipe.batch_transform is not None:
            targets: Any = companions
            if recipe.mixes:
                targets = torch.tensor(companions, device=made.device)
            firsts, companions = recipe.batch_transform(made, targets, self._epoch, samples, *mixed)
        collated = collate(list(map(companion.sample, firsts, companions)))
        _wait(made)
        return collated


def _wait(tensor: torch.Tensor) -> None:
    """Wait for this thread's work on a CUDA device: other streams use its result."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
