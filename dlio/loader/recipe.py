"""The recipe of a data set: how a payload becomes a sample."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.reader import Reader, SampleName
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.image.crop import Crop
from dlio.image.decode import Decoder
from dlio.image.fusion import check_pixelwise, fused
from dlio.image.moving import Move
from dlio.loader.contract import Sample, Transform
from dlio.loader.sample import decode_sample, decoded_field
from dlio.loader.targets import companion_of
from dlio.storage.decoded import DecodedTier
from dlio.util.printable import printable

__all__ = ["Finish", "MappedRecipe", "Recipe"]

Finish = Callable[[Buffer, int], Sample]
"""Makes a sample of (payload, index), where the data set of another library is read."""


class Recipe:
    """From a payload to a sample; the same for `dataset[i]` and for batches. Thread-safe.

    Images become crops, next to their label or what else belongs to them, and samples of other
    kinds are decoded whole. `Dataset` and the makers of batches hold one recipe together.

    Args:
        reader: of the payloads.
        image_size: side of square crops of images, in pixels; None for no crops.
        train: random crops and flips; otherwise the middle of the image.
        transform: the user's. What it begins with is fused into the crop, see
            `dlio.image.fusion.fused`.
        seed: of the crops.
        through_decoded: crops are cut out of images that a tier keeps decoded.
        finish: replaces everything else, for data sets of other libraries.
        min_visible: least share of its area with which a box stays in a crop.

    Raises UsageError for a transform that would move pixels, and leave boxes behind.
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
        min_visible: float = 0.0,
    ) -> None:
        self.reader = reader
        self.finish = finish
        self.companion = None if finish is not None else companion_of(reader.schema, min_visible)
        """Makes what belongs to a picture; None if the samples are of another kind."""
        crop, rest, batch_transform = fused(transform)
        self.crops = self.companion is not None and (image_size is not None or crop is not None)
        """True if samples are crops of images."""
        self.moves = self.companion is not None and self.companion.moves
        """True if samples have boxes or masks, which move with the pixels."""
        self.ragged = self.moves and not self.crops
        """True if batches are lists of whole pictures and of what belongs to them."""
        if self.moves and self.crops:
            check_pixelwise(rest, reader.path)
        self.crop = Crop(image_size or 1, train) if crop is None else crop
        self.transform: Transform | None = rest if self.crops else transform
        """User's transform of each crop, or of each sample that is not cropped."""
        self.batch_transform: Transform | None = batch_transform if self.crops else None
        """Transform of a whole batch of crops, done on the device where the batch lies."""
        self.decoder = Decoder(self.crop, seed, through_decoded)

    @property
    def is_random(self) -> bool:
        """True if samples are random crops, which differ from epoch to epoch."""
        return self.crops and self.crop.draws > 0

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        """Make one sample: (crop or the transform's result, its label or target), or the fields.

        A crop is a uint8 tensor of shape (3, height, width).

        Raises SourceError for a payload that does not match the schema, DecodeError for a damaged
        image.
        """
        if not self.crops:
            return self.whole(sample, payload)[0]
        pixels = np.empty((self.crop.size, self.crop.width, 3), np.uint8)
        uniforms = self.decoder.draw(epoch, np.array([sample], np.int64))[0]
        companion = self.into(pixels, sample, payload, uniforms)
        made, _ = self.transformed(pixels, sample)
        if self.batch_transform is not None:
            made = self.batch_transform(made)
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
        """Decode a crop into its slot of a batch; return what belongs to it. Raises as `one`.

        Args:
            slot: RGB, shape (height, width, 3).
            uniforms: the sample's row of `decoder.draw`.
            tier: is offered the decoded image.
        """
        decoder, companion = self.decoder, self.companion
        assert companion is not None
        values = self.fields(sample, payload)
        encoded, name = values[companion.image], SampleName(self.reader, sample)
        if tier is None:
            shown = decoder.decode(encoded, name, uniforms, slot)
            move = None if shown is None else Move(shown, slot.shape[0], slot.shape[1])
            return self.accompanying(values, move, sample)
        label = self.accompanying(values, None, sample)
        began = time.thread_time()  # Leaves out the time in which other threads ran.
        pixels = decoder.prepare(encoded, name)
        tier.put(sample, pixels, label, time.thread_time() - began)
        decoder.finish(pixels, uniforms, slot)
        return label

    def accompanying(self, values: dict[str, Any], move: Move | None, sample: int) -> Any:
        """Make what belongs to a picture, of a payload's fields. Raises as `one`.

        Args:
            move: of the picture's crop; None for the whole picture.
        """
        assert self.companion is not None
        try:
            return self.companion.made(values, move, SampleName(self.reader, sample))
        except (CorruptBlock, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._mismatch(sample, error) from error

    def transformed(self, slot: npt.NDArray[np.uint8], sample: int) -> tuple[Sample, float]:
        """Return (the transform's result for the crop in a slot, seconds in the transform)."""
        image = torch.from_numpy(slot).permute(2, 0, 1)
        if self.transform is None:
            return image, 0.0
        return self._apply(self.transform, image, sample)

    def whole(self, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return (sample without a crop, seconds in the user's transform). Raises as `one`."""
        if self.finish is not None:
            return self.finish(payload, sample), 0.0
        name = SampleName(self.reader, sample)
        if self.moves:
            assert self.companion is not None
            values = self.fields(sample, payload)
            picture = decoded_field("image", values[self.companion.image], name)
            made = self.companion.sample(picture, self.accompanying(values, None, sample))
        else:
            made = decode_sample(self.reader.schema, payload, name)
        if self.transform is None:
            return made, 0.0
        return self._apply(self.transform, made, sample)

    def _apply(self, transform: Transform, made: Sample, sample: int) -> tuple[Sample, float]:
        """Return (the transform's result, seconds); an error of the transform names the sample."""
        started = time.perf_counter()
        try:
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
        # The samples are made one by one, by `one`.
        self.crops, self.transform, self.batch_transform = False, None, None

    @property
    def is_random(self) -> bool:
        """True if the samples that the functions get are random crops."""
        return self._inner.is_random

    def one(self, epoch: int, sample: int, payload: Buffer) -> Sample:
        return self.mapped(epoch, sample, payload)[0]

    def mapped(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        """Return (sample, seconds in the user's functions). Raises as `one`."""
        made, seconds = self._inner.one(epoch, sample, payload), 0.0
        for function in self._maps:
            made, more = self._apply(function, made, sample)
            seconds += more
        return made, seconds
