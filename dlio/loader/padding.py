"""Targets of one shape: boxes padded to the same number, for models that are compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dlio.errors import UsageError
from dlio.loader.contract import BatchData, Sample
from dlio.loader.picture_targets import Target
from dlio.util.arguments import whole_number

_MOST_BOXES = 1 << 20


class PadTargets:
    """A `collate_fn` that pads the targets of a batch to one number of boxes.

        loader = dlio.DataLoader(data, 16, collate_fn=dlio.PadTargets(100))

    A batch is (images, targets): images of shape (n, ...) and a dictionary of tensors, boxes of
    shape (n, most, 4) and likewise labels, masks and keypoints. What is added is 0, and -1 among
    labels; `count`, of shape (n,), says how many boxes a picture has.

    Args:
        most: number of boxes, of which the largest stay if there are more; None for as many as
            the picture with the most boxes has.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = None if most is None else whole_number("most", most, 1, _MOST_BOXES, "boxes")

    def __call__(self, samples: Sequence[Sample]) -> BatchData:
        """Collate (picture, Target) pairs. Raises UsageError for samples of another kind."""
        for sample in samples:
            fits = isinstance(sample, tuple) and len(sample) == 2
            if not fits or not isinstance(sample[1], Target):
                raise UsageError(
                    f"PadTargets: a sample is a {type(sample).__name__}, not (picture, Target): "
                    "open a data set with boxes"
                )
        targets = [target for _, target in samples]
        most = self.most or max((len(target["boxes"]) for target in targets), default=0)
        return default_collate([(image, self._padded(target, most)) for image, target in samples])

    def _padded(self, target: Target, most: int) -> dict[str, Any]:
        boxes = target["boxes"]
        count = len(boxes)
        stay = None
        if count > most:
            areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
            stay = areas.topk(most).indices.sort().values
        made: dict[str, Any] = {"count": min(count, most)}
        for name, value in target.items():
            # A mask of the whole picture does not belong to a box.
            own = isinstance(value, torch.Tensor) and value.ndim and name != "mask"
            if not own or len(value) != count:
                made[name] = value
                continue
            kept = value if stay is None else value[stay]
            padded = value.new_full((most, *value.shape[1:]), -1 if name == "labels" else 0)
            padded[: len(kept)] = kept
            made[name] = padded
        return made
