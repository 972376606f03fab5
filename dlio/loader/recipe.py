"""Recipes: how a payload becomes a sample.

`recipe_for` chooses one by the kind of a data set's samples:

    CropRecipe      crops of images, next to their label or other companion
    PictureRecipe   whole pictures with their companion: boxes or masks, or a transform that needs
                    the whole picture
    FieldRecipe     the decoded fields of anything else
    ForeignRecipe   samples as another library's data set makes them
    MappedRecipe    the samples of another recipe, through the functions of `Dataset.map`

`PatchRecipe`, for patches of volumes, is in `dlio.loader.patch_source`. A recipe gives the same
sample to `dataset[i]` and to a batch; random numbers are keyed by (seed, epoch, sample).
"""

import json
import time
from abc import ABC, abstractmethod
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
from dlio.image.decoder import Decoder, decode_all
from dlio.image.fusion import BatchTransform, TransformParts, check_pixelwise, fused
from dlio.image.seeded_functions import SeededFunctions
from dlio.loader.contract import Sample, Transform
from dlio.loader.picture_targets import Companion, companion_of
from dlio.loader.sample import decode_sample, decoded_field
from dlio.util.printable import printable


class ForeignDecoder(Protocol):
    """Makes samples where the data set of another library is read."""

    functions: Sequence[object]
    """The user's functions of samples, which may draw random numbers; None among them is none."""

    def __call__(self, payload: Buffer, sample: int, /) -> Sample:
        """Make sample number `sample` of its payload."""


class Recipe(ABC):
    """From a payload to a sample. Thread-safe.

    Args:
        reader: of the payloads.
        companion: makes what belongs to a picture; None for samples that are not pictures.
        transform: the user's, of each sample, or of the part that the recipe says.
        seed: of the random numbers of crops and transforms.
        functions: the user's, which may draw random numbers.
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
        """Make the companion of a picture, of a payload's fields. Raises as `make`.

        Args:
            move: of the picture's crop; None for the whole picture.
        """
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

    def _mismatch(self, sample: int, error: Exception) -> SourceError:
        return SourceError(f"{self.reader.path}: sample {self.reader.name(sample)!r}: {error}")


def recipe_for(
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
) -> Recipe:
    """Choose the recipe of a data set's samples.

    Args:
        image_size: side of square crops of images, in pixels; None for no crops.
        train: random crops and flips; otherwise the middle of the image.
        transform: the user's, which is cut into parts: see `dlio.image.fusion.fused`.
        through_decoded: crops are cut out of images that a tier keeps decoded.
        finish: replaces everything else, for data sets of other libraries.
        min_visible: least share of its area with which a box stays in a crop.
        crops: of each image, where the transform does not begin with crops.

    Raises UsageError for a transform that would move pixels, and leave boxes behind, for mixtures
    of images without classes, and for several crops of samples that have none.
    """
    parts = fused(transform)
    companion = None if finish is not None else companion_of(reader.schema, min_visible)
    # A transform that changes the size otherwise than by a crop gets whole pictures; with boxes or
    # masks it gets the sample instead, whose parts it has to move together.
    takes_pictures = companion is not None and not companion.moves and parts.whole is not None
    is_cropped = not takes_pictures and (image_size is not None or parts.crop is not None)
    if crops > 1 and (parts.crop is not None or companion is None or not is_cropped):
        raise UsageError(
            f"{reader.path}: crops={crops}: "
            + ("transform= crops" if parts.crop is not None else "its samples are not cropped")
            + ": leave crops= out, or give transform=RandomResizedCrop(size, crops=...)"
        )
    if finish is not None:
        return ForeignRecipe(reader, finish, transform, seed)
    if companion is not None and is_cropped:
        crop = parts.crop or Crop(image_size or 1, train, crops=crops)
        return CropRecipe(reader, companion, transform, parts, crop, seed, through_decoded)
    if companion is not None and (takes_pictures or companion.moves):
        whole = parts.whole if takes_pictures else transform
        return PictureRecipe(reader, companion, whole, seed, [transform])
    return FieldRecipe(reader, companion, transform, seed, [transform])


class CropRecipe(Recipe):
    """Crops of images: (crop or the transform's result, its label or target).

    A crop is a uint8 tensor of shape (3, height, width); several are one of shape (crops, 3,
    height, width).

    Args:
        transform: the user's, whole.
        parts: of the transform.
        through_decoded: crops are cut out of images that a tier keeps decoded.

    Raises UsageError for parts that do not go together with the companion.
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
    ) -> None:
        rest = parts.rest if parts.whole is None else parts.whole
        super().__init__(reader, companion, rest, seed, [transform])
        self.crop, self._parts = crop, parts
        self.decoder = Decoder(crop, seed, through_decoded)
        if self.moves:
            for step in [self.transform, *(step for _, step in parts.paints)]:
                check_pixelwise(step, reader.path)
            if crop.crops > 1:
                raise UsageError(
                    f"{reader.path}: crops={crop.crops}: its boxes, masks and keypoints move "
                    "with a single crop: leave crops= out, or open it once for each crop, with "
                    "another seed="
                )
        if parts.batchwise:
            self.batch_transform = BatchTransform(parts.batchwise, seed, len(reader.classes))
        if self.mixes and not companion.is_class:
            raise UsageError(
                f"{reader.path}: MixUp and CutMix mix numbers of classes, and its images have "
                "none: leave them out"
            )

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
        """Decode the crops of samples into their slots; return companions, or errors in their
        places.

        Args:
            slots: RGB, of the crop's shape.
            uniforms: the sample's row of `decoder.draw`.
        """
        made: list[Any] = [None] * len(samples)
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
        """Decode an image as tiers of decoded images keep it. Raises as `make`.

        Returns: (pixels, see `Decoder.prepare`; its companion; seconds that decoding took).
        """
        values = self.fields(sample, payload)
        beside = self.accompanying(values, None, sample)
        began = time.thread_time()  # Leaves out the time in which other threads ran.
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
        if self._parts.paints:
            started = time.perf_counter()
            for number, pixels in enumerate(slot.reshape(-1, *slot.shape[-3:])):
                self._parts.paint(pixels, self.seed, epoch, sample, number)
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


