"""A pipeline of transforms, cut into the parts that different places of the loader do.

- the crop that it begins with goes to the decoder, which decodes only its part of an image;
- transforms of pixels are done in the crop's place in the batch;
- conversions, normalisation, erasing and mixtures are done for a whole batch, on its device; of a
  batch that stays on the CPU the first conversions and the normalisation may be done by whoever
  makes its crops (`BatchTransform.values`);
- transforms that dlio does not know are called for each sample, with everything behind them.

Pipelines of torchvision are cut in the same way, as far as they are known (`recognise`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import UsageError, printable
from dlio.image.composition import RandomChoice, is_pixelwise
from dlio.image.crop import Crop
from dlio.image.crop_transforms import (
    CenterCrop,
    Compose,
    Normalize,
    PILToTensor,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToDtype,
)
from dlio.image.mixup import MixingTransform
from dlio.image.picture import Pixels, Transform
from dlio.image.random_source import KeyedRandom, stream_of
from dlio.image.torchvision_steps import (
    TorchvisionForm,
    flattened,
    form_after,
    has_twin,
    is_own,
    is_torchvision,
    understood,
    without_presets,
)

_SIZES: Final = ("size", "target_size", "min_size")
"""Attributes of transforms, dlio's and torchvision's, that change an image's size."""

Step = tuple[int, Any]
"""(number in the whole pipeline, transform of dlio)."""
Samples = Sequence[int] | npt.NDArray[np.int64]
_Which = tuple[int, int]
"""(sample, its crop)."""
_MOVING: Final = (
    *("RandomResizedCrop", "RandomCrop", "CenterCrop", "FiveCrop", "TenCrop", "Resize", "Pad"),
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation", "RandomAffine"),
    *("RandomPerspective", "ElasticTransform", "RandomZoomOut", "RandomIoUCrop", "ScaleJitter"),
    *("RandomShortestSize", "RandomResize", "RandAugment", "TrivialAugmentWide", "AutoAugment"),
    "AugMix",
)
"""Names of transforms, of dlio and torchvision, that move pixels."""


def check_pixelwise(transform: Transform | None, path: str) -> None:
    """Raise UsageError if a transform of crops has a known step that moves pixels; `path` is the
    data set's."""
    steps = getattr(transform, "transforms", None)
    for step in steps if isinstance(steps, list | tuple) else [transform]:
        name = type(step).__name__
        if name in _MOVING:
            raise UsageError(
                f"transform={name}: it would move the pixels of {path} and leave its boxes and "
                "masks behind: begin the transform with Compose([RandomResizedCrop(...), "
                "RandomHorizontalFlip()]), with which they move, or transform both in data.map()"
            )
        if step is not transform:
            check_pixelwise(step, path)


@dataclass(frozen=True, slots=True)
class TransformParts:
    """The parts of a pipeline, in the order in which they are done."""

    crop: Crop | None
    """The crop that it begins with; None if it begins with anything else."""
    paints: tuple[Step, ...]
    """Transforms of a crop's pixels."""
    rest: Transform | None
    """Transform of each crop, as a uint8 tensor of shape (3, height, width)."""
    batchwise: tuple[Step, ...]
    """Transforms of a whole batch; empty if there is a rest."""
    whole: Transform | None
    """The pipeline as a transform of a whole image, as a uint8 tensor, if it does not begin with a
    crop and changes the size, or images are not cropped; the other parts are not done then."""
    exact: bool = False
    """True if whole images have Pillow's pixels, as torchvision's pipelines expect."""

    def paint(self, pixels: Pixels, seed: int, epoch: int, sample: int, crop: int = 0) -> None:
        """Transform the pixels of a sample's crop in place; shape (height, width, 3)."""
        made = pixels
        for number, step in self.paints:
            made = step.apply(made, KeyedRandom(seed, epoch, sample, stream_of(number, crop)))
        if made is not pixels:
            pixels[:] = made


