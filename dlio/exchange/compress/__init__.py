"""Gradient compressors with error feedback, selected by one word.

| name        | bits per entry | content of a message                                       |
|-------------|----------------|------------------------------------------------------------|
| `onebit`    | about 1.02     | signs after a random rotation; a magnitude per 1,024 signs |
| `ternary`   | about 1.6      | signs of the largest two fifths; a mean per sign           |
| `threshold` | about 0.27     | index and sign of entries beyond a threshold               |
| `adaptive`  | about 0.27     | index and sign of the largest entries; a mean per sign     |
| `int8`      | 8.03           | integer multiples of a power of two per 256 entries        |
| `bf16`      | 16             | bfloat16                                                   |
| `fp16`      | 16             | float16, scaled by a power of two per 32,768 entries       |

The residual keeps the error of compression. Let v = values + residual in float32, q the decoded
message and r the new residual. Then q + r = v exactly, as real numbers, for every entry: r is a
float32 number, and adding q and r in float32 gives v to the last bit. For this, q must be chosen
suitably: v - q is a float32 number if q/2 <= v <= 2q (Sterbenz), or if |q| < |v| and the last bit
of q is at least as coarse as that of v. Each module explains how it ensures this.

`onebit` is an unavoidable exception. It chooses between two values per entry; if v is much nearer
to zero than both, v - q needs more than the 24 bits of a float32. So if |v| < |q|/2 or q has the
other sign, r is the float32 number nearest to v - q, and |q + r - v| <= 2^-24 (|q| + |v|), which is
the rounding error of a float32 addition.

-0 counts as 0. Denormal numbers are exact, too, unless the process flushes them to zero. For a NaN
or infinite entry a compressor raises DlioError with the tensor's name, because a residual would
carry it into all later steps. The residual is undefined after such an error.

To add a compressor, subclass `Compressor`, add a line to `COMPRESSORS` of `exchange_spec`,
and subclass `dlio.testing.CompressorTests` with it. A package of its own names its factory, called
with (pieces, scratch), by an entry point of the group `dlio.compressors`; see
docs/guides/writing-a-compressor.md.

Tensors too small for useful means and thresholds, mainly biases and norms, travel as `int8` in the
messages of `onebit`, `ternary`, `threshold` and `adaptive` (see `message_layout.is_small`); the
bits above include them. Of the next larger tensors, `threshold` and `adaptive` send a larger share
(see `sparse`).
"""

from importlib import import_module
from typing import Final

from dlio.exchange.compress.compressor_base import Compressor as Compressor
from dlio.exchange.compress.message_layout import ChunkScratch, Pieces
from dlio.exchange.exchange_spec import COMPRESSORS, compressor_entry
from dlio.util.arguments import unknown_word

NAMES: Final = tuple(COMPRESSORS)


def make_compressor(name: str, pieces: Pieces, scratch: ChunkScratch) -> Compressor:
    """Create a compressor. Raises UsageError for a name that is in no table."""
    entry = compressor_entry(name)
    if entry is None:
        raise unknown_word("compressor (behind a +)", name, NAMES)
    module, _, factory = entry.factory.partition(":")
    compressor: Compressor = getattr(import_module(module), factory)(pieces, scratch)
    return compressor
