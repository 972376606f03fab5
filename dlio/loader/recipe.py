"""A recipe: how a payload becomes a sample; and the recipe of crops of images.

Samples of other kinds are made by the recipes of `dlio.loader.sample_recipes`, which chooses the
one of a data set. A recipe gives the same sample to `dataset[i]` and to a batch; random numbers are
keyed by (seed, epoch, sample).
"""

import copy
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.reader_contract import Reader, SampleName, data_bytes
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, printable
from dlio.image.crop import Crop
from dlio.image.crop_geometry import CropGeometry
from dlio.image.decoder import Decoder, decode_all
from dlio.image.fusion import BatchTransform, TransformParts
from dlio.image.seeded_functions import SeededFunctions
from dlio.loader.contract import Sample, Transform
from dlio.loader.picture_targets import Companion
from dlio.util.thread_copies import mine


class Recipe(ABC):
    """From a payload to a sample. Thread-safe.

    `companion` makes what belongs to a picture; None for samples that are not pictures. `transform`
    is the user's, of each sample or of the part that the recipe says, and `functions` are those of
    the user's that may draw random numbers.
    """

    where = "transform="
    """Name of the user's function, for errors."""
    crops = False
    """True if samples are crops of images."""
    batch_transform: BatchTransform | None = None
    """Transform of a whole batch of crops, done on the device where the batch lies."""

    def __init__(
        self,
        reader: Reader,
        companion: Companion | None,
        transform: Transform | None,
        seed: int,
        functions: Sequence[object],
    ) -> None:
        self.reader, self.companion, self.transform = reader, companion, transform
        self.seed = seed
        functions = [each for each in functions if each is not None]
        self._seeded = SeededFunctions(functions) if functions else None

    def seeded(self, seed: int) -> Self:
        """Return this recipe with the random numbers of another seed."""
        made = copy.copy(self)
        made.seed = seed
        if self.batch_transform is not None:
            made.batch_transform = self.batch_transform.seeded(seed)
        return made

    @property
    def draws(self) -> bool:
        """False if samples do not depend on the seed."""
        return True

    @property
    def moves(self) -> bool:
        """True if samples have boxes or masks, which move with the pixels."""
        return self.companion is not None and self.companion.moves

    @property
    def ragged(self) -> bool:
        """True if batches are lists of whole pictures and of their companions."""
        return False

    @property
    def is_random(self) -> bool:
        """True if samples are known to differ from epoch to epoch."""
        return self._seeded is not None and self._seeded.drew

    @property
    def mixes(self) -> bool:
        """True if batches are mixtures of images, whose labels are probabilities."""
        return self.batch_transform is not None and self.batch_transform.mixes

    @property
    def pairs(self) -> bool:
        """True if a sample may be mixed with any other sample of its step."""
        return self.batch_transform is not None and self.batch_transform.pairs

    @property
    def sample_bytes(self) -> int:
        """Approximate bytes of a sample that is not cropped."""
        return data_bytes(self.reader) // max(1, len(self.reader))

    @abstractmethod
    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return (sample, seconds in the user's functions).

        Raises SourceError for a payload that does not match the schema, DecodeError for a damaged
        image.
        """

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        """Make one sample, as `dataset[i]` returns it. Raises as `make`."""
        return self.make(epoch, sample, payload)[0]

    def fields(self, sample: int, payload: Buffer) -> dict[str, Any]:
        """Split a payload into its fields, as the schema does. Raises SourceError."""
        try:
            return self.reader.schema.split(payload)
        except CorruptBlock as error:
            raise self._mismatch(sample, error) from error

    def accompanying(self, values: dict[str, Any], move: CropGeometry | None, sample: int) -> Any:
        """Make the companion of a picture, of a payload's fields; `move` is that of its crop, None
        for the whole picture. Raises as `make`."""
        assert self.companion is not None
        try:
            return self.companion.made(values, move, SampleName(self.reader, sample))
        except (CorruptBlock, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._mismatch(sample, error) from error

    def _drawing(self, epoch: int, sample: int, crop: int = 0) -> AbstractContextManager[None]:
        """Give the user's functions the random numbers of a sample's crop."""
        if self._seeded is None:
            return nullcontext()
        return self._seeded.sample(self.seed, epoch, sample, crop)

    def _apply(
        self, transform: Transform | None, made: Sample, epoch: int, sample: int, crop: int = 0
    ) -> tuple[Sample, float]:
        """Return (the transform's result, seconds); an error of the transform names the sample."""
        if transform is None:
            return made, 0.0
        started = time.perf_counter()
        try:
            with self._drawing(epoch, sample, crop):
                made = mine(transform)(made)
        except Exception as error:
            kind = "" if self.crops else f", which is a {type(made).__name__}"
            name = printable(f"{self.reader.name(sample)!r} of {self.reader.path}")
            error.add_note(f"dlio: in {self.where} of sample {sample}, {name}{kind}")
            raise
        return made, time.perf_counter() - started

    def _mismatch(self, sample: int, error: Exception) -> SourceError:
        return SourceError(f"{self.reader.path}: sample {self.reader.name(sample)!r}: {error}")


class CropRecipe(Recipe):
    """Crops of images: (crop or the transform's result, its label or target).

    A crop is a uint8 tensor of shape (3, height, width); several are one of shape (crops, 3,
    height, width), in channels-last memory unless `contiguous`. Those `through_decoded` are cut
    out of images that a tier keeps decoded.
    """

    crops = True
    companion: Companion

    def __init__(
        self,
        reader: Reader,
        companion: Companion,
        transform: Transform | None,
        parts: TransformParts,
        crop: Crop,
        seed: int,
        through_decoded: bool,
        contiguous: bool = False,
    ) -> None:
        rest = parts.rest if parts.whole is None else parts.whole
        super().__init__(reader, companion, rest, seed, [transform])
        self.crop, self._parts, self.contiguous = crop, parts, contiguous
        self.decoder = Decoder(crop, seed, through_decoded)
        if parts.batchwise:
            self.batch_transform = BatchTransform(parts.batchwise, seed, len(reader.classes))

    def seeded(self, seed: int) -> Self:
        made = super().seeded(seed)
        made.decoder = Decoder(self.crop, seed, self.decoder.kept)
        return made

    @property
    def is_random(self) -> bool:
        return self.crop.draws > 0 or bool(self._parts.paints) or super().is_random

    @property
    def transforms(self) -> bool:
        """True if `transformed` changes a crop."""
        return self.transform is not None or bool(self._parts.paints)

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        pixels = np.empty(self.crop.shape, np.uint8)
        uniforms = self.decoder.draw(epoch, np.array([sample], np.int64))[0]
        companion = self.decode(pixels, sample, payload, uniforms)
        made, seconds = self.transformed(pixels, epoch, sample)
        if self.batch_transform is not None:
            made = self.batch_transform.one(made, epoch, sample)
        return self.companion.sample(made, companion), seconds

    def decode(
        self,
        slot: npt.NDArray[np.uint8],
        sample: int,
        payload: Buffer,
        uniforms: npt.NDArray[np.float64],
    ) -> Any:
        """Do `decode_many` for one sample; return its companion. Raises as `make`."""
        (made,) = self.decode_many([slot], [sample], [payload], [uniforms])
        if isinstance(made, Exception):
            raise made
        return made

    def decode_many(
        self,
        slots: Sequence[npt.NDArray[np.uint8]],
        samples: Sequence[int],
        payloads: Sequence[Buffer],
        uniforms: Sequence[npt.NDArray[np.float64]],
    ) -> list[Any]:
        """Decode the crops of samples into their slots (RGB, of the crop's shape); return
        companions, or errors in their places. `uniforms` are the samples' rows of
        `decoder.draw`."""
        made: list[Any] = [None] * len(samples)
        # An error takes its sample's place: the others of the call are made.
        fields: dict[int, dict[str, Any]] = {}
        for k, (sample, payload) in enumerate(zip(samples, payloads, strict=True)):
            try:
                fields[k] = self.fields(sample, payload)
            except Exception as error:
                made[k] = error
        regions = decode_all(
            self.decoder,
            [values[self.companion.image] for values in fields.values()],
            [SampleName(self.reader, samples[k]) for k in fields],
            [uniforms[k] for k in fields],
            [slots[k] for k in fields],
        )
        for (k, values), region in zip(fields.items(), regions, strict=True):
            if isinstance(region, Exception):
                made[k] = region
                continue
            move = None
            if region is not None:
                move = CropGeometry(region, self.crop.size, self.crop.width)
            try:
                made[k] = self.accompanying(values, move, samples[k])
            except Exception as error:
                made[k] = error
        return made

    def prepare(self, sample: int, payload: Buffer) -> tuple[npt.NDArray[np.uint8], Any, float]:
        """Decode an image as tiers of decoded images keep it; return (pixels, see
        `Decoder.prepare`; its companion; seconds that decoding took). Raises as `make`."""
        values = self.fields(sample, payload)
        beside = self.accompanying(values, None, sample)
        began = time.thread_time()  # Leaves out the time in which other threads ran.
        # A name is made when an error is printed: names of files in archives have to be looked up.
        encoded, name = values[self.companion.image], SampleName(self.reader, sample)
        pixels = self.decoder.prepare(encoded, name)
        return pixels, beside, time.thread_time() - began

    def transformed(
        self, slot: npt.NDArray[np.uint8], epoch: int, sample: int
    ) -> tuple[Sample, float]:
        """Return (the transform's result for the crops in a slot, seconds in the transform).

        Results of several crops are collated as a batch's are.
        """
        seconds = 0.0
        # In place, in the batch's memory: transforms that keep the size need no tensor in between.
        if self._parts.paints:
            started = time.perf_counter()
            for number, pixels in enumerate(slot.reshape(-1, *slot.shape[-3:])):
                self._parts.paint(pixels, self.seed, epoch, sample, number)
            seconds = time.perf_counter() - started
        images = torch.from_numpy(slot).movedim(-1, -3)
        if self.contiguous:
            images = images.contiguous()
        if self.transform is None:
            return images, seconds
        results = []
        for number, image in enumerate([images] if self.crop.crops == 1 else images):
            made, more = self._apply(self.transform, image, epoch, sample, number)
            results.append(made)
            seconds += more
        if self.crop.crops > 1:
            return torch.utils.data.default_collate(results), seconds
        return results[0], seconds
