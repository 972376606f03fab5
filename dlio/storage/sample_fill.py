"""Filling tiers in the background, sample by sample in the order of use; see `SampleFetcher`."""

import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader
from dlio.plan.order import Order
from dlio.storage.sample_fetcher import SampleFetcher
from dlio.util.threads import Workers

_CHUNK: Final = 1 << 10
_WAIT_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 10.0


class SampleFiller:
    """A thread that offers a node's samples to a gathering until their blocks are complete.

    Each rank of a node has one, and all go through the same list.

    Args:
        wanted: mask of the blocks; shape (blocks,).
    """

    def __init__(
        self, gather: SampleFetcher, reader: Reader, order: Order, wanted: npt.NDArray[np.bool_]
    ) -> None:
        self._gather, self._reader, self._order = gather, reader, order
        self._wanted = wanted
        self._workers = Workers("dlio-fill", self._run, stop_timeout_s=_CLOSE_TIMEOUT_S)
        self._closing: threading.Event = self._workers.stopping
        self._workers.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks that can be completed are; False after `timeout_s`."""
        return self._workers.wait(timeout_s)

    def close(self) -> None:
        """Stop. A source that hangs is not waited for."""
        self._workers.close()

    def _run(self, _: int) -> None:
        try:
            for start in range(0, len(self._order), _CHUNK):
                positions = np.arange(start, min(start + _CHUNK, len(self._order)), dtype=np.int64)
                self._offer(self._order.samples(positions))
            missing = np.flatnonzero(self._wanted).tolist()
            while not self._closing.is_set():
                self._gather.drain(self._closing)
                missing = [block for block in missing if not self._gather.complete(block)]
                if not missing:
                    return
                # Samples that the order leaves out, or that another process was reading.
                for block in missing:
                    self._offer(self._reader.layout.samples_of(block))
                self._closing.wait(_WAIT_S)
        except Exception:
            # A source that hung and answers at last finds its tier closed.
            if not self._closing.is_set():
                raise

    def _offer(self, samples: npt.NDArray[np.int64]) -> None:
        blocks, places = self._reader.layout.locate(samples)
        here = self._wanted[blocks]
        rows = (samples[here].tolist(), blocks[here].tolist(), places[here].tolist())
        for sample, block, place in zip(*rows, strict=True):
            if self._closing.is_set():
                return
            self._gather.offer(sample, block, place, self._closing)
