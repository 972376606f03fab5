"""The end of an epoch of a mixture, by the policy on sources that are exhausted. Pure.

`stop` ends before the first source would have to repeat a sample, as Hugging Face's
`first_exhausted` does; `until_all` continues until each source has been gone through, while the
others repeat (`all_exhausted`, Grain's and torchdata's cycle); `repeat` has a number of samples
that is given, as `epoch_size` of MosaicML's streaming, and repeats whatever is exhausted.
"""

from fractions import Fraction
from typing import Final

from dlio.plan.fair_counts import FairCounts, fair_counts

EXHAUSTION: Final = ("stop", "until_all", "repeat")


def end_of(
    exhaustion: str,
    weights: tuple[Fraction, ...],
    batch: int,
    steps: int | None,
    had: tuple[int, ...],
    sizes: tuple[int, ...],
    samples: int | None,
    position: int,
) -> int | None:
    """Return the number of positions of an epoch if it ends with these weights, else None.

    `had` has the samples of each source before, in this epoch, and `sizes` those that each has;
    `samples` are those of an epoch, for `repeat`. The weights hold for so many `steps`, None
    without end, from `position` on.
    """
    if exhaustion == "repeat":
        assert samples is not None
        return samples if steps is None or position + steps * batch >= samples else None
    counts = fair_counts(weights, batch)
    room = [size - have for size, have in zip(sizes, had, strict=True)]
    if exhaustion == "stop":
        return _stop(counts, steps, room, position)
    return _until_all(counts, steps, room, position)


def _stop(counts: FairCounts, steps: int | None, room: list[int], position: int) -> int | None:
    def fits(batches: int, more: int = 0) -> bool:
        after = counts.after(batches, more)
        return all(a <= b for a, b in zip(after, room, strict=True))

    if steps is not None and fits(steps):
        return None
    weights, batch = counts.weights, counts.batch
    low = 0
    # The source that is exhausted first has one sample more than it has room for by then.
    high = min(int((r + 1) / w / batch) + 2 for w, r in zip(weights, room, strict=True) if w)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    most = min(int((r + 2) / w) for w, r in zip(weights, room, strict=True) if w) - low * batch
    more = next((k for k in range(min(batch - 1, most), 0, -1) if fits(low, k)), 0)
    return position + low * batch + more


def _until_all(counts: FairCounts, steps: int | None, room: list[int], position: int) -> int | None:
    weights, batch = counts.weights, counts.batch

    def through(batches: int, more: int = 0) -> bool:
        after = counts.after(batches, more)
        # A source without weight is never gone through; at the end it is not waited for.
        left = zip(after, room, weights, strict=True)
        return all(a >= b or (steps is None and not w) for a, b, w in left)

    if steps is not None and not through(steps):
        return None
    each = zip(weights, room, strict=True)
    low, high = -1, max(int((max(r, 0) + 1) / w / batch) + 2 if w else 0 for w, r in each)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if through(middle) else (middle, high)
    if high == 0:
        return position
    least = max(int((r - 2) / w) if w else 0 for w, r in zip(weights, room, strict=True))
    first = max(1, least - low * batch)
    more = next((k for k in range(first, batch) if through(low, k)), batch)
    return position + low * batch + more
