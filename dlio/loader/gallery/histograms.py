"""Histograms of a data set: bytes and pixels of its samples, and samples of its classes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.boxes import boxes_by_class
from dlio.data.identity import spread
from dlio.data.reader_contract import Reader, SampleName
from dlio.data.schema import IMAGES
from dlio.errors import CorruptBlock, DecodeError, SourceError
from dlio.image.decoder import image_size
from dlio.loader.gallery.value_html import shortened
from dlio.util.units import counted, format_bytes

_BINS: Final = 12
_MOST_CLASSES: Final = 24
"""Classes that have a bar of their own."""
_MOST_LABELS: Final = 1 << 20
_LOOKED_AT: Final = 256
"""Pictures whose size is read."""
_LOOKED_AT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of some things, each with a name."""

    title: str
    names: tuple[str, ...]
    counts: tuple[int, ...]


def histograms(reader: Reader) -> list[Histogram]:
    """Return the histograms of a data set, as far as they are cheap.

    The sizes of pictures are those of up to 256 samples, of 64 MiB at most. A picture that is
    damaged is left out.
    """
    made = [_binned("bytes of a sample", np.asarray(reader.sizes), format_bytes)]
    sides = _picture_sides(reader)
    if len(sides):
        which = "" if len(sides) == len(reader) else f"{len(sides):,} of "
        count = counted(len(reader), "picture")
        for k, name in ((1, "width"), (0, "height")):
            made.append(_binned(f"{name} in pixels, {which}{count}", sides[:, k], "{:,}".format))
    classes = _of_classes(reader)
    return [*made, classes] if classes is not None else made


def _binned(title: str, values: npt.NDArray[np.int64], shown: Callable[[int], str]) -> Histogram:
    """Count values in bins whose edges are equally far apart, or are multiples of each other if
    the values span more than a factor of eight."""
    low, high = int(values.min()), int(values.max())
    if low == high:
        return Histogram(title, (shown(low),), (len(values),))
    if low > 0 and high > 8 * low:
        edges = np.geomspace(low, high + 1, _BINS + 1)
    else:
        edges = np.linspace(low, high + 1, min(_BINS, high - low + 1) + 1)
    counts, _ = np.histogram(values, edges)
    names = []
    for a, b in itertools.pairwise(np.ceil(edges).astype(int).tolist()):
        first, last = shown(a), shown(max(a, b - 1))
        names.append(first if first == last else f"{first} to {last}")
    return Histogram(title, tuple(names), tuple(counts.tolist()))


def _picture_sides(reader: Reader) -> npt.NDArray[np.int64]:
    """Return (height, width) of some pictures; shape (n, 2)."""
    images = [name for name, kind in reader.schema.fields if kind in IMAGES]
    sides: list[tuple[int, int]] = []
    left = _LOOKED_AT_BYTES
    for sample in spread(len(reader), _LOOKED_AT) if images else ():
        left -= int(reader.sizes[sample])
        if left < 0:
            break
        try:
            (payload,) = reader.read(np.array([sample], np.int64))
            encoded = reader.schema.split(payload)[images[0]]
            sides.append(image_size(encoded, SampleName(reader, sample)))
        except (SourceError, CorruptBlock, DecodeError):
            continue
    return np.array(sides, np.int64).reshape(-1, 2)


def _of_classes(reader: Reader) -> Histogram | None:
    """Count samples of each class, or boxes where there are some; None without classes."""
    boxes = boxes_by_class(reader)
    if boxes is not None:
        return _most("boxes of a class", list(boxes), list(boxes.values())) if boxes else None
    labels = np.asarray(reader.labels)
    if not len(labels) or labels.min() < 0 or labels.max() >= _MOST_LABELS:
        return None
    if not (labels.any() or (len(reader.classes) and "mask" not in reader.schema.kinds)):
        return None
    counts = np.bincount(labels, minlength=len(reader.classes)).tolist()
    names = list(reader.classes) or [str(number) for number in range(len(counts))]
    return _most("samples of a class", names, counts)


def _most(title: str, names: Sequence[str], counts: Sequence[int]) -> Histogram:
    """Sort classes by their counts; the smallest of very many have one bar together."""
    order = sorted(range(len(counts)), key=lambda k: (-counts[k], k))
    chosen, rest = order[:_MOST_CLASSES], order[_MOST_CLASSES:]
    shown = [names[k] for k in chosen]
    many = [counts[k] for k in chosen]
    if rest:
        low, high = counts[rest[-1]], counts[rest[0]]
        each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        shown.append(f"{len(rest):,} others, {each} each")
        many.append(sum(counts[k] for k in rest))
    return Histogram(f"{title}, {counted(len(counts), 'class')}", tuple(shown), tuple(many))


def bars_html(histogram: Histogram) -> str:
    """Return a histogram as HTML."""
    most = max(histogram.counts) or 1
    rows = "".join(
        f'<tr><th>{shortened(name, 80)}</th><td class="number">{count:,}</td>'
        f'<td class="bar"><div style="width:{100 * count / most:.1f}%"></div></td></tr>'
        for name, count in zip(histogram.names, histogram.counts, strict=True)
    )
    title = shortened(histogram.title)
    return f'<section class="card"><h3>{title}</h3><table class="bars">{rows}</table></section>'
