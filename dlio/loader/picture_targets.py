"""The target of a picture: its class, its boxes and keypoints, its mask, or nothing.

A data set's schema says which. What belongs to pixels moves with the crop of the picture. The
fields of boxes are those that the readers of COCO and YOLO give, and the same in packed shards:

    boxes           float32[?,4]    left, top, right, bottom, in pixels of the picture
    box_<name>      <type>[?]       of each box: box_labels, box_iscrowd
    keypoints       float32[?,k,3]  of each box: x, y, visibility
    keypoint_pairs  uint8[k]        number of the keypoint on the other side, for mirrored pictures
    segments        json            of each box: polygons or run lengths, which become masks
    mask            image           number of each pixel's class
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import IMAGES, Schema
from dlio.errors import CorruptBlock, DecodeError
from dlio.image.crop_geometry import CropGeometry
from dlio.image.decoder import image_size
from dlio.image.segmentation_masks import decode_mask, draw_instance
from dlio.loader.contract import BatchData, Sample
from dlio.loader.sample import decoded_field, image_and_label
from dlio.loader.torch_private import collate_fn_map
from dlio.util.limits import is_plausible
from dlio.util.units import counted

_BOXES, _LABELS, _KEYPOINTS, _PAIRS = "boxes", "box_labels", "keypoints", "keypoint_pairs"
_SEGMENTS, _MASK = "segments", "mask"
_PER_BOX: Final = "box_"


class Target(dict[str, Any]):
    """Boxes and what belongs to them in one picture, as torchvision's detectors take them.

    `boxes`: float32, shape (n, 4): left, top, right, bottom in pixels of the crop. `labels`:
    int64, shape (n,). As far as the data set has them, `keypoints`: float32, shape (n, k, 3);
    `masks`: uint8, shape (n, height, width); `mask`: uint8, shape (height, width); and its other
    fields. Batches hold a list of them, with torch's default_collate, too.
    """


def _listed(batch: list[Target], **_: object) -> list[Target]:
    return list(batch)


# torch would stack the boxes of pictures by key, and fail where their numbers differ.
collate_fn_map[Target] = _listed


class Companion(ABC):
    """The part of a sample next to its picture, which is the field `image`: how it is made, and
    joined to pictures."""

    is_class = False
    """True if it is the number of the picture's class."""
    numbers: tuple[str, ...] | None = None
    """Number fields that it consists of; None if it is made of others."""
    moves = False
    """True if it depends on where a crop lies, so that it cannot be kept next to decoded images."""

    def __init__(self, image: str) -> None:
        self.image = image

    @abstractmethod
    def made(self, values: Mapping[str, Any], move: CropGeometry | None, name: object) -> Any:
        """Make it of a sample's fields; of a picture that is not cropped for None. `name` is for
        errors.

        Raises DecodeError for a damaged mask, CorruptBlock for fields that contradict each other.
        """

    def sample(self, image: Sample, companion: Any) -> Sample:
        """Return the sample of a picture, or of a transform's result, and its companion."""
        return image, companion

    @abstractmethod
    def batch(self, images: BatchData, companions: Sequence[Any]) -> BatchData:
        """Return the batch of some pictures and their companions, which may be none."""


def companion_of(schema: Schema, min_visible: float = 0.0) -> Companion | None:
    """Return the companion of a data set of pictures; None for samples of another kind.

    A box stays in a crop that shows `min_visible` of its area.
    """
    kinds = {name: kind.text for name, kind in schema.kinds.items()}
    images = [name for name, kind in kinds.items() if kind in IMAGES and name != _MASK]
    if schema.structure is None and len(images) == 1:
        if kinds.get(_BOXES) == "float32[?,4]" and kinds.get(_LABELS) == "int64[?]":
            return _BoxTargets(schema, images[0], min_visible)
        if kinds.get(_MASK) in IMAGES and len(kinds) == 2:
            return _MaskTarget(images[0])
        if len(kinds) == 1:
            return _NoCompanion(images[0])
    fields = image_and_label(schema)
    return _ClassNumber(*fields) if fields is not None else None


class _ClassNumber(Companion):
    """A class number: samples are (picture, number)."""

    is_class = True

    def __init__(self, image: str, label: str) -> None:
        super().__init__(image)
        self.numbers = (label,)
        self._label = label

    def made(self, values: Mapping[str, Any], move: CropGeometry | None, name: object) -> int:
        return int(values[self._label])

    def batch(self, images: BatchData, companions: Sequence[int]) -> BatchData:
        return images, torch.as_tensor(companions, dtype=torch.int64)


class _NoCompanion(Companion):
    """Photos without labels: samples are {name of the field: picture}."""

    numbers = ()

    def made(self, values: Mapping[str, Any], move: CropGeometry | None, name: object) -> int:
        return 0

    def sample(self, image: Sample, companion: int) -> Sample:
        return {self.image: image}

    def batch(self, images: BatchData, companions: Sequence[int]) -> BatchData:
        return {self.image: images}


