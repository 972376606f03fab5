"""Partners of samples for mixtures of batches, the same on any number of ranks.

The partner of a sample is the one before it in the step's global batch, which every rank computes
alone. Where another rank has the partner, it is read and decoded once more here. With one node, and
in mode `global`, a rank's samples follow each other: that is one image a step. In mode `batch` on
several nodes most partners are elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.loader.recipe import CropRecipe
from dlio.plan.order import Order

_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchPartners:
    """The partners of one batch's samples."""

    partners: _I64
    """Partner of each sample; shape (n,)."""
    fetch: Callable[[int], Buffer]
    """Reads the payload of a sample of another rank."""
    skip: bool
    """Mix a sample with itself if its partner cannot be read or decoded."""

    def of(self, chosen: Sequence[int]) -> "BatchPartners":
        """Return the partners of some of the samples, by their numbers in the batch."""
        return replace(self, partners=self.partners[list(chosen)])


def step_partners(
    order: Order,
    position: int,
    end: int,
    global_batch: int,
    fetch: Callable[[int], Buffer],
    skip: bool,
    step: int,
    samples: _I64,
) -> BatchPartners:
    """Return the partners of a rank's samples in a step of a pass, from `position` of its order to
    `end`; `fetch` and `skip` are those of `BatchPartners`.

    Cost O(n) for an order that is a formula alone, otherwise O(global batch).
    """
    first = position + step * global_batch
    last = min(first + global_batch, end)
    if type(order) is Order:
        before = order.positions(samples) - 1
        before[before < first] = last - 1
        return BatchPartners(order.samples(before), fetch, skip)
    # Others may be longer than their formula, or have a sample twice, so that a sample does not
    # tell its position: the whole global batch is looked up.
    everyone = order.samples(np.arange(first, last, dtype=np.int64))
    by_sample = np.argsort(everyone, kind="stable")
    places = by_sample[np.searchsorted(everyone, samples, sorter=by_sample)]
    return BatchPartners(everyone[places - 1], fetch, skip)


def decode_partners(
    partners: BatchPartners,
    recipe: CropRecipe,
    epoch: int,
    samples: _I64,
    make: Callable[[int, int, npt.NDArray[np.float64]], int],
    labels: _I64,
) -> tuple[_I64, _I64, _I64]:
    """Decode the partners that are not among a batch's samples into the rows behind them.

    `make` makes an image, called with (row, sample, the sample's row of `Decoder.draw`), and
    returns its label; its errors leave the row as it is.

    Returns: (labels of the n samples and of m partners, the m partners, the image of each sample's
    partner). Raises as `Recipe.make`.
    """
    count, wanted = len(samples), partners.partners.tolist()
    row = {sample: k for k, sample in reversed(list(enumerate(samples.tolist())))}
    missing = [sample for sample in dict.fromkeys(wanted) if sample not in row]
    uniforms = recipe.decoder.draw(epoch, np.array(missing, np.int64))
    extra: list[int] = []
    more: list[int] = []
    for sample, own in zip(missing, uniforms, strict=True):
        at = count + len(extra)
        try:
            more.append(make(at, sample, own))
        except (SourceError, CorruptBlock):
            if not partners.skip:
                raise
            continue
        row[sample] = at  # A sample whose partner failed is mixed with itself.
        extra.append(sample)
    rows = [row.get(sample, k) for k, sample in enumerate(wanted)]
    labels = np.concatenate([labels, np.array(more, np.int64)])
    return labels, np.array(extra, np.int64), np.array(rows, np.int64)
