"""The most that the emulation can serve here: `python -m dlio_bench.emulated.limit`.

Profiles must stay below it, or they are not what they say.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from typing import Annotated, Final

from dlio.cli.app import run_function
from dlio.util.options import CheckedOptions, Option
from dlio.util.threads import Workers
from dlio.util.trusted_files import closing_descriptor
from dlio_bench.emulated.emulated_mount import emulated
from dlio_bench.emulated.profile import Profile

_FILE_BYTES: Final = 64 << 20
_NOT_SLOW: Final = Profile(metadata_rate=1e12)
"""Mounted, and never waited for."""


@dataclass(frozen=True, slots=True)
class Limit(CheckedOptions):
    """The options."""

    seconds: Annotated[float, Option("Time of each trial.", unit="seconds", above=0)] = 2.0
    threads: Annotated[int, Option("Readers at a time.", least=1)] = 16


def served(folder: str, size: int, threads: int, seconds: float) -> float:
    """Return reads a second of `size` bytes from a folder with a file `data` of 64 MiB."""
    counts = [0] * threads
    with (
        emulated(folder, _NOT_SLOW) as mounted,
        closing_descriptor(os.open(os.path.join(mounted, "data"), os.O_RDONLY)) as descriptor,
    ):
        began = time.monotonic()

        def read(number: int) -> None:
            memory = bytearray(size)
            at = number
            while time.monotonic() < began + seconds:
                os.preadv(descriptor, [memory], at * size % _FILE_BYTES)
                counts[number] += 1
                at += threads

        with Workers("dlio-bench", read, threads) as running:
            running.wait()
        return sum(counts) / (time.monotonic() - began)


def main(options: Limit) -> None:
    """Print how many requests and bytes a second the emulation can serve on this machine."""
    with tempfile.TemporaryDirectory(prefix="dlio-bench-", dir="/dev/shm") as folder:
        with open(os.path.join(folder, "data"), "wb") as file:
            file.write(bytes(_FILE_BYTES))
        small = served(folder, 4096, options.threads, options.seconds)
        large = served(folder, 1 << 20, options.threads, options.seconds)
    print(f"{small:,.0f} reads of 4 KiB a second; {large:,.0f} MiB/s in reads of 1 MiB")


if __name__ == "__main__":
    import sys

    run_function("limit", main, sys.argv[1:])
