"""Parts of the watch: small runs of benchmarks, and the work that limits each."""

from dataclasses import dataclass
from typing import Final

from dlio_bench.watch.calibration import Bound


@dataclass(frozen=True, slots=True)
class WatchPart:
    """A run of `dlio bench`. `{folder}` in an argument stands for a temporary folder."""

    arguments: tuple[str, ...]
    bound: Bound


PARTS: Final = {
    "loader": WatchPart(
        ("loader", "--peers", "torch,dlio", "--repeats", "2", "--image-size", "96"), "processor"
    ),
    "readers": WatchPart(
        (
            *("readers", "--samples", "200", "--sample-bytes", "20000", "--repeats", "2"),
            *("--format", "shard", "--format", "tar", "--format", "parquet"),
        ),
        "memory",
    ),
    "tiers": WatchPart(
        ("tiers", "--tiers", "ram:64MiB,{folder}:64MiB", "--size", "32MiB", "--no-keep"), "memory"
    ),
    "storage": WatchPart(
        (
            *("storage", "{folder}", "--files", "32", "--sample-size", "128KiB", "--step-ms", "5"),
            *("--epochs", "2", "--workers", "2", "--bare-seconds", "0.5"),
            # The file system's own rates would vary threefold from run to run.
            *("--metadata-files", "0"),
        ),
        "disk",
    ),
    "shuffle": WatchPart(("shuffle", "--case", "mixing", "--repeats", "1"), "processor"),
    "exchange": WatchPart(
        (
            *("exchange", "--case", "messages", "--fabric", "memory", "--repeats", "1"),
            *("--exchange", "allreduce", "--exchange", "gossip"),
        ),
        "processor",
    ),
    "staging": WatchPart(
        (
            *("staging", "--case", "local", "--quick", "--repeats", "1"),
            *("--folder", "{folder}"),
        ),
        "disk",
    ),
}
"""Parts by name. One run of all takes about four minutes on an idle machine of two cores."""
