"""What stands in a job's way, and what would remove it."""

import math
from dataclasses import dataclass, replace
from typing import Final

from dlio.forecast.events import Machine, Timeline, run
from dlio.forecast.traffic import Job, Traffic, traffic
from dlio.plan.placement import Node
from dlio.util.units import format_bytes

__all__ = ["Forecast", "forecast", "remedies", "resized"]

_NEGLIGIBLE: Final = 0.02
"""Share of an epoch that may be stalled without a word."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job's first epoch and those after."""

    job: Job
    traffic: Traffic
    first: Timeline
    later: Timeline
    held: int
    """Bytes of the data set that tiers hold."""

    def as_dict(self) -> dict[str, object]:
        """For reports: bytes, seconds and counts by name."""
        moved, whole = self.traffic.moved, max(1, self.traffic.payload)
        return {
            "nodes": len(self.job.nodes),
            "ranks": self.job.ranks.size,
            "batch_size": self.job.batch_size,
            "mode": self.job.mode,
            "samples": self.job.samples,
            "bytes": self.job.data_bytes,
            "steps": self.traffic.steps,
            "windows": self.traffic.windows,
            "held_bytes": self.held,
            "moved_bytes": moved,
            "moved_share": moved / whole,
            "wire_bytes": self.traffic.wire,
            "messages": self.traffic.messages,
            "peers": self.traffic.peers,
            "source_bytes": self.traffic.source,
            "tier_bytes": list(self.traffic.tiers),
            "link_bytes_out_max": int(self.traffic.link_out.max(initial=0)),
            "link_bytes_in_max": int(self.traffic.link_in.max(initial=0)),
            "window_bytes": self.traffic.window_bytes,
            "first_epoch": _timeline(self.first),
            "later_epoch": _timeline(self.later),
            "remedies": remedies(self),
        }


def forecast(job: Job, machine: Machine, seed: int = 0) -> Forecast:
    """Plan and time a job's first epoch and its second, which stands for the others."""
    held = int(job.block_bytes[job.placement.home >= 0].sum())
    return Forecast(
        job,
        traffic(job, 1),
        run(job, machine, epoch=0, cold=True, seed=seed),
        run(job, machine, epoch=1, seed=seed),
        min(held, job.data_bytes),
    )


def resized(job: Job, nodes: int) -> Job:
    """The same job on another number of nodes, alike."""
    first = job.nodes[0]
    named = tuple(Node(f"node{number}", first.capacities) for number in range(nodes))
    return replace(job, nodes=named, gone=())


def remedies(found: Forecast) -> list[str]:
    """What holds an epoch up, in words, and how many nodes or bytes would end that."""
    job, later = found.job, found.later
    said = []
    whole = int(job.block_bytes.sum())
    capacity = sum(sum(node.capacities) for node in job.nodes)
    if found.traffic.source:
        # Whole blocks are kept, so the last one's room stays empty.
        largest = int(job.block_bytes.max())
        each = capacity // len(job.nodes) // largest * largest
        lacking = whole - found.held
        line = (
            f"The tiers hold {found.held / max(1, job.data_bytes):.0%} of the data; each epoch "
            f"reads {format_bytes(found.traffic.source)} from the source."
        )
        if each:
            line += f" {math.ceil(whole / each)} nodes like these would hold it all, or"
        line += f" {format_bytes(-(-lacking // len(job.nodes)))} more of tiers on each."
        said.append(line)
    if later.stall_s <= _NEGLIGIBLE * later.seconds:
        said.append("From the second epoch on the model is what takes the time.")
    elif later.bottleneck == "source":
        said.append("Later epochs wait for the source: see above, or a faster one.")
    elif later.bottleneck == "link":
        said.append(
            "Later epochs wait for the network between nodes: "
            + ("mode batch moves far less" if job.mode == "global" else "a larger batch moves less")
            + "."
        )
    elif later.bottleneck == "decode":
        said.append("Later epochs wait for decoding: more threads a rank, or `dlio pack --resize`.")
    else:
        said.append(
            f"Later epochs wait {later.stall_s:.2g} s for data: the tiers' own bandwidth, or "
            "the first batch of each."
        )
    if found.first.stall_s > found.first.seconds / 2:
        said.append(
            f"The first epoch waits {found.first.stall_s:.3g} s for the source: `dlio stage` "
            "beforehand takes that out of the job."
        )
    return said


def _timeline(line: Timeline) -> dict[str, object]:
    return {
        "seconds": line.seconds,
        "first_batch_s": line.first_batch_s,
        "stall_s": line.stall_s,
        "stall_share": line.stall_s / max(line.seconds, 1e-9),
        "bottleneck": line.bottleneck,
        "busy": dict(line.busy),
    }
