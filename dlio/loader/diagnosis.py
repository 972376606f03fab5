"""One line on a pass of a loader: its rate, its bottleneck, and a remedy that fits the data."""

import logging
from typing import Final

from dlio.loader.contract import ScalarWriter
from dlio.loader.stats import PassStats, scalars_of
from dlio.util.cores import available_cores
from dlio.util.printable import log_line
from dlio.util.units import counted, format_bytes

_log = logging.getLogger("dlio")

_SMALL_STALL: Final = 0.05
"""Largest share of a pass that a consumer waits with a loader that keeps up."""
_SHORT_STALL_S: Final = 0.1
"""Waiting in seconds that says nothing: starting threads takes as long."""
_BUSY: Final = 0.7
"""Least share of the pass that threads are busy when they are the bottleneck."""
_FROM_PEERS: Final = 0.1
"""Least share of the bytes that come from peers where the network is the bottleneck."""
_SMALL_SAMPLE: Final = 4 << 10
"""Bytes of a sample whose handling takes longer than moving its bytes."""
_LARGE_IMAGE: Final = 48 << 10
"""Bytes of an encoded image that can be made smaller; one of 256 pixels has about 20 KiB."""
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
_MOVING: Final = ("source", "disk", "ram", "peer", "decode")
"""Stages whose time grows with the bytes of a sample."""


def report(stats: PassStats, epoch: int, writer: ScalarWriter | None) -> None:
    """Log the diagnosis of a pass, and write its figures to TensorBoard."""
    if _log.isEnabledFor(logging.INFO):
        log_line(logging.INFO, "epoch %d: %s", epoch, diagnose(stats, available_cores()))
    if writer is not None:
        for name, value in scalars_of(stats).items():
            writer.add_scalar(f"dlio/{name}", value, epoch)


def diagnose(stats: PassStats, cores: int) -> str:
    """Return one line: the rate, the waiting, the bottleneck and its remedy, for so many cores.
    Pure."""
    if stats["batches"] == 0 and stats["seconds"]:
        return (
            "the pass had no batch: this rank has fewer samples than batch_size, and "
            "drop_last=True, or none at all"
        )
    seconds = max(stats["seconds"], 1e-9)
    rate = f"{stats['samples'] / seconds:,.0f} samples/s"
    first = stats["first_batch_s"] or 0.0
    later = max(0.0, stats["stall_s"] - first)
    waited = stats["stall_s"] / seconds
    head = f"{rate}, the consumer waited {waited:.0%} of {seconds:.1f} s"
    # The first question is whether there is a problem: without waiting, busy threads are no
    # bottleneck.
    if waited > _SMALL_STALL and stats["stall_s"] <= _SHORT_STALL_S:
        return (
            f"{head}; that is {1e3 * stats['stall_s']:.0f} ms, too little to tell a bottleneck by"
        )
    if waited <= _SMALL_STALL:
        return f"{head}; bottleneck: consumer (the training step); the loader keeps up"
    # A slow first batch has other remedies than a slow pass, and hides the rest in a short one.
    if later / seconds <= _SMALL_STALL:
        head += f"; all but {later:.1f} s of it for the first batch, which took {first:.1f} s"
        return head + _first_batch_remedy(stats)
    spent: dict[str, float] = stats["thread_s"]
    threads = max(1, stats["threads"])
    total = sum(spent.values())
    # torch's worker processes count nothing that this process could read.
    if not total:
        return f"{head}; bottleneck: the workers' processes, whose time is not seen from here"
    busy = total / (threads * seconds)
    moved = stats.get("bytes", {})
    from_peers = moved.get("peer", 0)
    # Threads that are not busy wait: for peers, if these send late or much. Otherwise the stage
    # with the most time is named, since its waiting counts as time.
    if busy < _BUSY and (stats.get("late", 0) or from_peers > _FROM_PEERS * sum(moved.values())):
        return (
            f"{head}; bottleneck: network (threads busy {busy:.0%}, {format_bytes(from_peers)} "
            "from peers); remedy: mode='batch', or tiers with room for more on each node"
        )
    stage = max(spent, key=lambda name: spent[name])
    share = f"{spent[stage] / total:.0%} of the time of {counted(threads, 'thread')}"
    if busy < _BUSY:
        share += f", which were busy for {busy:.0%} of it"
    return f"{head}; bottleneck: {_NAMES[stage]} ({share}); remedy: {_remedy(stage, stats, cores)}"


def _first_batch_remedy(stats: PassStats) -> str:
    spent = stats["thread_s"]
    reads = stats.get("bytes", {}).get("source", 0) > 0 and spent.get("source", 0.0) > 0
    if reads and spent["source"] >= max(spent.values()):
        return "; remedy: `dlio stage` fills the tiers before the job"
    return "; remedy: persistent_workers=True, which begins the next pass during the last batches"


def _sample_bytes(stats: PassStats) -> float | None:
    """Return the mean payload of a sample; None if it is unknown."""
    moved = sum(stats.get("bytes", {}).values())
    return moved / stats["samples"] if moved and stats["samples"] else None


def _remedy(stage: str, stats: PassStats, cores: int) -> str:
    threads = stats["threads"]
    fewer = threads < cores
    size = _sample_bytes(stats)
    # For tiny samples the cost is that of each call, so faster storage would not help; while tiers
    # fill, whole blocks are waited for.
    fills = stage == "source" and any(stats.get("bytes", {}).get(tier) for tier in ("ram", "disk"))
    is_slow = stage in _MOVING and not fills and not stats.get("images")
    if is_slow and size is not None and size < _SMALL_SAMPLE:
        return (
            f"a larger batch_size: samples of {format_bytes(size)} take longer to handle than to "
            "read or decode"
        )
    more = f"num_workers={cores} (it is {threads}), or " if fewer else ""
    read = format_bytes(stats.get("bytes", {}).get("source", 0))
    if stage == "decode":
        return more + _decode_remedy(stats, size)
    return {
        "source": f"{read} were read from the source: larger tiers=, or `dlio stage` before the "
        "job; num_workers for more reads at a time",
        "disk": "a larger RAM tier, or a faster disk",
        "ram": f"{more or 'fewer threads, or '}smaller samples: memory is the limit",
        "peer": "mode='batch'",
        "transform": f"{more}dlio.transforms, or workers='process' for Python that holds the GIL",
        "collate": "arrays of one shape, or a collate_fn that copies less",
        "fetch": f"{more}dlio.open if it reads files that `dlio ls` shows, workers='process' for "
        "Python that holds the GIL, or tiers= to keep what it returns, random changes included",
    }[stage]


def _decode_remedy(stats: PassStats, size: float | None) -> str:
    if stats.get("images") and size is not None and size > _LARGE_IMAGE:
        return "`dlio pack --resize` once, so that there is less to decode"
    if stats.get("images") and not stats.get("decoded"):
        return "a tier of decoded images, such as tiers='ram:8GiB:decoded,ram:8GiB'"
    return "more cores for each rank"
