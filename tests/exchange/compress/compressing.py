"""Gradients of many kinds, and their round trip through a compressor."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress import Compressor, make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of

Floats = npt.NDArray[np.float32]
Layout = Sequence[tuple[str, Sequence[int]]]
HALF_MAX = float(np.finfo(np.float32).max) / 2


def make(name: str, layout: Layout) -> Compressor:
    return make_compressor(name, pieces_of(layout), ChunkScratch())


def encoded(compressor: Compressor, values: Floats, residual: Floats) -> tuple[Floats, int]:
    """Encode values; return (the decoded message, the message's bytes)."""
    message = np.full(compressor.max_bytes, 0xA5, np.uint8)
    used = compressor.encode(values, residual, message)
    assert used <= compressor.max_bytes
    decoded = np.zeros(compressor.entries, np.float32)
    compressor.add(message[:used].copy(), decoded)
    return decoded, used


def drawn(kind: str, count: int, seed: int) -> Floats:
    """Draw gradients of a kind; no entry exceeds half of the largest float32."""
    rng = np.random.default_rng(seed)
    match kind:
        case "heavy":
            values = rng.standard_t(2, count) * 1e-3
        case "huge range":
            values = rng.choice([-1, 1], count) * 10.0 ** rng.uniform(-45, 38, count)
        case "denormal":
            values = rng.normal(size=count) * 1e-42
        case "large":
            values = rng.uniform(-1, 1, count) * HALF_MAX
        case "constant":
            values = np.full(count, rng.normal())
        case "one sign":
            values = rng.exponential(size=count)
        case "mostly zero":
            values = rng.normal(size=count) * (rng.random(count) < 1e-3)
        case "one beyond all":
            values = rng.normal(size=count)
            values[rng.integers(count)] = 1e30
        case "small next to large":
            values = rng.normal(size=count) * np.where(rng.random(count) < 0.5, 1, 1e-9)
        case _:
            values = np.zeros(count)
    return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float32)


KINDS = (
    *("heavy", "huge range", "denormal", "large", "constant", "one sign"),
    *("mostly zero", "one beyond all", "small next to large", "zero"),
)
