"""Axes of plots: from values to places, and their ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        if "." in digits:
            digits = digits.rstrip("0").rstrip(".")
        return f"{digits}e{int(power)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
