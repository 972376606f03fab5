"""The recipe of a data set: how a payload becomes a sample."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.reader import Reader, SampleName
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.image.crop import Crop
from dlio.image.decode import Decoder, decode_whole
from dlio.image.fusion import Batchwise, fused
from dlio.image.seeded import Seeded
from dlio.loader.contract import Sample, Transform
from dlio.loader.sample import decode_sample, image_and_label
from dlio.storage.decoded import DecodedTier
from dlio.util.printable import printable

__all__ = ["Finish", "MappedRecipe", "Recipe"]


class Finish(Protocol):
    """Makes samples where the data set of another library is read."""

    functions: Sequence[object]
    """The user's functions of samples, which may draw random numbers; None among them is none."""

    def __call__(self, payload: Buffer, sample: int, /) -> Sample:
        """Make sample number `sample` of its payload."""


class Recipe:
    """From a payload to a sample; the same for `dataset[i]` and for batches. Thread-safe.

    Labelled images become crops and the other samples are decoded whole. `Dataset` and the makers
    of batches hold one recipe together.

    Args:
        reader: of the payloads.
        image_size: side of square crops of labelled images, in pixels; None for no crops.
        train: random crops and flips; otherwise the middle of the image.
        transform: the user's, which is cut into parts: see `dlio.image.fusion.fused`.
        seed: of the random numbers of crops and transforms.
        through_decoded: crops are cut out of images that a tier keeps decoded.
        finish: replaces everything else, for data sets of other libraries.
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
        finish: Finish | None,
    ) -> None:
        self.reader = reader
        self.finish = finish
        fields = image_and_label(reader.schema)
        self._seed, self._parts = seed, fused(transform)
        parts = self._parts
        whole = fields is not None and parts.whole is not None
        self.crops = (
            fields is not None and not whole and (image_size is not None or parts.crop is not None)
        )
        """True if samples are crops of images, with labels."""
        self._pictures = whole
        """True if the transform takes whole images and samples are (its result, label)."""
        self.image_field, self.label_field = fields or ("", "")
        self.crop = Crop(image_size or 1, train) if parts.crop is None else parts.crop
        self.transform: Transform | None = transform
        """User's transform of each crop, or of each sample that is not cropped."""
        self.batch_transform: Batchwise | None = None
        """Transform of a whole batch of crops, done on the device where the batch lies."""
        if self.crops:
            self.transform = parts.rest
            if parts.batchwise:
                self.batch_transform = Batchwise(parts.batchwise, seed, len(reader.classes))
        elif whole:
            self.transform = parts.whole
        functions = [transform] if finish is None else finish.functions
        functions = [each for each in functions if each is not None]
        self._seeded = Seeded(functions) if functions else None
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

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        """Make one sample: (crop or the transform's result, label), or the decoded fields.

        A crop is a uint8 tensor of shape (3, height, width).

        Raises SourceError for a payload that does not match the schema, DecodeError for a damaged
        image.
        """
        if not self.crops:
            return self.whole(epoch, sample, payload)[0]
        pixels = np.empty((self.crop.size, self.crop.width, 3), np.uint8)
        uniforms = self.decoder.draw(epoch, np.array([sample], np.int64))[0]
        label = self.into(pixels, sample, payload, uniforms)
        made, _ = self.transformed(pixels, epoch, sample)
        if self.batch_transform is not None:
            made = self.batch_transform.one(made, epoch, sample)
        return made, label

    def into(
        self,
        slot: npt.NDArray[np.uint8],
        sample: int,
        payload: Buffer,
        uniforms: npt.NDArray[np.float64],
        tier: DecodedTier | None = None,
    ) -> int:
        """Decode a crop into its slot of a batch; return the label. Raises as `one`.

        Args:
            slot: RGB, shape (height, width, 3).
            uniforms: the sample's row of `decoder.draw`.
            tier: is offered the decoded image.
        """
        reader, decoder = self.reader, self.decoder
        try:
            values = reader.schema.split(payload)
        except CorruptBlock as error:
            raise self._mismatch(sample, error) from error
        encoded, name = values[self.image_field], SampleName(reader, sample)
        label = int(values[self.label_field])
        if tier is None:
            decoder.decode(encoded, name, uniforms, slot)
        else:
            began = time.thread_time()  # Leaves out the time in which other threads ran.
            pixels = decoder.prepare(encoded, name)
            tier.put(sample, pixels, label, time.thread_time() - began)
            decoder.finish(pixels, uniforms, slot)
        return label

    def transformed(
        self, slot: npt.NDArray[np.uint8], epoch: int, sample: int
    ) -> tuple[Sample, float]:
        """Return (the transform's result for the crop in a slot, seconds in the transform)."""
        seconds = 0.0
        if self._parts.paints:
            started = time.perf_counter()
            self._parts.paint(slot, self._seed, epoch, sample)
            seconds = time.perf_counter() - started
        image = torch.from_numpy(slot).permute(2, 0, 1)
        if self.transform is None:
            return image, seconds
        made, more = self._apply(self.transform, image, epoch, sample)
        return made, seconds + more

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
        if self._pictures:
            values = self.fields(sample, payload)
            image = torch.from_numpy(decode_whole(values[self.image_field], name)).permute(2, 0, 1)
            assert self.transform is not None
            made, seconds = self._apply(self.transform, image, epoch, sample)
            return (made, int(values[self.label_field])), seconds
        made = decode_sample(self.reader.schema, payload, name)
        if self.transform is None:
            return made, 0.0
        return self._apply(self.transform, made, epoch, sample)

    def _drawing(self, epoch: int, sample: int) -> AbstractContextManager[None]:
        """Have the user's functions draw random numbers of a sample."""
        if self._seeded is None:
            return nullcontext()
        return self._seeded.sample(self._seed, epoch, sample)

    def _apply(
        self, transform: Transform, made: Sample, epoch: int, sample: int
    ) -> tuple[Sample, float]:
        """Return (the transform's result, seconds); an error of the transform names the sample."""
        started = time.perf_counter()
        try:
            with self._drawing(epoch, sample):
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

    def _mismatch(self, sample: int, error: CorruptBlock) -> SourceError:
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
        self._seeded = Seeded(maps)
        # The samples are made one by one, by `one`.
        self.crops, self.transform, self.batch_transform = False, None, None

    @property
    def is_random(self) -> bool:
        """True if the samples that the functions get are known to differ from epoch to epoch."""
        return self._inner.is_random or (self._seeded is not None and self._seeded.drew)

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        return self.mapped(epoch, sample, payload)[0]

    def mapped(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return (sample, seconds in the user's functions). Raises as `one`."""
        made, seconds = self._inner.one(epoch, sample, payload), 0.0
        for function in self._maps:
            made, more = self._apply(function, made, epoch, sample)
            seconds += more
        return made, seconds
