"""Counts and times of a pass, and the diagnosis of its bottleneck."""

import logging
from collections.abc import Sequence
from typing import Any, Final, NotRequired, TypedDict, cast

from dlio.loader.contract import ScalarWriter
from dlio.util.cores import available_cores
from dlio.util.units import format_bytes

__all__ = ["STAGES", "PassStats", "diagnose", "joined", "report", "scalars_of"]

_log = logging.getLogger("dlio")

_SMALL_STALL: Final = 0.02
"""Largest share of a pass that a consumer waits with a loader that keeps up."""
_BUSY: Final = 0.7
"""Least share of the pass that threads are busy when they are the bottleneck."""
STAGES: Final = ("source", "disk", "ram", "peer", "decode", "transform", "collate", "fetch")


_OF_FIRST: Final = ("engine", "threads", "first_batch_s")
"""Counts that do not add up."""


class PassStats(TypedDict):
    """The result of `DataLoader.stats`: this rank's counts of one pass."""

    engine: str
    """`planned`, `threads` or `torch`."""
    samples: int
    batches: int
    seconds: float
    stall_s: float
    """Seconds that `next` waited."""
    first_batch_s: float | None
    threads: int
    thread_s: dict[str, float]
    """Seconds of the threads, by stage."""
    skipped: list[str]
    """Names of samples that were left out."""
    notes: list[str]
    bytes: NotRequired[dict[str, int]]
    """Payload bytes by place: `source`, `peer`, `ram`, `disk`. This and the counts below are there
    for data sets of dlio alone."""
    sent: NotRequired[int]
    """Bytes sent to peers."""
    messages: NotRequired[int]
    late: NotRequired[int]
    """Samples that a peer did not send in time."""
    single_bytes: NotRequired[int]
    """Payload bytes of samples that were read from the source on their own, not with their block.
    """
    healed: NotRequired[int]
    """Samples that failed their checksum in a tier."""
    decoded: NotRequired[int]
    """Samples from a tier of decoded images."""
    decode_saved_s: NotRequired[float]


def joined(parts: Sequence[PassStats]) -> PassStats:
    """Return the counts of a pass that consists of several, one after another."""
    result: dict[str, Any] = dict(parts[0])
    for part in parts[1:]:
        for key, value in part.items():
            if key in _OF_FIRST:
                continue
            if isinstance(value, dict):
                result[key] = {name: result[key][name] + each for name, each in value.items()}
            else:
                result[key] = result[key] + value
    return cast(PassStats, result)


def scalars_of(stats: PassStats) -> dict[str, float]:
    """Return the figures of a pass for TensorBoard, by name."""
    seconds = max(stats["seconds"], 1e-9)
    return {
        "samples_per_s": stats["samples"] / seconds,
        "stall_share": stats["stall_s"] / seconds,
        "first_batch_s": stats["first_batch_s"] or 0.0,
        **{f"bytes_{place}": float(count) for place, count in stats.get("bytes", {}).items()},
        **{f"thread_s_{stage}": spent for stage, spent in stats["thread_s"].items()},
    }


def report(stats: PassStats, epoch: int, writer: ScalarWriter | None) -> None:
    """Log the diagnosis of a pass, and write its figures to TensorBoard."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("epoch %d: %s", epoch, diagnose(stats, available_cores()))
    if writer is not None:
        for name, value in scalars_of(stats).items():
            writer.add_scalar(f"dlio/{name}", value, epoch)


def diagnose(stats: PassStats, cores: int) -> str:
    """Return one line: the rate, the waiting, the bottleneck and its remedy. Pure.

    Args:
        stats: result of `DataLoader.stats`.
        cores: that this process may use.
    """
    seconds = max(stats["seconds"], 1e-9)
    rate = f"{stats['samples'] / seconds:,.0f} samples/s"
    later = max(0.0, stats["stall_s"] - (stats["first_batch_s"] or 0.0))
    waited = stats["stall_s"] / seconds
    head = f"{rate}, the consumer waited {waited:.0%} of {seconds:.1f} s"
    if waited <= _SMALL_STALL:
        return f"{head}; bottleneck: consumer (the training step); the loader keeps up"
    if later / seconds <= _SMALL_STALL:
        return (
            f"{head}; all but {later:.1f} s of it for the first batch, which took "
            f"{stats['first_batch_s']:.1f} s; remedy: `dlio stage` fills the tiers before the job"
        )
    spent: dict[str, float] = stats["thread_s"]
    threads = max(1, stats["threads"])
    total = sum(spent.values())
    busy = total / (threads * seconds)
    if not total:
        return f"{head}; bottleneck: the workers' processes, whose time is not seen from here"
    stage = max(spent, key=lambda name: spent[name])
    if busy < _BUSY and stats.get("late", 0) + stats.get("bytes", {}).get("peer", 0) > 0:
        return (
            f"{head}; bottleneck: network (threads busy {busy:.0%}, "
            f"{format_bytes(stats['bytes']['peer'])} from peers); remedy: mode='batch', or tiers "
            "with room for more on each node"
        )
    share = f"{spent[stage] / total:.0%} of the time of {threads} threads"
    return f"{head}; bottleneck: {_NAMES[stage]} ({share}); remedy: {_remedy(stage, stats, cores)}"


_NAMES: Final = {
    "source": "source",
    "disk": "tier (disk)",
    "ram": "tier (ram)",
    "peer": "network",
    "decode": "decode",
    "transform": "transform",
    "collate": "collate",
    "fetch": "the data set's own [i]",
}


def _remedy(stage: str, stats: PassStats, cores: int) -> str:
    threads = stats["threads"]
    more = f"num_workers={cores} (it is {threads}), or " if threads < cores else ""
    read = format_bytes(stats.get("bytes", {}).get("source", 0))
    return {
        "source": f"{read} were read from the source: larger tiers=, or `dlio stage` before the "
        "job; num_workers for more reads at a time",
        "disk": "a larger RAM tier, or a faster disk",
        "ram": "fewer threads: memory is the limit",
        "peer": "mode='batch'",
        "decode": f"{more}`dlio pack --resize` once, so that there is less to decode",
        "transform": f"{more}dlio.transforms, or workers='process' for Python that holds the GIL",
        "collate": "arrays of one shape, or a collate_fn that copies less",
        "fetch": f"{more}workers='process' for Python that holds the GIL, or tiers= to keep what "
        "it returns",
    }[stage]
