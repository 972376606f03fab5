"""Plots as inline SVG: their axes, lines of curves, and waterfalls.

Colours come from the page's style sheet by classes, so that both modes and prints have their own.
Texts are escaped here; nothing else of a report gets into the page's tags.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from dlio.util.printable import as_html
from dlio_bench.results.report_values import PlotCurve, Waterfall, labels_text

_MOST_TICKS = 7


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values on a line of pixels."""

    low: float
    high: float
    begin: float
    """Pixel of `low`."""
    end: float
    """Pixel of `high`."""
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return the pixel of a value; positive where the scale is logarithmic."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def linear(values: Sequence[float], begin: float, end: float) -> Scale:
    """Return a scale from 0, or from below, with ticks at 1, 2 or 5 times a power of ten."""
    low, high = min(0.0, *values), max(0.0, *values)
    if low == high:
        high = low + 1
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    return Scale(low, high, begin, end, tuple(low + k * step for k in range(count + 1)))


def logarithmic(values: Sequence[float], begin: float, end: float, base: int = 10) -> Scale:
    """Return a scale of positive values, with ticks at powers of the base."""
    low, high = min(values), max(values)
    first = math.floor(math.log(low, base) + 1e-9)
    last = max(first + 1, math.ceil(math.log(high, base) - 1e-9))
    every = math.ceil((last - first + 1) / _MOST_TICKS)
    ticks = tuple(float(base) ** power for power in range(first, last + 1, every))
    return Scale(float(base) ** first, float(base) ** last, begin, end, ticks, log=True)


def format_number(value: float) -> str:
    """Return three digits; thousands separated, and small or huge values with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        if "." in digits:
            digits = digits.rstrip("0").rstrip(".")
        return f"{digits}e{int(power)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# Drawings


COLORS: Final = 8
"""Classes c0 to c7 of the style sheet; further curves are dotted."""
_WIDTH: Final = 420
_HEIGHT: Final = 270
_LEFT: Final = 58
_RIGHT: Final = 14
_TOP: Final = 10
_BOTTOM: Final = 44
_MOST_POINTS: Final = 400
_MARKED: Final = 24
"""Points of a curve up to which each is marked."""
_ROW: Final = 38
_REPEATS: Final = ("seed", "repeat")
"""Labels of curves that are repeats of one another."""


def plot(curves: Sequence[PlotCurve], numbers: Iterator[int]) -> str:
    """Return a figure with the curves of one name, its legend and a text in place of it. The ids of
    the page's elements have `numbers`."""
    kind = curves[0].kind
    drawn = [(curve, points) for curve in curves if (points := _points(curve))]
    title = as_html(curves[0].name)
    if not drawn:
        return f'<figure><figcaption>{title}</figcaption><p class="muted">no points</p></figure>'
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    across, up = (_LEFT, _WIDTH - _RIGHT), (_HEIGHT - _BOTTOM, _TOP)
    if kind == "scaling":
        x_scale, y_scale = logarithmic(xs, *across, base=2), logarithmic(ys, *up)
    elif kind == "cdf":
        x_scale, y_scale = logarithmic(xs, *across), linear([0, 1], *up)
    else:
        x_scale, y_scale = linear(xs, *across), linear(ys, *up)
    parts = [_axes(x_scale, y_scale, curves[0])]
    legend: dict[str, None] = {}
    families: dict[tuple[tuple[str, str], ...], int] = {}
    for curve, points in drawn:
        number = families.setdefault(_family(curve), len(families))
        look = f"line c{number % COLORS}"
        if curve.forecast:
            look += " dashed"
        elif number >= COLORS:
            look += " dotted"
        places = [(x_scale.place(x), y_scale.place(y)) for x, y in points]
        name, shown = as_html(_title(curve)), as_html(_title(curve, repeats=False))
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        marks = ""
        if len(points) <= _MARKED:
            marks = "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="mark c{number % COLORS}">'
                f"<title>{name}: {format_number(a)}, {format_number(b)}</title></circle>"
                for (x, y), (a, b) in zip(places, points, strict=True)
            )
        parts.append(f'<path d="{path}" class="{look}"><title>{name}</title></path>{marks}')
        legend[
            '<li><svg viewBox="0 0 28 10" class="key" aria-hidden="true">'
            f'<path d="M1 5H27" class="{look}"/></svg>{shown}</li>'
        ] = None
    about = "; ".join(_described(curve, points) for curve, points in drawn)
    svg = _svg(_HEIGHT, curves[0].name, about, "".join(parts), numbers)
    return (
        f"<figure><figcaption>{title}</figcaption>{svg}"
        f'<ul class="legend">{"".join(legend)}</ul></figure>'
    )


