"""The recipe of a data set: chosen by the kind of its samples.

CropRecipe      crops of images, next to their label or other companion (`dlio.loader.recipe`)
PictureRecipe   whole pictures with their companion: boxes or masks, or a transform that needs
                the whole picture
FieldRecipe     the decoded fields of anything else
ForeignRecipe   samples as another library's data set makes them
MappedRecipe    the samples of another recipe, through the functions of `Dataset.map`
PatchRecipe     patches of volumes (`dlio.loader.patch_source`)
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, Self

from dlio.data.reader_contract import Reader, SampleName
from dlio.data.schema import Buffer
from dlio.errors import UsageError
from dlio.image.crop import Crop
from dlio.image.fusion import TransformParts, check_pixelwise, fused, is_pipeline
from dlio.loader.contract import Sample, Transform
from dlio.loader.picture_targets import Companion, companion_of
from dlio.loader.recipe import CropRecipe, Recipe
from dlio.loader.sample import decode_sample, image_and_label, picture_tensor
from dlio.util.printable import tell_once

ImageSize = int | tuple[int, int] | Literal["auto"] | None
"""Side, or (height, width), of crops in pixels; None for none."""
USUAL_SIDE: Final = 224
"""Side of crops without a transform, in pixels."""


def sides_of(size: ImageSize) -> tuple[int, int]:
    """Return (height, width) of crops; zeros for none."""
    if size == "auto":
        size = USUAL_SIDE
    return (size or 0, size or 0) if size is None or isinstance(size, int) else size


class ForeignDecoder(Protocol):
    """Makes samples where the data set of another library is read."""

    functions: Sequence[object]
    """The user's functions of samples, which may draw random numbers; None among them is none."""

    def __call__(self, payload: Buffer, sample: int, /) -> Sample:
        """Make sample number `sample` of its payload."""


def recipe_for(
    reader: Reader,
    *,
    image_size: ImageSize,
    train: bool,
    transform: Transform | None,
    seed: int,
    through_decoded: bool,
    finish: ForeignDecoder | None,
    min_visible: float = 0.0,
    crops: int = 1,
    contiguous: bool = False,
) -> Recipe:
    """Choose the recipe of a data set's samples.

    Crops have `image_size` pixels; None for no crops, "auto" for none if there is a transform, but
    for samples whose boxes or masks move with the pixels. They are random with
    `train`, otherwise of the middle of the image, and cut out of images that a tier keeps decoded
    with `through_decoded`. The transform is cut into parts, see `dlio.image.fusion.fused`; there
    are `crops` of each image where it does not begin with crops. A box stays in a crop that shows
    `min_visible` of its area. Crops are `contiguous`, or in channels-last memory. `finish` replaces
    everything else, for data sets of other libraries.

    Raises UsageError for a transform that would move pixels, and leave boxes behind, for mixtures
    of images without classes, and for several crops of samples that have none.
    """
    companion = None if finish is not None else companion_of(reader.schema, min_visible)
    moves = companion is not None and companion.moves
    is_given = image_size != "auto"
    side = None if image_size == "auto" and transform is not None and not moves else image_size
    height, width = sides_of(side)
    # A callable gets the sample where the user has said that samples stay as they are.
    is_cropped = bool(height) or moves or (is_given and not is_pipeline(transform))
    parts = fused(transform, is_cropped or companion is None)
    # A transform that changes the size otherwise than by a crop gets whole pictures; with boxes or
    # masks it gets the sample instead, whose parts it has to move together.
    takes_pictures = companion is not None and not companion.moves and parts.whole is not None
    is_cropped = not takes_pictures and (bool(height) or parts.crop is not None)
    if crops > 1 and (parts.crop is not None or companion is None or not is_cropped):
        raise UsageError(
            f"{reader.path}: crops={crops}: "
            + ("transform= crops" if parts.crop is not None else "its samples are not cropped")
            + ": leave crops= out, or give transform=RandomResizedCrop(size, crops=...)"
        )
    if finish is not None:
        return ForeignRecipe(reader, finish, transform, seed)
    if companion is not None and is_cropped:
        across = None if width == height else width
        crop = parts.crop or Crop(height, train, across=across, crops=crops)
        recipe = CropRecipe(
            reader, companion, transform, parts, crop, seed, through_decoded, contiguous
        )
        _check_crops(recipe, parts)
        if companion.is_class:
            _tell_of_fields(reader)
        return recipe
    if companion is not None and (takes_pictures or companion.moves):
        whole = parts.whole if takes_pictures else transform
        return PictureRecipe(reader, companion, whole, seed, [transform], parts.exact)
    return FieldRecipe(reader, companion, transform, seed, [transform])


