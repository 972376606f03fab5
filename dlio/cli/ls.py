"""`dlio ls`: describe the data set at a path."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict

from dlio.data.splits import FormatChoice, ReaderChoices, SplitChoice, reading_options
from dlio.errors import printable, redact
from dlio.util.json_output import json_text
from dlio.util.options import Option
from dlio.util.printable import print_line
from dlio.util.units import counted, format_bytes
from dlio.util.whole_files import check_writable

if TYPE_CHECKING:
    from dlio.data.reader_contract import Reader
    from dlio.data.schema import Structure
    from dlio.loader.gallery.histograms import Histogram

_ONE_SIDED: Final = 2.0
"""Class mix above which a warning is printed."""
_IMAGES: Final = ("jpeg", "image")
"""Kinds of fields that may hold JPEGs."""
_MOST_CLASSES: Final = 1 << 20
_LOOKED_AT: Final = 64
"""Samples whose numbers are looked at for their range."""
_MOST_LOOKED_AT: Final = 64 << 20
"""Bytes of these, about, at most."""
_MOST_FIELDS: Final = 10
"""Fields that are printed, a line each."""
_BAR: Final = 40
"""Width of the longest bar, in characters."""


class DatasetStorage(TypedDict):
    """The file system below a data set."""

    kind: str
    stripe_count: int
    stripe_bytes: int
    stripes: str
    """Both in the file system's own words; may be empty."""


class DatasetDescription(TypedDict):
    """A data set, as `dlio ls --json` prints it."""

    path: str
    format: str
    samples: int
    bytes: int
    schema: list[list[str]]
    structure: "Structure | None"
    classes: dict[str, int]
    understood: str
    """The interpretation of the path, with counts."""
    split: str
    """The split that is read; "" without one."""
    label: str
    """The column or array that is the label by choice; "" without one."""
    left_out: list[str]
    """Files that lie there and are not read, with counts."""
    doubts: list[str]
    """What the folder may mean otherwise, with remedies."""
    fields: dict[str, str]
    """Type and range of each field, of the first samples."""
    blocks: int
    block_bytes: int
    class_mix: float | None
    storage: DatasetStorage
    fingerprint: str
    decoder: str
    batches: str


def describe(path: str, **options: object) -> DatasetDescription:
    """Return a description of the data set at `path`, as `dlio ls --json` prints it.

    `options` are those of `dlio.open`, such as `split` and `format`.

    `class_mix` measures how evenly classes are spread over blocks: the mean count of each block's
    most frequent class, divided by the mean for as many randomly chosen samples. It is 1 for
    well-mixed data, far above 1 for sorted data, and None without classes. `decoder` names the
    decoder of baseline JPEGs on this machine, and `batches` the threads that make batches.

    Raises SourceError if the path does not hold a data set.
    """
    import numpy as np

    from dlio.data.boxes import boxes_by_class
    from dlio.data.reader import open_reading
    from dlio.data.reader_contract import data_bytes
    from dlio.image import native
    from dlio.image.native import pool_library
    from dlio.storage.file_system_kind import file_system_of

    reader, reading = open_reading(path, follow_links=None, trust=None, tells=False, **options)
    layout = reader.layout
    size = data_bytes(reader)
    labels = reader.labels
    classes = len(reader.classes)
    if not classes and labels.strides == (0,) and not labels[:1].any():
        labels = labels[:1]  # There are none: 10^9 zeros would be copied.
    own = labels[labels >= 0]
    """Without unlabelled samples, such as the Hub's -1."""
    countable = len(own) and own.max() < _MOST_CLASSES and (own.size == labels.size or classes)
    mix = None
    counts: dict[str, int] = {}
    boxes = boxes_by_class(reader)
    masks = "mask" in reader.schema.kinds and not labels.any()
    if boxes is not None:
        counts = boxes
    elif countable and not masks and (len(reader.classes) or labels.any()):
        counted = np.bincount(own, minlength=len(reader.classes)).tolist()
        names = list(reader.classes) or [str(number) for number in range(len(counted))]
        counts = dict(zip(names, counted, strict=False))
        if own.size < labels.size:
            counts["(unlabelled)"] = int(labels.size - own.size)
        else:
            mix = _class_mix(labels, layout)
    place = file_system_of(reader.path if isinstance(path, str) else "/")
    return {
        "path": redact(str(path)),
        "format": reader.format,
        "samples": len(reader),
        "bytes": size,
        "schema": [list(field) for field in reader.schema.fields],
        "structure": reader.schema.structure,
        "classes": counts,
        "understood": reading.words,
        "split": reading.split,
        "label": str(options.get("label", "")),
        "left_out": reading.left_out,
        "doubts": reading.doubts,
        "fields": _ranges(reader),
        "blocks": layout.blocks,
        "block_bytes": size // layout.blocks,
        "class_mix": mix,
        "storage": {
            "kind": place.kind,
            "stripe_count": place.stripe_count,
            "stripe_bytes": place.stripe_bytes,
            "stripes": place.stripes,
        },
        "fingerprint": reader.fingerprint,
        "decoder": native.name(),
        "batches": pool_library.name(),
    }