def waterfall(shown: Waterfall, numbers: Iterator[int]) -> str:
    """Return a figure of where time went: a bar for each part, each beginning where one ended."""
    parts = {name: value for name, value in shown.parts.items() if value > 0}
    title = ", ".join(filter(None, (shown.name, plain_labels(shown.labels))))
    if not parts:
        return (
            f"<figure><figcaption>{as_html(title)}</figcaption>"
            '<p class="muted">no parts</p></figure>'
        )
    total, drawn, at = sum(parts.values()), [], 0.0
    room = _WIDTH - 4
    for number, (name, value) in enumerate(parts.items()):
        top = number * _ROW
        text = f"{name}: {format_number(value)} s, {100 * value / total:.0f} %"
        drawn.append(
            f'<text x="2" y="{top + 14}">{as_html(text)}</text>'
            f'<rect x="2" y="{top + 19}" width="{room}" height="12" class="track"/>'
            f'<rect x="{2 + room * at / total:.1f}" y="{top + 19}" '
            f'width="{max(1.0, room * value / total):.1f}" height="12" '
            f'class="bar c{number % COLORS}"><title>{as_html(text)}</title></rect>'
        )
        at += value
    about = ", ".join(f"{name} {format_number(value)} s" for name, value in parts.items())
    svg = _svg(_ROW * len(parts) + 2, title, about, "".join(drawn), numbers)
    total_text = f"{as_html(title)}: {format_number(total)} s"
    return f"<figure><figcaption>{total_text}</figcaption>{svg}</figure>"


def strip(
    values: Sequence[float], low: float, high: float, interval: tuple[float, float] | None = None
) -> str:
    """Return a small drawing of repeats as dots, with a bar at the median, and an interval."""
    width, height, edge = 120, 16, 5
    span = (high - low) or 1.0

    def place(value: float) -> float:
        return edge + (width - 2 * edge) * (value - low) / span

    dots = "".join(
        f'<circle cx="{place(value):.1f}" cy="8" r="2.5" class="dot"/>' for value in values
    )
    middle = place(median(values))
    between = ""
    if interval is not None:
        left, right = (place(min(high, max(low, each))) for each in interval)
        between = f'<path d="M{left:.1f} 8H{right:.1f}" class="interval"/>'
    return (
        f'<svg viewBox="0 0 {width} {height}" class="strip" aria-hidden="true">'
        f'<path d="M0 8H{width}" class="grid"/>{between}{dots}'
        f'<path d="M{middle:.1f} 2V14" class="middle"/></svg>'
    )


def _points(curve: PlotCurve) -> list[tuple[float, float]]:
    """Return the points that the axes can have, at most 400 of them."""
    valid: Callable[[float, float], bool] = {
        "cdf": lambda x, _: x > 0,
        "scaling": lambda x, y: x > 0 and y > 0,
        "time": lambda *_: True,
    }[curve.kind]
    points = [
        (x, y)
        for x, y in zip(curve.x, curve.y, strict=True)
        if math.isfinite(x) and math.isfinite(y) and valid(x, y)
    ]
    every = math.ceil(len(points) / _MOST_POINTS)
    if every > 1:
        points = [*points[:-1:every], points[-1]]
    return points


def _axes(x: Scale, y: Scale, curve: PlotCurve) -> str:
    parts = [
        f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" class="grid"/>'
        f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" class="tick end">{format_number(tick)}</text>'
        for tick, at in zip(y.ticks, map(y.place, y.ticks), strict=True)
    ]
    parts += [
        f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" class="grid"/>'
        f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" class="tick middle-text">'
        f"{format_number(tick)}</text>"
        for tick, at in zip(x.ticks, map(x.place, x.ticks), strict=True)
    ]
    center = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" class="name middle-text">'
        f"{as_html(curve.x_name)}</text>"
        f'<text transform="translate(12 {center}) rotate(-90)" class="name middle-text">'
        f"{as_html(curve.y_name)}</text>"
    )
    return "".join(parts)


def _svg(height: int, title: str, about: str, content: str, numbers: Iterator[int]) -> str:
    name, text = f"n{next(numbers)}", f"n{next(numbers)}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{name} {text}">'
        f'<title id="{name}">{as_html(title)}</title>'
        f'<desc id="{text}">{as_html(about)}</desc>{content}</svg>'
    )


def _family(curve: PlotCurve) -> tuple[tuple[str, str], ...]:
    """Return the labels by which a curve is coloured: repeats, and forecasts, look alike."""
    return tuple((key, value) for key, value in curve.labels.items() if key not in _REPEATS)


def _title(curve: PlotCurve, repeats: bool = True) -> str:
    labels = curve.labels if repeats else dict(_family(curve))
    text = plain_labels(labels) or curve.name
    return f"{text} (forecast)" if curve.forecast else text


def plain_labels(labels: Mapping[str, str]) -> str:
    """Return labels in one line, not escaped."""
    return labels_text(labels, alone=("case", "of"))


def _described(curve: PlotCurve, points: Sequence[tuple[float, float]]) -> str:
    if curve.kind == "cdf":
        shares = (
            (share, next((x for x, y in points if y >= share), points[-1][0]))
            for share in (0.5, 0.99)
        )
        return f"{_title(curve)}: " + ", ".join(
            f"{share:.0%} within {format_number(x)} {curve.x_name}" for share, x in shares
        )
    (x0, y0), (x1, y1) = points[0], points[-1]
    return (
        f"{_title(curve)}: {format_number(y0)} {curve.y_name} at {format_number(x0)}, "
        f"{format_number(y1)} at {format_number(x1)} {curve.x_name}"
    )
