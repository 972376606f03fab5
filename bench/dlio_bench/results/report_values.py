"""Values that a benchmark reports, in one form for all of them.

`dlio bench compare` and `dlio bench html` read these and nothing else of a report, so that they
show any benchmark's figures without knowing it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["higher", "lower", ""]
"""Direction of improvement; "" where there is none."""
Labels = Mapping[str, str]
"""Distinguish a value from others of its name, such as {"loader": "dlio", "epoch": "2"}."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity with one value per repeat."""

    name: str
    """Name for people, such as `throughput`."""
    unit: str
    """Such as `samples/s`, `MiB/s`, `s`, `%`; "" for a count."""
    values: tuple[float, ...]
    """One value per repeat, in the order of the repeats."""
    labels: Labels = field(default_factory=dict)
    better: Better = ""
    forecast: bool = False
    """True if the value was calculated by a model and not measured."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two quantities that were measured in turn, paired by repeat."""

    name: str
    """Such as `dlio / torch`."""
    values: tuple[float, ...]
    labels: Labels = field(default_factory=dict)
    better: Better = "higher"


@dataclass(frozen=True, slots=True)
class PlotCurve:
    """Points of a line in a plot."""

    name: str
    """Title of the plot; curves of the same name are drawn together."""
    kind: Literal["cdf", "time", "scaling"]
    """cdf: x is a latency and y a share of all. time: x is seconds since the start. scaling: x is a
    number of ranks; both axes are logarithmic."""
    x_name: str
    y_name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    labels: Labels = field(default_factory=dict)
    forecast: bool = False


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Where the time of a pass or of a step went."""

    name: str
    parts: Mapping[str, float]
    """Seconds by part, in the order to draw."""
    labels: Labels = field(default_factory=dict)


@dataclass(slots=True)
class Results:
    """All that a run of a benchmark reports."""

    benchmark: str
    """Name of the command: `storage` for `dlio bench storage`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Options of the run, by name."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    curves: list[PlotCurve] = field(default_factory=list)
    waterfalls: list[Waterfall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader has to know, such as that reads came from the page cache."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Further keys of the report, at its top level, as scripts read them."""
    paths: tuple[str, ...] = ()
    """Folders that were measured; the environment describes their file systems."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Versions of the libraries measured, in addition to those that every report names."""


def labels_text(labels: Labels, alone: Collection[str] = ("case",)) -> str:
    """Return labels in one line, those of some keys by their values alone."""
    return ", ".join(value if key in alone else f"{key} {value}" for key, value in labels.items())
