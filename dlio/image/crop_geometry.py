"""Boxes, masks and keypoints, moved as the pixels of an image are by its crop. Pure.

Coordinates are continuous, in pixels: (0, 0) is the top left corner of the image and (width,
height) its bottom right one. A crop takes the part `box` of the image to the whole of its own
`height` x `width` pixels, and then mirrors it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.image.crop import CropRegion

_F64 = npt.NDArray[np.float64]
_F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """The way from the part of an image that is shown to a crop of height x width pixels."""

    shown: CropRegion
    height: int
    width: int

    @property
    def mirrors(self) -> bool:
        """True if left and right of what is shown are exchanged: by a flip, or by upending."""
        return self.shown.box.flip != self.shown.box.upend

    def boxes(self, boxes: _F32) -> tuple[_F32, _F64]:
        """Return (boxes clipped to the crop, share of each box's area that the crop shows), for
        boxes as left, top, right, bottom in pixels of the image; shape (n, 4).

        A box that the crop does not show has no area and a share of 0.
        """
        part = self.shown.box
        given = np.asarray(boxes, np.float64).reshape(-1, 4)
        low = np.array([part.left, part.top], np.float64)
        high = low + np.array([part.width, part.height], np.float64)
        clipped = np.concatenate(
            [np.clip(given[:, :2], low, high), np.clip(given[:, 2:], low, high)], axis=1
        )
        area, left = _areas(given), _areas(clipped)
        shares = np.divide(left, area, out=np.zeros_like(area), where=area > 0)
        corners = self._points(clipped.reshape(-1, 2, 2))
        made = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        return made.astype(np.float32), shares

    def keypoints(self, keypoints: _F32, mirrored: npt.NDArray[np.integer] | None) -> _F32:
        """Return keypoints in the crop; those outside of it become (0, 0, 0).

        Args:
            keypoints: x, y, visibility (0 for keypoints that are not labelled); shape (n, k, 3).
            mirrored: number of the keypoint on the other side of the body for each keypoint, which
                takes its place in a mirror; shape (k,). None if no keypoint has another side.
        """
        given = np.asarray(keypoints, np.float64)
        made = np.empty(given.shape, np.float32)
        made[..., :2] = self._points(given[..., :2])
        made[..., 2] = given[..., 2]
        inside = (made[..., :2] >= 0).all(-1)
        inside &= (made[..., 0] <= self.width) & (made[..., 1] <= self.height)
        made[~(inside & (given[..., 2] > 0))] = 0
        if self.mirrors and mirrored is not None:
            made = made[:, mirrored]
        return made

    def mask(self, mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the part of a mask, of shape (..., height, width), resized to its nearest
        pixels."""
        part = self.shown.box
        rows = _nearest(part.top, part.height, self.height, self.shown.height)
        columns = _nearest(part.left, part.width, self.width, self.shown.width)
        if part.upend:
            rows = rows[::-1]
        if part.flip:
            columns = columns[::-1]
        # Rows first: they are copied as a whole.
        made: npt.NDArray[np.uint8] = mask.take(rows, axis=-2).take(columns, axis=-1)
        return made

    def _points(self, points: _F64) -> _F64:
        """Move x and y; shape (..., 2)."""
        part = self.shown.box
        size = np.array([self.width, self.height], np.float64)
        made = (points - (part.left, part.top)) * (size / (part.width, part.height))
        if part.flip:
            made[..., 0] = size[0] - made[..., 0]
        if part.upend:
            made[..., 1] = size[1] - made[..., 1]
        return made


def _areas(boxes: _F64) -> _F64:
    sides = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None)
    areas: _F64 = sides[:, 0] * sides[:, 1]
    return areas


def _nearest(start: int, length: int, count: int, whole: int) -> npt.NDArray[np.int64]:
    """Return the pixels of an image below the middles of a crop's pixels, along one side."""
    middles = start + (np.arange(count) + 0.5) * (length / count)
    return np.minimum(middles.astype(np.int64), whole - 1)
