"""Counts and times of a pass."""

from collections.abc import Sequence
from typing import Any, Final, NotRequired, TypedDict, cast

STAGES: Final = ("source", "disk", "ram", "peer", "decode", "transform", "collate", "fetch")


_OF_FIRST: Final = ("engine", "threads", "first_batch_s", "images")
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
    warned: NotRequired[list[str]]
    """Names of this epoch's pictures of which this process has seen a warning: none but those that
    `dlio verify`, which decodes pictures whole, lists. Of a JPEG, that is damage in the part of it
    that a crop of this epoch or an earlier one has decoded; no sample is decoded whole to count."""
    bytes: NotRequired[dict[str, int]]
    """Payload bytes by place: `source`, `peer`, `ram`, `disk`. This and the counts below are there
    for data sets of dlio alone."""
    sent: NotRequired[int]
    """Bytes sent to peers."""
    messages: NotRequired[int]
    late: NotRequired[int]
    """Samples read from the source because a peer did not send them in time."""
    single_bytes: NotRequired[int]
    """Payload bytes of samples that were read from the source on their own, as they were wanted
    before their block had come, or had failed their checksum, or have no tier."""
    healed: NotRequired[int]
    """Samples that could not be read from a tier, or failed their checksum there."""
    tier_errors: NotRequired[int]
    """Errors of tiers' disks, after which samples or blocks came from elsewhere."""
    moved_bytes: NotRequired[int]
    """Bytes of blocks that filled a faster tier from a slower one of the node."""
    decoded: NotRequired[int]
    """Samples from a tier of decoded images."""
    decode_saved_s: NotRequired[float]
    """Seconds of decoding that these samples saved, estimated from the first images."""
    device_images: NotRequired[int]
    """Images that a device decoded, with `decode="device"`."""
    device_bytes: NotRequired[int]
    """Coded bytes that it was given for them."""
    fallbacks: NotRequired[int]
    """Images that the CPU decoded in place of the device."""
    source_bytes: NotRequired[dict[str, int]]
    """Payload bytes that were read from the storage of each source of a mixture."""
    source_samples: NotRequired[dict[str, int]]
    """Samples of each source of a mixture."""
    images: NotRequired[bool]
    """True if samples have images to decode."""


def joined(parts: Sequence[PassStats]) -> PassStats:
    """Return the counts of a pass that consists of several, one after another."""
    # By key and not by field: a pass over another engine has fewer of them.
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
