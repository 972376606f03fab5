"""A data set with several replicas.

Each read goes to the replica that is expected to finish it first, and to another one if it fails.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from dlio.data.index import cache_folder, open_cache
from dlio.data.reader_contract import Abilities, Reader, StoredBlocks, abilities_of
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.forks import new_lock
from dlio.util.trusted_files import read_small
from dlio.util.units import counted
from dlio.util.whole_files import unwritable, write_whole_at

# Latency and bandwidth of the places that data is read from
#
# `dlio bench tiers` measures them once; later reads, including their waiting, correct the figures.
#
#     <cache>/bandwidths.json
#     {host: {place: {"latency_s": .., "bytes_per_s": .., "measured": ..}}}

_FILE: Final = "bandwidths.json"
_MOST: Final = 1 << 20
_LATENCY_S: Final = 1e-3
_RATE: Final = 1e9
"""Bytes per second of a place that was not measured."""
_LEARNED: Final = 0.2
"""Weight of the latest read in the estimate."""
_FORGOTTEN: Final = 0.01
"""Share of the learned correction that is lost with each read for which the place was not chosen,
so that a place that was slow for a while is tried again."""


class ReadSpeed:
    """Expected duration of a place's reads. Thread-safe."""

    def __init__(self, latency_s: float = _LATENCY_S, rate: float = _RATE) -> None:
        self._first = (latency_s, 1 / rate)
        self._latency_s, self._s_per_byte = self._first
        self._waiting = 0
        self._lock = new_lock()

    def expected_s(self, count: int) -> float:
        """Return the seconds until `count` more bytes arrive, after those that are being read."""
        with self._lock:
            return self._latency_s + (self._waiting + count) * self._s_per_byte

    def begins(self, count: int) -> tuple[int, int, float]:
        """Say that a read of `count` bytes begins; returns a value for `ends`."""
        with self._lock:
            self._waiting += count
            return count, self._waiting, time.monotonic()

    def ends(self, began: tuple[int, int, float], failed: bool = False) -> None:
        """Say that a read has ended, so that its speed is learned unless it failed. `began` is the
        value from `begins`."""
        count, queued, at = began
        seconds = time.monotonic() - at
        with self._lock:
            self._waiting -= count
            if failed:
                return
            # Both parts change by the same factor: their proportion cannot be observed.
            expected = self._latency_s + queued * self._s_per_byte
            factor = math.exp(_LEARNED * math.log(max(seconds, 1e-9) / expected))
            self._latency_s *= factor
            self._s_per_byte *= factor

    def forget(self) -> None:
        """Say that another place was chosen: return a little towards the first estimate."""
        with self._lock:
            for name, first in zip(("_latency_s", "_s_per_byte"), self._first, strict=True):
                now = getattr(self, name)
                setattr(self, name, now * (first / now) ** _FORGOTTEN)


def measured(place: str) -> tuple[float, float] | None:
    """Return (seconds of a small request, bytes per second) of a place, None if not measured."""
    entry = _everything().get(platform.node(), {}).get(place)
    try:
        latency_s, rate = float(entry["latency_s"]), float(entry["bytes_per_s"])
    except (TypeError, KeyError, ValueError):
        return None
    return (latency_s, rate) if latency_s > 0 and rate > 0 else None


