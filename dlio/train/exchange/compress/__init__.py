"""Gradient compressors with error feedback, selected by one word.

| name        | bits an entry  | what is sent                                              |
|-------------|----------------|-----------------------------------------------------------|
| `onebit`    | about 1.02     | the sign along turned axes; a size for every 1,024        |
| `threshold` | about 0.27     | place and sign of entries beyond a threshold              |
| `adaptive`  | about 0.27     | place and sign of the largest, and the mean of each sign  |
| `int8`      | 8.03           | whole multiples of a power of two per 256 entries         |
| `bf16`      | 16             | bfloat16                                                  |
| `fp16`      | 16             | float16, scaled by a power of two per 32,768 entries      |

A residual keeps the rest. Let v = values + residual in float32, q the decoded message and r the new
residual: then q + r = v exactly, as real numbers, for every entry. r is then a
float32 number, so that float32 addition gives v back to the last bit. It holds because q is chosen
for it: v - q is a float32 number when q/2 <= v <= 2q (Sterbenz), and when q is v's smaller and its
last bit is at least as coarse as v's. Each module explains how it ensures this.

`onebit` is the exception, and cannot be otherwise. It has two numbers for each entry to choose
from; where v is much nearer to zero than both, v - q needs more than the 24 bits of a float32,
whatever q is. So where |v| < |q|/2 or q has the other sign, r is the float32 number nearest to
v - q, and |q + r - v| <= 2^-24 (|q| + |v|): what float32 addition loses when it adds q to anything.

-0 counts as 0. Denormal numbers are kept exactly, too, unless the process flushes them to zero.
A compressor raises DlioError, with the tensor's name, for an entry that is not finite: kept in a
residual, it would spoil that entry of every step to come. The residual is then undefined.

Parameters whose means and thresholds would say nothing, biases and norms above all, travel as
`int8` in the messages of `onebit`, `threshold` and `adaptive`: see `layout.is_small`. Their bytes
count. Of somewhat larger ones `threshold` and `adaptive` send more than of others: see `sparse`.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.train.exchange.compress.layout import Piece, Scratch
from dlio.train.exchange_spec import COMPRESSORS

__all__ = ["NAMES", "Compressor", "make_compressor"]

NAMES: Final = COMPRESSORS


class Compressor(Protocol):
    """Turns a region of float32 gradients into short messages, and messages into numbers.

    It may keep state that decides what is sent, but never what a message stands for: any
    compressor made with the same name and pieces reads it. For one thread at a time; the caller
    owns all arrays. `dlio.testing.CompressorTests` checks these promises.
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

        Raises CommError for a message that cannot have been written for this region, where that
        shows: it may then have been added in part.
        """


def make_compressor(name: str, pieces: Sequence[Piece], scratch: Scratch) -> Compressor:
    """Create a compressor. Raises UsageError for a name that is not in NAMES."""
    from dlio.train.exchange.compress.adaptive import Adaptive
    from dlio.train.exchange.compress.half import Bfloat16, Float16
    from dlio.train.exchange.compress.int8 import Int8
    from dlio.train.exchange.compress.onebit import OneBit
    from dlio.train.exchange.compress.sparse import Sparse
    from dlio.train.exchange.compress.threshold import Threshold

    match name:
        case "onebit":
            return OneBit(pieces, scratch)
        case "threshold":
            return Sparse(pieces, scratch, Threshold())
        case "adaptive":
            return Sparse(pieces, scratch, Adaptive())
        case "int8":
            return Int8(pieces, scratch)
        case "bf16":
            return Bfloat16(pieces, scratch)
        case "fp16":
            return Float16(pieces, scratch)
    raise UsageError(f"compressor {name}: choose one of {', '.join(NAMES)}")