class BatchTransform:
    """The steps of a pipeline that transform a whole batch. `classes` is the number of the data
    set's classes; 0 if that is unknown."""

    def __init__(self, steps: Sequence[Step], seed: int, classes: int) -> None:
        self._steps, self._seed, self._classes = steps, seed, classes
        self._pointwise = _pointwise(steps)
        """Number of steps, from the first on, that `values` does."""

    def seeded(self, seed: int) -> "BatchTransform":
        """Return the same steps with the random numbers of another seed."""
        return BatchTransform(self._steps, seed, self._classes)

    @property
    def mixes(self) -> bool:
        """True if labels become probabilities."""
        return any(_is_mixer(step) for _, step in self._steps)

    @property
    def normal(self) -> Normalize | None:
        """The normalisation that comes first, if the kernel that crops on a device can do it with
        the same result: of three channels, in float32."""
        step = self._steps[0][1] if self._steps else None
        if not isinstance(step, Normalize) or step.dtype != torch.float32 or len(step.mean) != 3:
            return None
        return step

    def values(self) -> torch.Tensor | None:
        """Return what the conversions and the normalisation that come first make of each value of
        each channel, shape (3, 256), floats; None where bytes stay bytes.

        Whoever fills batches of such numbers leaves out these steps: `__call__` does, too.
        """
        image = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256).contiguous()
        for _, step in self._steps[: self._pointwise]:
            if isinstance(step, Normalize) and len(step.mean) not in (1, 3):
                return None  # It fails where pixels are there, which names the sample.
            image = step(image)
        return image[0, :, 0].contiguous() if image.is_floating_point() else None

    @property
    def pairs(self) -> bool:
        """True if a sample is mixed with any other sample of the step."""
        return any(_is_mixer(step) and step.partners == "step" for _, step in self._steps)

    def __call__(
        self,
        images: torch.Tensor,
        labels: Any,
        epoch: int,
        samples: Samples,
        extra: Samples = (),
        partners: npt.NDArray[np.int64] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Transform a batch.

        Args:
            images: shape (n + m, 3, height, width); or (n, crops, 3, height, width), where each
                crop draws for itself. Of uint8; of floats if `normal` or `values` has been done.
            labels: shape (n + m,).
            samples: the samples' indices, n.
            extra: m samples behind them, which others are mixed with.
            partners: for each sample, the number of the image that it is mixed with; None for the
                image before it.

        Returns: (n images, as many labels, or probabilities of shape (n, classes)).
        """
        if images.ndim == 5:
            alike = images.shape[:2]
            crops = [(int(sample), k) for sample in samples for k in range(alike[1])]
            made, _ = self._transformed(images.flatten(0, 1), None, epoch, crops, (), None)
            return made.reshape(*alike, *made.shape[1:]), labels
        alone = [(int(sample), 0) for sample in samples]
        others = [(int(sample), 0) for sample in extra]
        return self._transformed(images, labels, epoch, alone, others, partners)

    def _transformed(
        self,
        images: torch.Tensor,
        labels: Any,
        epoch: int,
        samples: Sequence[_Which],
        extra: Sequence[_Which],
        partners: npt.NDArray[np.int64] | None,
    ) -> tuple[torch.Tensor, Any]:
        everyone = [*samples, *extra]
        done = self._pointwise if images.is_floating_point() else 0
        for number, step in self._steps[done:]:
            if isinstance(step, RandomErasing):
                images = step.erase_each(images, self._draws(number, epoch, everyone))
            elif _is_mixer(step):
                draw = step.draw_mixture if isinstance(step, RandomChoice) else step.draw
                size = int(images.shape[-2]), int(images.shape[-1])
                mixtures = [draw(draws, *size) for draws in self._draws(number, epoch, samples)]
                mixer = step.transforms[0] if isinstance(step, RandomChoice) else step
                rows = None if partners is None else torch.from_numpy(partners)
                images, labels = mixer.mix(images, labels, mixtures, rows, self._classes or None)
            else:
                images = step(images)
        return images, labels

    def one(self, image: torch.Tensor, epoch: int, sample: int) -> torch.Tensor:
        """Transform the image or the crops of one sample; they are not mixed with any other's."""
        alone = [(number, step) for number, step in self._steps if not _is_mixer(step)]
        made = BatchTransform(alone, self._seed, 0)(image[None], None, epoch, [sample])
        return made[0][0]

    def _draws(self, number: int, epoch: int, samples: Sequence[_Which]) -> list[KeyedRandom]:
        return [
            KeyedRandom(self._seed, epoch, sample, stream_of(number, crop))
            for sample, crop in samples
        ]


def fused(transform: Transform | None, is_cropped: bool = True) -> TransformParts:
    """Cut a transform into its parts; without a crop of its own, those of crops if images are
    cropped before it.

    The crop is the one that the transform begins with; None if it begins with anything else. A
    transform of another library is returned as the rest.

    Raises UsageError if a mixture of batches is not the last step, or mixes several crops.
    """
    if type(transform) is torch.nn.Sequential and any(map(is_torchvision, transform)):
        transform = Compose(list(transform))  # Its usual form where pipelines are scripted.
    steps: list[Any] = flattened(transform)
    is_exact = any(map(is_torchvision, steps))
    steps = without_presets(steps)
    # A pipeline that makes no tensor of Pillow's image has been written for tensors.
    makes_tensor = any(form_after(step, "pil") != "pil" for step in steps)
    form = "pil" if is_torchvision(transform) and makes_tensor else "tensor"
    known: list[Any] = understood(steps, form)
    at, early = 0, []
    while at < len(steps) and _is_conversion(known[at]):
        early.append((at, known[at]))
        at += 1
    crop, at = _crop(known, at)
    if crop is not None and is_exact:
        crop = replace(crop, exact=True)
    sizes = any(hasattr(each, name) for each in steps for name in _SIZES)
    knows_sizes = sizes and is_pipeline(transform)
    if crop is None and transform is not None and (knows_sizes or not is_cropped):
        if any(map(_is_mixer, known)):
            raise UsageError("MixUp and CutMix mix batches of crops: begin with RandomResizedCrop")
        return TransformParts(None, (), None, (), _rest(steps, known, [], 0, form), is_exact)
    if crop is None:
        at, early = 0, []
    elif crop.crops > 1 and any(map(_is_mixer, known)):
        raise UsageError(
            f"crops={crop.crops}: MixUp and CutMix mix images of one crop each: leave crops= out, "
            "or mix a batch's crops in the training loop, as in mix(images[:, 0], labels)"
        )
    paints: list[Step] = []
    later: list[Step] = early
    sealed = False
    while at < len(steps):
        step = known[at]
        if _is_conversion(step):
            later.append((at, step))
        elif is_pixelwise(step) and not sealed:
            paints.append((at, step))
        elif isinstance(step, Normalize | RandomErasing | ToDtype) or (
            _is_mixer(step) and at == len(known) - 1
        ):
            later.append((at, step))
            sealed = True
        else:
            break
        at += 1
    if any(_is_mixer(step) for step in known[at:]):
        raise UsageError("MixUp and CutMix mix whole batches: put them last, behind known steps")
    if at == len(steps):
        batchwise = [(n, s) for n, s in later if not isinstance(s, PILToTensor)]
        return TransformParts(crop, tuple(paints), None, tuple(batchwise), None)
    if crop is None and not paints and not later:
        return TransformParts(None, (), _rest(steps, known, [], 0, form, transform), (), None)
    return TransformParts(crop, tuple(paints), _rest(steps, known, later, at, form), (), None)


def why_not_fused(transform: object) -> str:
    """Return why torchvision's pipeline of Pillow's images has to be called with these; "" if
    `fused` gives the same tensors, to within a level."""
    steps = flattened(transform)
    if not steps:
        return "it has no transform"
    own = next((each for each in steps if not is_torchvision(each)), None)
    if own is not None:
        return f"{printable(type(own).__name__)} in its transform is not of torchvision"
    steps = without_presets(steps)
    form = "pil"
    for step in steps:
        form = form_after(step, form)
    if form == "pil":
        return "its transform makes no tensors"
    known = understood(steps, "pil")
    if any(map(_is_mixer, known)):
        return "its transform mixes batches"
    first = next((k for k, each in enumerate(known) if each is None), len(known))
    at = next((k for k, each in enumerate(known) if not _is_conversion(each)), 0)
    if first < len(steps) and _crop(known, at)[0] is None:
        name = printable(type(steps[first]).__name__)
        if has_twin(steps[first]):
            return f"{name} in its transform has options, or a place, for which dlio has none"
        return f"{name} in its transform is not known"
    return ""


def options_of(transform: object) -> tuple[object, ...]:
    """Return the steps of a pipeline as `fused` takes them now, to be compared later: their options
    may be changed between passes."""
    steps = without_presets(flattened(transform))
    return transform, *steps, *map(repr, understood(steps, "pil"))


def _rest(
    steps: list[Any],
    known: list[Any],
    later: list[Step],
    at: int,
    form: str,
    whole: Transform | None = None,
) -> Transform:
    """Return a transform of a uint8 tensor, in a form at the beginning, for steps from a number on,
    behind the `later` ones; `whole` is the pipeline itself, if all of it is left."""
    if form == "tensor":
        return whole or Compose([step for _, step in later] + steps[at:])
    end = next((k for k in range(at, len(steps)) if known[k] is None), len(steps))
    for step in steps[:end]:
        form = form_after(step, form)
    own = [step for _, step in later] + known[at:end]
    if end == len(steps):
        return Compose(own)
    return Compose([*own, TorchvisionForm(form), *steps[end:]])


def _crop(known: list[Any], at: int) -> tuple[Crop | None, int]:
    """Return (the crop that begins at a step, the first step behind it)."""
    steps = known[at:]
    if steps and type(steps[0]) is RandomResizedCrop:
        first, end = steps[0], 1
        flips: dict[Any, float] = {RandomHorizontalFlip: 0.0, RandomVerticalFlip: 0.0}
        while end < len(steps) and not flips.get(type(steps[end]), 1.0):
            flips[type(steps[end])] = steps[end].p
            end += 1
        height, width = first.size
        probabilities = flips[RandomHorizontalFlip], flips[RandomVerticalFlip]
        ranges = first.scale, first.ratio
        crop = Crop(height, True, *ranges, *probabilities, across=width, crops=first.crops)
        return crop, at + end
    if len(steps) > 1 and type(steps[0]) is Resize and type(steps[1]) is CenterCrop:
        resize, middle = steps[0], steps[1]
        if isinstance(resize.size, int) and resize.size >= max(middle.size):
            height, width = middle.size
            return Crop(height, False, resize=resize.size, across=width), at + 2
    return None, at


def is_pipeline(transform: object) -> bool:
    """True for a transform of dlio or torchvision, which is one of images."""
    return is_own(transform) or is_torchvision(transform)


def _is_conversion(step: object) -> bool:
    """True for a conversion that transforms of pixels may as well come before."""
    return isinstance(step, PILToTensor) or (
        isinstance(step, ToDtype)
        and step.scale
        and (step.dtype.is_floating_point or step.dtype == torch.uint8)
    )


def _pointwise(steps: Sequence[Step]) -> int:
    """Return how many of the first steps change each pixel by itself: conversions, and up to one
    normalisation behind them."""
    for count, (_, step) in enumerate(steps):
        if isinstance(step, Normalize):
            return count + 1
        if not isinstance(step, ToDtype):
            return count
    return len(steps)


def _is_mixer(step: object) -> bool:
    return isinstance(step, MixingTransform) or (isinstance(step, RandomChoice) and step.mixes)