def _ranges(reader: "Reader") -> dict[str, str]:
    """Return the type of each field, and of numbers the range that some first samples have; that
    of classes is of all samples, as folders come one after another."""
    import numpy as np

    from dlio.data.reader_contract import data_bytes

    mean = max(1, data_bytes(reader) // max(1, len(reader)))
    count = min(len(reader), _LOOKED_AT, max(1, _MOST_LOOKED_AT // mean))
    rows = [reader.schema.split(each) for each in reader.read(np.arange(count, dtype=np.int64))]
    shown: dict[str, str] = {}
    for name, kind in reader.schema.fields:
        shown[name] = kind
        values = [row[name] for row in rows]
        parts = [np.asarray(v) for v in values if not isinstance(v, bytes | memoryview | str)]
        parts = [part for part in parts if part.size and part.dtype.kind in "iufb"]
        if parts:
            seen = len(parts)
            if name == "label" and reader.classes:
                parts, seen = [reader.labels], len(reader)
            finite = [part[np.isfinite(part)] for part in parts]
            without = sum(each.size < part.size for each, part in zip(finite, parts, strict=True))
            if any(each.size for each in finite):
                low = min(float(each.min()) for each in finite if each.size)
                high = max(float(each.max()) for each in finite if each.size)
                shown[name] += f", {low:g} to {high:g} in {counted(seen, 'sample')}"
            if without:
                shown[name] += f", NaN or infinite values in {without:,}"
    return shown


def _class_mix(labels: Any, layout: Any) -> float:
    import numpy as np

    chosen = np.unique(np.linspace(0, layout.blocks - 1, 64).astype(np.int64))
    blocks = [labels[layout.samples_of(int(block))] for block in chosen]
    generator = np.random.default_rng(0)
    by_chance = [labels[generator.integers(0, len(labels), len(b))] for b in blocks]

    def most_frequent(samples: Any) -> float:
        return float(np.mean([np.bincount(each).max() for each in samples]))

    return most_frequent(blocks) / most_frequent(by_chance)


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of `dlio ls`."""

    path: Annotated[
        str, Option("Data set of any format: a path or a URL.", positional=True, metavar="PATH")
    ]
    split: SplitChoice = None
    format: FormatChoice = None
    reader_option: ReaderChoices = ()
    as_json: Annotated[bool, Option("Print JSON.", name="json")] = False
    plot: Annotated[
        bool, Option("Draw histograms of bytes, pixels and classes, in the terminal.")
    ] = False
    html: Annotated[
        str | None, Option("Write the histograms as a page to this file.", metavar="FILE")
    ] = None


def _chosen(options: ListOptions) -> dict[str, object]:
    return reading_options(options.split, options.format, options.reader_option)


def command(options: ListOptions) -> None:
    """Show the contents of a data set and its division into blocks."""
    if options.html is not None:
        check_writable("--html", options.html)
    path, about = options.path, describe(options.path, **_chosen(options))
    if options.as_json:
        print(json_text(about, indent=2))
        _draw(replace(options, plot=False))
        return
    counts = about["classes"]
    print_line(
        f"{path}: {about['format']}, {counted(about['samples'], 'sample')}, "
        f"{format_bytes(about['bytes'])}"
    )
    if about["understood"]:
        print_line(f"  read as      {about['understood']}")
    if about["split"]:
        print_line(f"  split        {about['split']}")
    if about["label"]:
        print_line(f"  label        {about['label']}, by choice")
    for text in about["left_out"]:
        print_line(f"  left out     {text}")
    for text in about["doubts"]:
        print_line(f"  perhaps      {text}")
    _print_fields(about["fields"])
    if counts:
        names = list(counts)
        shown = ", ".join(f"{name} ({counts[name]:,})" for name in names[:6])
        print_line(f"  classes      {len(names)}: {shown}{', ...' if len(names) > 6 else ''}")
        thing = "box" if ["boxes", "float32[?,4]"] in about["schema"] else "sample"
        fewest, most = min(counts.values()), max(counts.values())
        least = "" if fewest == most else f"{fewest:,} to "
        print_line(f"  per class    {least}{counted(most, thing)}")
    print_line(f"  blocks       {about['blocks']:,} of about {format_bytes(about['block_bytes'])}")
    print_line(f"  fingerprint  {about['fingerprint']}")
    storage = about["storage"]
    stripes = f", {storage['stripes']}" if storage["stripes"] else ""
    print_line(f"  storage      {storage['kind']}{stripes}")
    if any(kind in _IMAGES for _, kind in about["schema"]):
        print_line(f"  decoder      {about['decoder']}")
    if about["class_mix"] is not None and about["class_mix"] > _ONE_SIDED:
        print_line(
            f"warning: blocks hold few classes each (class mix {about['class_mix']:.1f}, 1 is well "
            "mixed), and so will each node's batches: rewrite the data in shuffled order with "
            "`dlio pack`"
        )
    _draw(options)


def _print_fields(fields: dict[str, str]) -> None:
    names = list(fields)
    if len(names) > _MOST_FIELDS:
        # The last one is often the label.
        names = [*names[: _MOST_FIELDS - 2], "", names[-1]]
    for place, name in enumerate(names):
        others = f"... {len(fields) - len(names) + 1:,} others: --json shows them"
        title = "" if place else "fields"
        print_line(f"  {title:12} {f'{name}: {fields[name]}' if name in fields else others}")


def _draw(options: ListOptions) -> None:
    """Draw histograms in the terminal, or on a page, or both."""
    if not options.plot and options.html is None:
        return
    from dlio.data.reader import open_reader
    from dlio.loader.gallery.histograms import bars_html, histograms
    from dlio.loader.gallery.sample_page import SamplePage
    from dlio.loader.gallery.value_html import shortened

    reader = open_reader(options.path, follow_links=None, trust=None, **_chosen(options))
    made = histograms(reader)
    reader.close()
    if options.plot:
        for histogram in made:
            _print_bars(histogram)
    if options.html is not None:
        bars = "".join(map(bars_html, made))
        title = shortened(redact(options.path))
        body = f'<div class="dlio"><header><h1>{title}</h1></header>{bars}</div>'
        SamplePage(f"{redact(options.path)} - dlio ls", body).save(options.html)
        if not options.as_json:
            print_line(f"{options.html}: {len(made)} histograms")


def _print_bars(histogram: "Histogram") -> None:
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", max_width=40, no_wrap=True)
    table.add_column(justify="right")
    table.add_column()
    most = max(histogram.counts) or 1
    for name, count in zip(histogram.names, histogram.counts, strict=True):
        bar = Bar(most, 0, count, width=_BAR)
        table.add_row(Text(printable(name)), f"{count:,}", bar)
    console = Console()
    console.print()
    console.print(Text(printable(histogram.title), style="bold"))
    console.print(table)