def remember(place: str, latency_s: float, rate: float) -> str:
    """Store the measured figures of a place on this machine, and return the path of the file.

    Raises UsageError when it cannot be written.
    """
    everything = _everything()
    here = everything.setdefault(platform.node(), {})
    here[place] = {"latency_s": latency_s, "bytes_per_s": rate, "measured": time.time()}
    text = json.dumps(everything, indent=2).encode()
    path = os.path.join(cache_folder(), _FILE)
    try:
        with open_cache() as cache:
            write_whole_at(cache, _FILE, lambda file: file.write(text))
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def _everything() -> dict[str, Any]:
    try:
        with open_cache() as cache:
            content = json.loads(read_small(cache, _FILE, _MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# Replicas

T = TypeVar("T")
_REST_S: Final = 30.0
"""Seconds for which a replica that failed is tried last."""


class _Replica:
    def __init__(self, reader: Any) -> None:
        self.reader = reader
        known = measured(reader.path)
        self.speed = ReadSpeed() if known is None else ReadSpeed(*known)
        self.bytes = 0
        self.failures = 0
        self.rests_until = 0.0


class ReplicatedReader:
    """A reader over the readers of replicas. Everything but reading is delegated to the first.

    Owns the readers. Of several that are expected to be equally fast, the first is asked.

    Raises UsageError when they do not hold the same samples.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        first = readers[0]
        for other in readers[1:]:
            _check_same(first, other)
        self._replicas = [_Replica(reader) for reader in readers]
        self._first: Any = first
        self._lock = new_lock()
        self._served: dict[int, _Replica] = {}
        """Replica that each stored block came from, until the block is checked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._first, name)

    @property
    def abilities(self) -> Abilities:
        # Without `locate`: each read chooses among the replicas.
        return replace(abilities_of(self._first), summary=self.summary, locate=None)

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": [replica.reader for replica in self._replicas]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ReplicatedReader.__init__(self, state["readers"])

    def __len__(self) -> int:
        return len(self._first)

    def name(self, sample: int) -> str:
        return str(self._first.name(sample))

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Return payloads from any replica; see `Reader`. Raises SourceError when all fail."""
        size = int(self._first.sizes[samples].sum())
        return self._ask(size, lambda replica: replica.reader.read(samples))

    def close(self) -> None:
        for replica in self._replicas:
            replica.reader.close()

    def summary(self) -> str:
        """Say in a sentence which share of the bytes each replica has delivered."""
        whole = max(1, sum(replica.bytes for replica in self._replicas))
        return "copies of the source gave " + ", ".join(
            f"{replica.reader.path} {replica.bytes / whole:.0%}"
            + (f" ({replica.failures} failures)" if replica.failures else "")
            for replica in self._replicas
        )

    def shares(self) -> list[int]:
        """Return the bytes that each replica has delivered."""
        return [replica.bytes for replica in self._replicas]

    def _ask(self, size: int, read: Callable[[_Replica], T], at: int | None = None) -> T:
        failed: SourceError | CorruptBlock | None = None
        tried: list[_Replica] = []
        while len(tried) < len(self._replicas):
            replica = self._choose(size, tried)
            tried.append(replica)
            began = replica.speed.begins(size)
            try:
                result = read(replica)
            except (SourceError, CorruptBlock) as error:
                replica.speed.ends(began, failed=True)
                self._blame(replica)
                failed = failed or error
                continue
            replica.speed.ends(began)
            with self._lock:
                replica.bytes += size
                if at is not None:
                    self._served[at] = replica
            return result
        assert failed is not None
        raise failed

    def _choose(self, size: int, tried: Sequence[_Replica]) -> _Replica:
        now = time.monotonic()
        left = [replica for replica in self._replicas if replica not in tried]
        best = min(left, key=lambda r: (r.rests_until > now, r.speed.expected_s(size)))
        for replica in left:
            if replica is not best:
                replica.speed.forget()
        return best

    def _blame(self, replica: _Replica) -> None:
        with self._lock:
            replica.failures += 1
            replica.rests_until = time.monotonic() + _REST_S


class ReplicatedBlocks(ReplicatedReader):
    """A reader over replicas that store blocks; see `StoredBlocks`."""

    @property
    def block_bytes(self) -> npt.NDArray[np.int64]:
        """File bytes of each block; shape (blocks,)."""
        block_bytes: npt.NDArray[np.int64] = self._first.block_bytes
        return block_bytes

    def stored_at(self, block: int) -> int:
        return int(self._first.stored_at(block))

    def read_stored(self, block: int, into: memoryview, at: int = 0) -> None:
        self._ask(len(into), lambda replica: replica.reader.read_stored(block, into, at), block)

    def check_stored(self, block: int, stored: memoryview) -> None:
        """Check a block. Raises CorruptBlock; another replica is then tried first."""
        with self._lock:
            replica = self._served.pop(block, self._replicas[0])
        try:
            replica.reader.check_stored(block, stored)
        except CorruptBlock:
            self._blame(replica)
            raise


def replicated(readers: Sequence[Reader]) -> Reader:
    """Return a reader over the readers of replicas; a single reader is returned as it is.

    Raises UsageError when they do not hold the same samples.
    """
    if len(readers) == 1:
        return readers[0]
    blocks = all(isinstance(reader, StoredBlocks) for reader in readers)
    made: Any = ReplicatedBlocks(readers) if blocks else ReplicatedReader(readers)
    return made  # type: ignore[no-any-return]


def _check_same(first: Reader, other: Reader) -> None:
    where = f"{other.path} is not a copy of {first.path}"
    if len(first) != len(other):
        raise UsageError(f"{where}: it has {counted(len(other), 'sample')}, not {len(first)}")
    if first.schema != other.schema:
        raise UsageError(f"{where}: its samples have other fields")
    differing = np.flatnonzero(
        (np.asarray(first.sizes) != np.asarray(other.sizes))
        | (np.asarray(first.labels) != np.asarray(other.labels))
    )
    if len(differing):
        sample = int(differing[0])
        raise UsageError(f"{where}: sample {first.name(sample)!r} has another size or label there")
    some = np.linspace(0, len(first) - 1, min(len(first), 1000)).astype(int).tolist()
    for sample in some:
        if first.name(sample) != other.name(sample):
            raise UsageError(
                f"{where}: sample {sample} is {other.name(sample)!r} there, "
                f"{first.name(sample)!r} here"
            )