class _MaskTarget(Companion):
    """A class number of each pixel: samples are (picture, mask)."""

    moves = True

    def made(
        self, values: Mapping[str, Any], move: CropGeometry | None, name: object
    ) -> torch.Tensor:
        return torch.from_numpy(_moved_mask(values, self.image, move, name))

    def batch(self, images: BatchData, companions: Sequence[torch.Tensor]) -> BatchData:
        if not companions:
            sides = images.shape[-2:] if isinstance(images, torch.Tensor) else (0, 0)
            # All samples were skipped; torch.stack takes no empty list.
            return images, torch.empty((0, *sides), dtype=torch.uint8)
        return images, torch.stack(list(companions))


class _BoxTargets(Companion):
    """Boxes: samples are (picture, Target)."""

    moves = True

    def __init__(self, schema: Schema, image: str, min_visible: float) -> None:
        super().__init__(image)
        self._kinds = schema.kinds
        self._least = min_visible
        names = [name for name, _ in schema.fields]
        special = (image, _BOXES, _KEYPOINTS, _PAIRS, _SEGMENTS, _MASK)
        self._per_box = [name for name in names if name.startswith(_PER_BOX)]
        self._others = [name for name in names if name not in (*special, *self._per_box)]
        self._has = {name for name in (_KEYPOINTS, _SEGMENTS, _MASK) if name in names}

    def made(self, values: Mapping[str, Any], move: CropGeometry | None, name: object) -> Target:
        boxes = values[_BOXES]
        count = len(boxes)
        stay = np.arange(count)
        if move is not None:
            boxes, shares = move.boxes(boxes)
            sides = boxes[:, 2:] - boxes[:, :2]
            # A box without any area left is dropped whatever the least share: detectors reject it.
            stay = np.flatnonzero((sides > 0).all(1) & (shares >= self._least))
        target = Target(boxes=torch.from_numpy(boxes[stay].astype(np.float32)))
        for field in self._per_box:
            _check_count(field, len(values[field]), count)
            target[field.removeprefix(_PER_BOX)] = torch.from_numpy(values[field][stay])
        if _KEYPOINTS in self._has:
            target[_KEYPOINTS] = torch.from_numpy(self._keypoints(values, stay, move))
        if _SEGMENTS in self._has:
            target["masks"] = torch.from_numpy(self._masks(values, stay, move, name))
        if _MASK in self._has:
            target[_MASK] = torch.from_numpy(_moved_mask(values, self.image, move, name))
        for field in self._others:
            target[field] = decoded_field(self._kinds[field].text, values[field], name)
        return target

    def batch(self, images: BatchData, companions: Sequence[Target]) -> BatchData:
        return images, list(companions)

    def _keypoints(
        self, values: Mapping[str, Any], stay: npt.NDArray[np.intp], move: CropGeometry | None
    ) -> npt.NDArray[np.float32]:
        keypoints = values[_KEYPOINTS]
        _check_count(_KEYPOINTS, len(keypoints), len(values[_BOXES]))
        if move is None:
            whole: npt.NDArray[np.float32] = keypoints.copy()
            return whole
        pairs = values.get(_PAIRS)
        if pairs is not None and (len(pairs) != keypoints.shape[1] or (pairs >= len(pairs)).any()):
            raise CorruptBlock(f"{_PAIRS} {pairs.tolist()} are not numbers of keypoints")
        return move.keypoints(keypoints[stay], pairs)

    def _masks(
        self,
        values: Mapping[str, Any],
        stay: npt.NDArray[np.intp],
        move: CropGeometry | None,
        name: object,
    ) -> npt.NDArray[np.uint8]:
        """Draw the masks of the boxes that stay; shape (n, height, width)."""
        shapes = decoded_field("json", values[_SEGMENTS], name)
        if not isinstance(shapes, list) or len(shapes) != len(values[_BOXES]):
            raise CorruptBlock(
                f"{_SEGMENTS} are not one for each of {counted(len(values[_BOXES]), 'box')}"
            )
        height, width = _size(values[self.image], move, name)
        sides = (height, width) if move is None else (move.height, move.width)
        needed, stored = len(stay) * sides[0] * sides[1], memoryview(values[self.image]).nbytes
        if not is_plausible(needed, stored + memoryview(values[_SEGMENTS]).nbytes):
            raise DecodeError(
                f"{name} has masks of {needed} bytes in {counted(len(stay), 'box')}, which are "
                "more than a quarter of this process's memory: crop it, or give --trust if you "
                "trust its maker"
            )
        masks = np.empty((len(stay), *sides), np.uint8)
        for place, k in enumerate(stay.tolist()):
            whole = draw_instance(shapes[k], height, width, name)
            masks[place] = whole if move is None else move.mask(whole)
        return masks


def _size(image: Any, move: CropGeometry | None, name: object) -> tuple[int, int]:
    if move is not None:
        return move.shown.height, move.shown.width
    return image_size(image, name)


def _moved_mask(
    values: Mapping[str, Any], image: str, move: CropGeometry | None, name: object
) -> npt.NDArray[np.uint8]:
    mask = decode_mask(values[_MASK], name)
    height, width = _size(values[image], move, name)
    if mask.shape != (height, width):
        raise DecodeError(
            f"mask of {name} has {mask.shape[1]} x {mask.shape[0]} pixels, and the picture "
            f"{width} x {height}: make them agree"
        )
    return mask if move is None else np.ascontiguousarray(move.mask(mask))


def _check_count(field: str, count: int, boxes: int) -> None:
    if count != boxes:
        raise CorruptBlock(f"field {field!r} has {count} values for {counted(boxes, 'box')}")