def _tell_of_fields(reader: Reader) -> None:
    """Warn once of the fields that crops and labels leave out."""
    used = image_and_label(reader.schema) or ()
    rest = [name for name, _ in reader.schema.fields if name not in used]
    if used and rest:
        tell_once(
            f"{reader.path}: pairs of crop and label leave out its {', '.join(rest)}: "
            "image_size=None gives samples with all fields"
        )


def _check_crops(recipe: CropRecipe, parts: TransformParts) -> None:
    """Raise UsageError for a transform that does not go together with the pictures' companions."""
    path, crops = recipe.reader.path, recipe.crop.crops
    if recipe.moves:
        for step in [recipe.transform, *(step for _, step in parts.paints)]:
            check_pixelwise(step, path)
        if crops > 1:
            raise UsageError(
                f"{path}: crops={crops}: its boxes, masks and keypoints move "
                "with a single crop: leave crops= out, or open it once for each crop, with "
                "another seed="
            )
    if recipe.mixes and not recipe.companion.is_class:
        raise UsageError(
            f"{path}: MixUp and CutMix mix numbers of classes, and its images have "
            "none: leave them out"
        )


class PictureRecipe(Recipe):
    """Whole pictures and their companions. A transform gets the picture alone, or with a companion
    that moves with the pixels (boxes, masks) the sample."""

    companion: Companion

    def __init__(
        self,
        reader: Reader,
        companion: Companion,
        transform: Transform | None,
        seed: int,
        functions: Sequence[object],
        exact: bool = False,
    ) -> None:
        super().__init__(reader, companion, transform, seed, functions)
        self._exact = exact

    @property
    def ragged(self) -> bool:
        return self.moves

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        values, name = self.fields(sample, payload), SampleName(self.reader, sample)
        picture = picture_tensor(values[self.companion.image], name, self._exact)
        beside = self.accompanying(values, None, sample)
        if self.moves:
            whole = self.companion.sample(picture, beside)
            return self._apply(self.transform, whole, epoch, sample)
        made, seconds = self._apply(self.transform, picture, epoch, sample)
        return self.companion.sample(made, beside), seconds


class FieldRecipe(Recipe):
    """The decoded fields of a sample, through the user's transform."""

    @property
    def draws(self) -> bool:
        return self._seeded is not None

    @property
    def is_plain_arrays(self) -> bool:
        """True if samples are numbers and arrays of fixed shapes, which collating only stacks."""
        schema = self.reader.schema
        return (
            self.transform is None
            and schema.is_fixed
            and all(schema.kinds[name].dtype is not None for name, _ in schema.fields)
        )

    @property
    def is_of_texts(self) -> bool:
        """True if samples have texts or bytes, and next to them numbers and arrays of fixed shapes:
        collating lists the former, and stacks the latter."""
        schema = self.reader.schema
        kinds = [schema.kinds[name] for name, _ in schema.fields]
        return (
            self.transform is None
            and schema.structure is None
            and not schema.is_fixed
            and all(kind.fixed or kind.text in ("text", "bytes") for kind in kinds)
        )

    def make(self, epoch: int, sample: int, payload: Buffer) -> tuple[Sample, float]:
        name = SampleName(self.reader, sample)
        made = decode_sample(self.reader.schema, payload, name)
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
    """Samples of another recipe that go through the user's functions, one after another, for
    `Dataset.map`."""

    where = "a function of map()"

    def __init__(self, inner: Recipe, maps: Sequence[Callable[[Sample], Sample]]) -> None:
        super().__init__(inner.reader, inner.companion, None, inner.seed, maps)
        self._inner, self._maps = inner, tuple(maps)

    def seeded(self, seed: int) -> Self:
        made = super().seeded(seed)
        made._inner = self._inner.seeded(seed)
        return made

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
        # The inner recipe's transform counts as decoding, the functions of map() as transform.
        made, seconds = self._inner.one(epoch, sample, payload), 0.0
        for function in self._maps:
            made, more = self._apply(function, made, epoch, sample)
            seconds += more
        return made, seconds