class PictureRecipe(Recipe):
    """Whole pictures and their companions. A transform gets the picture alone, or with a companion
    that moves with the pixels (boxes, masks) the sample."""

    companion: Companion

    @property
    def ragged(self) -> bool:
        return self.moves

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        values, name = self.fields(sample, payload), SampleName(self.reader, sample)
        picture = decoded_field("image", values[self.companion.image], name)
        beside = self.accompanying(values, None, sample)
        if self.transform is None:
            return self.companion.sample(picture, beside), 0.0
        if self.moves:
            whole = self.companion.sample(picture, beside)
            return self._apply(self.transform, whole, epoch, sample)
        made, seconds = self._apply(self.transform, picture, epoch, sample)
        return self.companion.sample(made, beside), seconds


class FieldRecipe(Recipe):
    """The decoded fields of a sample, through the user's transform."""

    @property
    def is_plain_arrays(self) -> bool:
        """True if samples are numbers and arrays of fixed shapes, which collating only stacks."""
        schema = self.reader.schema
        return (
            self.transform is None
            and schema.is_fixed
            and all(schema.kinds[name].dtype is not None for name, _ in schema.fields)
        )

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        name = SampleName(self.reader, sample)
        made = decode_sample(self.reader.schema, payload, name)
        if self.transform is None:
            return made, 0.0
        return self._apply(self.transform, made, epoch, sample)


class ForeignRecipe(Recipe):
    """Samples as the data set of another library makes them."""

    def __init__(
        self, reader: Reader, decoder: ForeignDecoder, transform: Transform | None, seed: int
    ) -> None:
        super().__init__(reader, None, transform, seed, decoder.functions)
        self._decode = decoder

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        with self._drawing(epoch, sample):
            return self._decode(payload, sample), 0.0


class MappedRecipe(Recipe):
    """Samples of another recipe that go through the user's functions, for `Dataset.map`.

    Args:
        inner: makes the samples.
        maps: called one after another, each with the result of the one before.
    """

    where = "a function of map()"

    def __init__(self, inner: Recipe, maps: Sequence[Callable[[Sample], Sample]]) -> None:
        super().__init__(inner.reader, inner.companion, None, inner.seed, maps)
        self._inner, self._maps = inner, tuple(maps)

    @property
    def ragged(self) -> bool:
        return self._inner.ragged

    @property
    def is_random(self) -> bool:
        """True if the samples that the functions get are known to differ from epoch to epoch."""
        return self._inner.is_random or super().is_random

    @property
    def sample_bytes(self) -> int:
        return self._inner.sample_bytes

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        made, seconds = self._inner.one(epoch, sample, payload), 0.0
        for function in self._maps:
            made, more = self._apply(function, made, epoch, sample)
            seconds += more
        return made, seconds
