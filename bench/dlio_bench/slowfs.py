"""slowfs: a folder, as a slow parallel file system would give it. A FUSE pass-through.

    python -m dlio_bench.slowfs /data /mnt/slow --latency-ms 5 --bandwidth 200MiB
    python -m dlio_bench.slowfs /data /mnt/slow --emulate "lustre-busy+errors(0.1%)" --writable

Each read takes the latency, however many are under way at a time; so do opening a file, asking for
its attributes and listing a folder. The bandwidth limits all readers together.
Nothing is cached in the kernel: the second pass is as slow as the first. A seed decides which files
fail with EIO, or hang, and at which reads. `.slowfs-stats` in the top folder counts the requests.

Needs libfuse (Debian: fuse3) and mfusepy (`pip install mfusepy`). The room is
`dlio_bench.emulated`.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from dlio.cli.app import run_function
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import parse_bytes
from dlio_bench.emulated.emulated_mount import serve, unmount
from dlio_bench.emulated.profile import Profile, parse_profile

_END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class SlowMount(CheckedOptions):
    """The options of `python -m dlio_bench.slowfs`."""

    source: Annotated[str, Option("Folder to pass through.", positional=True, metavar="SRC")]
    mountpoint: Annotated[str, Option("Empty folder.", positional=True, metavar="MOUNTPOINT")]
    emulate: Annotated[
        str | None,
        Option(
            "Storage to emulate: lustre-busy, s3, nfs, or parts joined by +, such as "
            "latency(20ms,open=5ms)+bandwidth(150MiB). The other options are parts, too.",
            metavar="PROFILE",
        ),
    ] = None
    writable: Annotated[bool, Option("Pass writes on, too.")] = False
    latency_ms: Annotated[
        float | None,
        Option(
            "Latency of each request.",
            unit="milliseconds",
            least=0,
            default_text="5, or that of --emulate",
        ),
    ] = None
    open_latency_ms: Annotated[
        float | None,
        Option(
            "Latency of opening a file.",
            unit="milliseconds",
            least=0,
            default_text="as --latency-ms",
        ),
    ] = None
    bandwidth: Annotated[
        str | None,
        Option("Bandwidth of all readers together, such as 200MiB.", unit="bytes per second"),
    ] = None
    eio_rate: Annotated[
        float | None, Option("Share of reads that fail.", least=0, most=1, default_text="0")
    ] = None
    hang_rate: Annotated[
        float | None, Option("Share of reads that hang.", least=0, most=1, default_text="0")
    ] = None
    seed: Annotated[
        int | None,
        Option("Seed for the choice of reads that fail or hang.", default_text="0"),
    ] = None
    owned: Annotated[
        bool,
        Option(
            "Read the profile from standard input, as JSON, and unmount when it is closed.",
            hidden=True,
        ),
    ] = False

    def profile(self) -> Profile:
        """Return what all options say together. Raises UsageError."""
        profile = parse_profile(self.emulate or "none")
        latency_ms = self.latency_ms
        if self.emulate is None and latency_ms is None:
            latency_ms = 5.0
        latency_s = None if latency_ms is None else latency_ms / 1e3
        open_s = latency_s if self.open_latency_ms is None else self.open_latency_ms / 1e3
        rate = self.bandwidth and float(parse_bytes(self.bandwidth.removesuffix("/s")))
        given: dict[str, Any] = {
            "latency_s": latency_s,
            "metadata_latency_s": latency_s,
            "open_latency_s": open_s,
            "bandwidth": rate,
            "error_share": self.eio_rate,
            "hang_share": self.hang_rate,
            "seed": self.seed,
        }
        return replace(profile, **{key: each for key, each in given.items() if each is not None})


def main(options: SlowMount) -> None:
    """Mount SRC as a slow parallel file system would present it. Ctrl-C unmounts."""
    if options.owned:
        profile = Profile(**json.loads(sys.stdin.readline()))
        threading.Thread(target=_end_with_owner, args=(options.mountpoint,), daemon=True).start()
    else:
        profile = options.profile()
    serve(options.source, options.mountpoint, profile, writable=options.writable)


def _end_with_owner(mountpoint: str) -> None:
    """End this process at the end of its standard input."""
    sys.stdin.read()
    unmount(mountpoint)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_TIMEOUT_S)
    os._exit(1)


if __name__ == "__main__":
    run_function("slowfs", main, sys.argv[1:])
