"""The contract of a compressor, and the frame of those that work chunk by chunk."""

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress.message_layout import CHUNK, F32, ChunkScratch, Pieces, chunks

Bytes = npt.NDArray[np.uint8]


class Compressor:
    """Encodes a region of float32 gradients into short messages, and decodes messages.

    State may influence which message is encoded, but decoding needs none: any compressor created
    with the same name and pieces can decode it. Not thread-safe. The caller owns all arrays.
    `dlio.testing.CompressorTests` checks these promises.
    """

    entries: int
    """Length of the region."""
    max_bytes: int
    """Maximum length of a message; known in advance, so that receives can be posted."""

    def encode(self, values: F32, residual: F32, message: Bytes) -> int:
        """Encode values + residual; the residual becomes the part that the message leaves out.

        Args:
            values: shape (entries,); only read.
            residual: shape (entries,), contiguous; overwritten.
            message: at least max_bytes long, contiguous.

        Returns:
            Length of the message in bytes.

        Raises DlioError, naming the tensor, if an entry is NaN or infinite.
        """
        raise NotImplementedError

    def state(self) -> npt.NDArray[np.int64]:
        """State on which later messages depend besides residuals, for a checkpoint."""
        return np.empty(0, np.int64)

    def load_state(self, state: npt.NDArray[np.int64]) -> None:
        """Restore the `state` of a compressor with the same name and pieces."""

    def add(self, message: Bytes, into: F32) -> None:
        """Add the decoded message to `into`, shape (entries,), contiguous.

        Raises CommError if the message is recognisably not one for this region; a part of it may
        have been added by then.
        """
        raise NotImplementedError


class ChunkwiseCompressor(Compressor):
    """A compressor that encodes a chunk at a time; its messages do not depend on earlier ones.

    A chunk and its working memory stay in a core's cache: the sum with the residual, the message
    and the new residual are computed while it is there.
    """

    chunk = CHUNK
    """Entries per chunk."""

    def __init__(self, pieces: Pieces, scratch: ChunkScratch) -> None:
        self.pieces, self.scratch = pieces, scratch
        self.entries = pieces[-1].stop if pieces else 0

    def encode(self, values: F32, residual: F32, message: Bytes) -> int:
        with np.errstate(all="ignore"):
            for start, stop in chunks(self.entries, self.chunk):
                # numpy, not torch: torch is up to four times as fast alone, but shares a pass
                # among threads. Next to decoding, 25 million entries of `onebit` took 0.2 to 1.1 s
                # by torch, 44 ms on one core here.
                v = np.add(residual[start:stop], values[start:stop], out=residual[start:stop])
                self.encode_chunk(start, v, self.scratch.floats[: stop - start], message)
        return self.max_bytes

    def add(self, message: Bytes, into: F32) -> None:
        for start, stop in chunks(self.entries, self.chunk):
            w = self.scratch.floats[: stop - start]
            self.decode_chunk(start, w, message)
            np.add(into[start:stop], w, out=into[start:stop])

    def encode_chunk(self, start: int, v: F32, w: F32, message: Bytes) -> None:
        """Write the part of the message of the chunk that begins at entry `start`, and subtract
        from `v`, its values + residual, what the message says. `w` is working memory as long as the
        chunk.

        Raises DlioError, naming the tensor, if an entry is NaN or infinite.
        """
        raise NotImplementedError

    def decode_chunk(self, start: int, w: F32, message: Bytes) -> None:
        """Write the chunk's decoded entries into `w`."""
        raise NotImplementedError
