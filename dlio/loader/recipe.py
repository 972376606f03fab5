"""The recipe of a data set: how a payload becomes a sample."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.reader_contract import Reader, SampleName, data_bytes
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.image.crop import Crop
from dlio.image.crop_geometry import CropGeometry
from dlio.image.decoder import Decoder
from dlio.image.fusion import BatchTransform, check_pixelwise, fused
from dlio.image.seeded_functions import SeededFunctions
from dlio.image.together import decode_all
from dlio.loader.contract import Sample, Transform
from dlio.loader.picture_targets import companion_of
from dlio.loader.sample import decode_sample, decoded_field
from dlio.storage.decoded_tier import DecodedTier
from dlio.util.printable import printable


class ForeignDecoder(Protocol):
    """Makes samples where the data set of another library is read."""

    functions: Sequence[object]
    """The user's functions of samples, which may draw random numbers; None among them is none."""

    def __call__(self, payload: Buffer, sample: int, /) -> Sample:
        """Make sample number `sample` of its payload."""


class Recipe:
    """From a payload to a sample; the same for `dataset[i]` and for batches. Thread-safe.

    Images become crops, next to their label or other companions, and samples of other
    kinds are decoded whole. `Dataset` and the makers of batches hold one recipe together.

    Args:
        reader: of the payloads.
        image_size: side of square crops of images, in pixels; None for no crops.
        train: random crops and flips; otherwise the middle of the image.
        transform: the user's, which is cut into parts: see `dlio.image.fusion.fused`.
        seed: of the random numbers of crops and transforms.
        through_decoded: crops are cut out of images that a tier keeps decoded.
        finish: replaces everything else, for data sets of other libraries.
        min_visible: least share of its area with which a box stays in a crop.
        crops: of each image, where the transform does not begin with crops.

    Raises UsageError for a transform that would move pixels, and leave boxes behind, for mixtures
    of images without classes, and for several crops of samples that have none.
    """

    where = "transform="
    """Name of the user's function, for errors."""

    def __init__(
        self,
        reader: Reader,
        *,
        image_size: int | None,
        train: bool,
        transform: Transform | None,
        seed: int,
        through_decoded: bool,
        finish: ForeignDecoder | None,
        min_visible: float = 0.0,
        crops: int = 1,
    ) -> None:
        self.reader = reader
        self.finish = finish
        self.companion = None if finish is not None else companion_of(reader.schema, min_visible)
        """Makes the companion of a picture; None if the samples are of another kind."""
        self._seed, self._parts = seed, fused(transform)
        parts, companion = self._parts, self.companion
        self.moves = companion is not None and companion.moves
        """True if samples have boxes or masks, which move with the pixels."""
        self._pictures = companion is not None and not self.moves and parts.whole is not None
        """True if the transform takes whole pictures, without their companions."""
        self.crops = (
            companion is not None
            and not self._pictures
            and (image_size is not None or parts.crop is not None)
        )
        """True if samples are crops of images."""
        self.ragged = self.moves and not self.crops
        """True if batches are lists of whole pictures and of their companions."""
        self.crop = parts.crop or Crop(image_size or 1, train, crops=crops)
        if crops > 1 and (parts.crop is not None or not self.crops):
            raise UsageError(
                f"{reader.path}: crops={crops}: "
                + ("transform= crops" if parts.crop is not None else "its samples are not cropped")
                + ": leave crops= out, or give transform=RandomResizedCrop(size, crops=...)"
            )
        self.transform: Transform | None = transform
        """User's transform of each crop, or of each sample that is not cropped."""
        self.batch_transform: BatchTransform | None = None
        """Transform of a whole batch of crops, done on the device where the batch lies."""
        if self.crops:
            self.transform = parts.rest if parts.whole is None else parts.whole
            if self.moves:
                for step in [self.transform, *(step for _, step in parts.paints)]:
                    check_pixelwise(step, reader.path)
            if self.moves and self.crop.crops > 1:
                raise UsageError(
                    f"{reader.path}: crops={self.crop.crops}: its boxes, masks and keypoints move "
                    "with a single crop: leave crops= out, or open it once for each crop, with "
                    "another seed="
                )
            if parts.batchwise:
                self.batch_transform = BatchTransform(parts.batchwise, seed, len(reader.classes))
            if self.mixes and not (companion and companion.is_class):
                raise UsageError(
                    f"{reader.path}: MixUp and CutMix mix numbers of classes, and its images have "
                    "none: leave them out"
                )
        elif self._pictures:
            self.transform = parts.whole
        functions = [transform] if finish is None else finish.functions
        functions = [each for each in functions if each is not None]
        self._seeded = SeededFunctions(functions) if functions else None
        self.decoder = Decoder(self.crop, seed, through_decoded)

    @property
    def is_random(self) -> bool:
        """True if samples are known to differ from epoch to epoch."""
        drawn = self.crops and (self.crop.draws > 0 or bool(self._parts.paints))
        return drawn or (self._seeded is not None and self._seeded.drew)

    @property
    def mixes(self) -> bool:
        """True if batches are mixtures of images, whose labels are probabilities."""
        return self.batch_transform is not None and self.batch_transform.mixes

    @property
    def pairs(self) -> bool:
        """True if a sample may be mixed with any other sample of its step."""
        return self.batch_transform is not None and self.batch_transform.pairs

    @property
    def is_plain(self) -> bool:
        """True if samples that are not crops are their decoded fields, and nothing else."""
        return self.transform is None and self.finish is None

    @property
    def sample_bytes(self) -> int:
        """Approximate bytes of a sample that is not cropped."""
        return data_bytes(self.reader) // max(1, len(self.reader))

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        """Make one sample: (crop or the transform's result, its label or target), or the fields.

        A crop is a uint8 tensor of shape (3, height, width); several are one of shape (crops, 3,
        height, width).

        Raises SourceError for a payload that does not match the schema, DecodeError for a damaged
        image.
        """
        if not self.crops:
            return self.whole(epoch, sample, payload)[0]
        pixels = np.empty(self.crop.shape, np.uint8)
        uniforms = self.decoder.draw(epoch, np.array([sample], np.int64))[0]
        companion = self.into(pixels, sample, payload, uniforms)
        made, _ = self.transformed(pixels, epoch, sample)
        if self.batch_transform is not None:
            made = self.batch_transform.one(made, epoch, sample)
        assert self.companion is not None
        return self.companion.sample(made, companion)

    def into(
        self,
        slot: npt.NDArray[np.uint8],
        sample: int,
        payload: Buffer,
        uniforms: npt.NDArray[np.float64],
        tier: DecodedTier | None = None,
    ) -> Any:
        """Decode a sample's crops into its slot of a batch; return its companion. Raises as
        `one`.

        Args:
            slot: RGB, of the crop's shape.
            uniforms: the sample's row of `decoder.draw`.
            tier: is offered the decoded image.
        """
        if tier is not None:
            pixels, label, seconds = self.prepared(sample, payload)
            tier.put(sample, pixels, label, seconds)
            self.decoder.finish(pixels, uniforms, slot)
            return label
        companion = self.companion
        assert companion is not None
        values = self.fields(sample, payload)
        encoded, name = values[companion.image], SampleName(self.reader, sample)
        shown = self.decoder.decode(encoded, name, uniforms, slot)
        move = None if shown is None else CropGeometry(shown, self.crop.size, self.crop.width)
        return self.accompanying(values, move, sample)

    def into_all(
        self,
        slots: Sequence[npt.NDArray[np.uint8]],
        samples: Sequence[int],
        payloads: Sequence[Buffer],
        uniforms: Sequence[npt.NDArray[np.float64]],
    ) -> list[Any]:
        """Do `into` for several samples, without a tier; return companions, or the errors in their
        places."""
        companion = self.companion
        assert companion is not None
        made: list[Any] = [None] * len(samples)
        fields: dict[int, dict[str, Any]] = {}
        for k, (sample, payload) in enumerate(zip(samples, payloads, strict=True)):
            try:
                fields[k] = self.fields(sample, payload)
            except Exception as error:
                made[k] = error
        shown = decode_all(
            self.decoder,
            [values[companion.image] for values in fields.values()],
            [SampleName(self.reader, samples[k]) for k in fields],
            [uniforms[k] for k in fields],
            [slots[k] for k in fields],
        )
        for (k, values), part in zip(fields.items(), shown, strict=True):
            if isinstance(part, Exception):
                made[k] = part
                continue
            move = None if part is None else CropGeometry(part, self.crop.size, self.crop.width)
            try:
                made[k] = self.accompanying(values, move, samples[k])
            except Exception as error:
                made[k] = error
        return made

    def prepared(self, sample: int, payload: Buffer) -> tuple[npt.NDArray[np.uint8], Any, float]:
        """Decode an image as tiers of decoded images keep it. Raises as `one`.

        Returns: (pixels, see `Decoder.prepare`; its companion; seconds that decoding took).
        """
        assert self.companion is not None
        values = self.fields(sample, payload)
        beside = self.accompanying(values, None, sample)
        began = time.thread_time()  # Leaves out the time in which other threads ran.
        encoded, name = values[self.companion.image], SampleName(self.reader, sample)
        pixels = self.decoder.prepare(encoded, name)
        return pixels, beside, time.thread_time() - began

    def accompanying(self, values: dict[str, Any], move: CropGeometry | None, sample: int) -> Any:
        """Make the companion of a picture, of a payload's fields. Raises as `one`.

        Args:
            move: of the picture's crop; None for the whole picture.
        """
        assert self.companion is not None
        try:
            return self.companion.made(values, move, SampleName(self.reader, sample))
        except (CorruptBlock, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._mismatch(sample, error) from error

    def transformed(
        self, slot: npt.NDArray[np.uint8], epoch: int, sample: int
    ) -> tuple[Sample, float]:
        """Return (the transform's result for the crops in a slot, seconds in the transform).

        Results of several crops are collated as a batch's are.
        """
        seconds = 0.0
        if self._parts.paints:
            started = time.perf_counter()
            for number, pixels in enumerate(slot.reshape(-1, *slot.shape[-3:])):
                self._parts.paint(pixels, self._seed, epoch, sample, number)
            seconds = time.perf_counter() - started
        images = torch.from_numpy(slot).movedim(-1, -3)
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

    @property
    def transforms(self) -> bool:
        """True if `transformed` changes a crop."""
        return self.transform is not None or bool(self._parts.paints)

    def whole(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return (sample without a crop, seconds in the user's transform). Raises as `one`."""
        if self.finish is not None:
            with self._drawing(epoch, sample):
                return self.finish(payload, sample), 0.0
        name = SampleName(self.reader, sample)
        if self.moves or self._pictures:
            assert self.companion is not None
            values = self.fields(sample, payload)
            made = decoded_field("image", values[self.companion.image], name)
            beside = self.accompanying(values, None, sample)
            if self._pictures:
                assert self.transform is not None
                made, seconds = self._apply(self.transform, made, epoch, sample)
                return self.companion.sample(made, beside), seconds
            made = self.companion.sample(made, beside)
        else:
            made = decode_sample(self.reader.schema, payload, name)
        if self.transform is None:
            return made, 0.0
        return self._apply(self.transform, made, epoch, sample)

    def mapped(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return `whole`, with the functions of `data.map` applied, if there are any."""
        return self.whole(epoch, sample, payload)

    def _drawing(self, epoch: int, sample: int, crop: int = 0) -> AbstractContextManager[None]:
        """Have the user's functions draw random numbers of a sample's crop."""
        if self._seeded is None:
            return nullcontext()
        return self._seeded.sample(self._seed, epoch, sample, crop)

    def _apply(
        self, transform: Transform, made: Sample, epoch: int, sample: int, crop: int = 0
    ) -> tuple[Sample, float]:
        """Return (the transform's result, seconds); an error of the transform names the sample."""
        started = time.perf_counter()
        try:
            with self._drawing(epoch, sample, crop):
                made = transform(made)
        except Exception as error:
            kind = "" if self.crops else f", which is a {type(made).__name__}"
            name = printable(f"{self.reader.name(sample)!r} of {self.reader.path}")
            error.add_note(f"dlio: in {self.where} of sample {sample}, {name}{kind}")
            raise
        return made, time.perf_counter() - started

    def fields(self, sample: int, payload: Buffer) -> dict[str, Any]:
        """Split a payload into its fields, as the schema does. Raises SourceError."""
        try:
            return self.reader.schema.split(payload)
        except CorruptBlock as error:
            raise self._mismatch(sample, error) from error

    def _mismatch(self, sample: int, error: Exception) -> SourceError:
        return SourceError(f"{self.reader.path}: sample {self.reader.name(sample)!r}: {error}")


class MappedRecipe(Recipe):
    """A recipe whose samples go through the user's functions, for `Dataset.map`. Thread-safe.

    Args:
        inner: makes the samples.
        maps: called one after another, each with the result of the one before.
    """

    where = "a function of map()"

    def __init__(self, inner: Recipe, maps: Sequence[Callable[[Sample], Sample]]) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner, self._maps = inner, tuple(maps)
        self._seeded = SeededFunctions(maps)
        # The samples are made one by one, by `one`.
        self.crops, self.transform, self.batch_transform = False, None, None

    @property
    def is_random(self) -> bool:
        """True if the samples that the functions get are known to differ from epoch to epoch."""
        return self._inner.is_random or (self._seeded is not None and self._seeded.drew)

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def sample_bytes(self) -> int:
        return self._inner.sample_bytes

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        return self.mapped(epoch, sample, payload)[0]

    def mapped(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return (sample, seconds in the user's functions). Raises as `one`."""
        made, seconds = self._inner.one(epoch, sample, payload), 0.0
        for function in self._maps:
            made, more = self._apply(function, made, epoch, sample)
            seconds += more
        return made, seconds
