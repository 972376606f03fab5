"""A first batch, read ahead of its blocks.

A first batch of 64 samples touches about 64 blocks. Waiting for all of these, of some MiB each,
takes far longer than reading 64 files. So where samples are files of their own, those of a first
batch are read first, many at a time. Each payload is kept for its block, which this process has
claimed, so that nothing is read twice.
"""

import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader
from dlio.errors import CorruptBlock, SourceError
from dlio.storage.block_fetcher import BlockFetcher
from dlio.storage.counters import Counters
from dlio.storage.early import EarlyPayloads
from dlio.storage.source_requests import SourceRequests
from dlio.util.threads import Workers

_JOIN_TIMEOUT_S: Final = 5.0


class FirstBatch:
    """Reads the samples of a first batch, once per hierarchy. Thread-safe.

    Invariant, under the lock: `then` of `hurry` is called by one thread at a time, and by none
    after `settle`.
    """

    def __init__(
        self,
        reader: Reader,
        intake: SourceRequests,
        early: EarlyPayloads,
        arrivals: BlockFetcher,
        counters: Counters,
    ) -> None:
        self._reader, self._intake, self._early = reader, intake, early
        self._arrivals, self._counters = arrivals, counters
        self._lock = threading.Lock()
        self._settled = False
        self._worker: Workers | None = None

    def hurry(self, samples: npt.NDArray[np.int64], then: Callable[[], object]) -> None:
        """Begin to read the samples whose blocks have not arrived; see `Hierarchy.hurry`."""
        late: list[int] = []
        able = self._reader.objects and self._intake.requests > 1
        if able and self._worker is None:
            blocks = self._reader.layout.block_of(samples)
            mine = [block for block in np.unique(blocks).tolist() if self._arrivals.reserve(block)]
            late = samples[np.isin(blocks, mine)].tolist()
        if not late:
            self._unless_settled(then)
            return
        self._early.expect(late)
        self._worker = Workers(
            "dlio-hurry",
            lambda _: self._read(late, then),
            wake=self._intake.stop,
            stop_timeout_s=_JOIN_TIMEOUT_S,
        )
        self._worker.start()

    def settle(self) -> None:
        """Stop reading; `then` is not called afterwards."""
        with self._lock:
            self._settled = True
        if self._worker is not None and self._worker.alive():
            self._worker.close()
        self._arrivals.release_reserved()

    def _read(self, late: list[int], then: Callable[[], object]) -> None:
        def read(sample: int) -> None:
            payload = self._reader.read(np.array([sample], np.int64))[0]
            self._counters.add_bytes("source", len(payload))
            self._counters.add("single_bytes", len(payload))
            self._early.put(sample, payload)

        try:
            self._intake.map(read, late, -1)
        except (SourceError, CorruptBlock):
            pass  # It occurs again, with the sample's name, where the sample is wanted.
        finally:
            self._early.give_up()
        self._unless_settled(then)

    def _unless_settled(self, then: Callable[[], object]) -> None:
        with self._lock:
            if not self._settled:
                then()
