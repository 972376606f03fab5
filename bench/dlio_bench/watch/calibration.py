"""Fixed work that tells how fast a machine is at the moment."""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

Bound = Literal["processor", "memory", "disk"]
_ROUNDS: Final = 3
_PIECE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Seconds that fixed work takes; the machine's load is in them."""

    processor: float
    memory: float
    disk: float

    def of(self, bound: Bound) -> float:
        """Return the seconds of the work that a part depends on most."""
        return {"processor": self.processor, "memory": self.memory, "disk": self.disk}[bound]

    def mean(self, other: "MachineSpeed") -> "MachineSpeed":
        """Return the mean of the speeds before and after a part."""
        return MachineSpeed(
            (self.processor + other.processor) / 2,
            (self.memory + other.memory) / 2,
            (self.disk + other.disk) / 2,
        )


def calibrate(folder: str) -> MachineSpeed:
    """Time hashes and sorts, copies of memory, and a file that is written through to `folder`.

    Each is the mean of 3 rounds, a second in all: a load that comes and goes is met in part.
    """
    data = np.random.default_rng(0).integers(0, 256, _PIECE, np.uint8)
    copy = np.empty_like(data)
    text = data.tobytes()

    def compute() -> None:
        hashlib.sha256(text).digest()
        np.sort(data.view(np.uint32))

    def move() -> None:
        for _ in range(20):
            np.copyto(copy, data)

    def write() -> None:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".dlio-bench-") as file:
            for _ in range(4):
                file.write(text)
            file.flush()
            os.fsync(file.fileno())

    return MachineSpeed(_seconds(compute), _seconds(move), _seconds(write))


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        work()
    return (time.perf_counter() - started) / _ROUNDS
