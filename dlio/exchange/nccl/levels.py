"""The levels of sparse compressors by operations of a device, without waiting for it.

These are the rules of `dlio.exchange.compress.sparse`, `adaptive` and `threshold`. Numbers
that those hold as a Python float are float64 tensors without dimensions here.
"""

from typing import Final

import torch

from dlio.exchange.compress.sparse import NONE, REACH, SAMPLE
from dlio.exchange.compress.threshold import HIGHEST, LOWEST, SENT, STEPS
from dlio.exchange.compress.threshold import REACH as THRESHOLD_REACH
from dlio.exchange.nccl.numbers import exponents_of
from dlio.plan.order import GOLDEN, MIX_1, MIX_2, keyed_state

_MANTISSA: Final = (1 << 23) - 1
_EXPONENT: Final = 0xFF << 23
_EIGHTH: Final = 1 << 20
"""An eighth of a power of two, in the bits of a float32."""
_DOUBLINGS: Final = 128
_BIAS: Final = 1023
_BITS: Final = 52
"""Of a float64: the bias of its exponent, and the bits behind it."""


def sample_of(v: torch.Tensor, seed: int, message: int, tensor: int) -> torch.Tensor:
    """Return the magnitudes that the host's compressor draws of a tensor; at most 1,024."""
    if len(v) <= SAMPLE:
        return v.abs()
    state = keyed_state(seed, message, tensor)
    counters = torch.arange(1, SAMPLE + 1, dtype=torch.int64, device=v.device)
    drawn = _mixed(counters * _signed(GOLDEN) + _signed(state))
    uniform = _shifted(drawn, 11).double() * 2.0**-53
    return v[(uniform * len(v)).long()].abs()


def order_statistic(sample: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return the magnitude, float32, that one entry of the sample in `ratio` reaches; if that is
    zero, the smallest magnitude above zero, and 0 if there is none."""
    place = len(sample) - max(1, int(len(sample) / ratio))
    level = sample.sort().values[place]
    least = torch.where(sample > 0, sample, torch.inf).amin()
    return torch.where(level > 0, level, torch.where(least < torch.inf, least, 0.0))


def level_at(level: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return a level from which entries are sent where a rule has found none (0): the power of two
    below the largest entry, and infinity if all are zero."""
    largest = v.abs().amax()
    below = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
    below = torch.where(below > 0, below, largest)  # Denormal numbers have no exponent.
    instead = torch.where(largest > 0, below, torch.inf)
    return torch.where(level > 0, level, instead)


def adapted(step: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a tensor's threshold towards an order statistic, by one step of an eighth.

    Args:
        step: number of the last threshold, int64 without dimensions; NONE for the first.
        level: float32, without dimensions.

    Returns (number of the threshold, the threshold).
    """
    eighths = ((level.view(torch.int32) & _MANTISSA).float() / _EIGHTH).round().long()
    wanted = (exponents_of(level).long() - 127) * STEPS + eighths
    wanted = wanted.clamp(LOWEST, HIGHEST)
    moved = torch.where(step == NONE, wanted, step + (wanted - step).clamp(-1, 1))
    step = torch.where((level > 0) & (level < torch.inf), moved, step)
    known = torch.where(step == NONE, 0, step)
    exponent = known.div(STEPS, rounding_mode="floor")
    bits = ((exponent + 127) << 23) | ((known - exponent * STEPS) * _EIGHTH)
    number = bits.to(torch.int32).view(torch.float32)
    return step, torch.where(step == NONE, 0.0, number)


def mean_beyond(
    sizes: torch.Tensor, side: torch.Tensor, level: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (least, q) as `compress.sparse.mean_beyond`, for the entries of one sign.

    Args:
        sizes: magnitudes, float32, shape (n,).
        side: mask of those that count, shape (n,); all of them are at least `level`.
    """
    largest = torch.where(side, sizes, 0.0).amax().double()
    mean = _mean(sizes, side)
    least = torch.maximum(level.double(), largest / REACH)
    least = torch.where(mean > 2 * least, mean / 2, least)
    sent = side & (sizes >= least)
    smallest = torch.where(sent, sizes, torch.inf).amin().double()
    return least, torch.minimum(_mean(sizes, sent), 2 * smallest)


def threshold_cut(
    sizes: torch.Tensor, side: torch.Tensor, level: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (least, q) as `compress.threshold.Threshold.cut`; arguments as `mean_beyond`."""
    largest = torch.where(side, sizes, 0.0).amax().double()
    doublings = torch.arange(_DOUBLINGS, device=sizes.device)
    levels = level.double() * ((doublings + _BIAS) << _BITS).view(torch.float64)
    least = levels.take((largest <= levels * THRESHOLD_REACH).to(torch.uint8).argmax())
    return least, SENT * least


def _mean(sizes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Mean of the chosen sizes; 0 if there are none."""
    total = torch.where(chosen, sizes, 0.0).sum(dtype=torch.float64)
    return total / chosen.sum().clamp(min=1)


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift 64 bits to the right, with zeros from the left."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """`dlio.plan.order.mix` of int64."""
    x = (x ^ _shifted(x, 30)) * _signed(MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(MIX_2)
    return x ^ _shifted(x, 31)
