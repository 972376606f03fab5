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

Tensors too small for useful means and thresholds, mainly biases and norms, travel as `int8` in the
messages of `onebit`, `ternary`, `threshold` and `adaptive` (see `layout.is_small`); the bits above
include them. Of the next larger tensors, `threshold` and `adaptive` send a larger share (see
`sparse`).
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress.message_layout import ChunkScratch, Piece
from dlio.exchange.exchange_spec import COMPRESSORS
from dlio.util.arguments import unknown_word

NAMES: Final = COMPRESSORS


class Compressor(Protocol):
    """Encodes a region of float32 gradients into short messages, and decodes messages.

    State may influence which message is encoded, but decoding needs none: any compressor created
    with the same name and pieces can decode it. Not thread-safe. The caller owns all arrays.
    `dlio.testing.CompressorTests` checks these promises.
    """

    entries: int
    """Length of the region."""
    max_bytes: int
    """Maximum length of a message; known in advance, so that receives can be posted."""

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        """Encode values + residual; the residual becomes the part that the message leaves out.

        Args:
            values: shape (entries,); only read.
            residual: shape (entries,), contiguous; overwritten.
            message: at least max_bytes long, contiguous.

        Returns:
            Length of the message in bytes.

        Raises DlioError, naming the tensor, if an entry is NaN or infinite.
        """

    def state(self) -> npt.NDArray[np.int64]:
        """State on which later messages depend besides residuals, for a checkpoint."""

    def load_state(self, state: npt.NDArray[np.int64]) -> None:
        """Restore the `state` of a compressor with the same name and pieces."""

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        """Add the decoded message to `into`, shape (entries,), contiguous.

        Raises CommError if the message is recognisably not one for this region; a part of it may
        have been added by then.
        """


def make_compressor(name: str, pieces: Sequence[Piece], scratch: ChunkScratch) -> Compressor:
    """Create a compressor. Raises UsageError for a name that is not in NAMES."""
    from dlio.exchange.compress.adaptive import AdaptiveLevel
    from dlio.exchange.compress.half import Bfloat16, Float16
    from dlio.exchange.compress.int8 import Int8
    from dlio.exchange.compress.onebit import OneBit
    from dlio.exchange.compress.sparse import SparseCompressor
    from dlio.exchange.compress.threshold import ThresholdLevel

    match name:
        case "onebit":
            return OneBit(pieces, scratch)
        case "ternary":
            return SparseCompressor(pieces, scratch, AdaptiveLevel(), dense=True)
        case "threshold":
            return SparseCompressor(pieces, scratch, ThresholdLevel())
        case "adaptive":
            return SparseCompressor(pieces, scratch, AdaptiveLevel())
        case "int8":
            return Int8(pieces, scratch)
        case "bf16":
            return Bfloat16(pieces, scratch)
        case "fp16":
            return Float16(pieces, scratch)
    raise unknown_word("compressor (behind a +)", name, NAMES)
