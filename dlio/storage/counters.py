"""Counts of reads by their place, which reports and tests are based on."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dlio.util.forks import new_lock

PLACES = ("source", "peer", "ram", "disk")
"""Places that a sample can be read from."""


@dataclass(slots=True)
class Counters:
    """Payload bytes and events of one rank. Thread-safe."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    """Payload bytes by the place they were read from. `source` counts every read of the source,
    those that fill a tier included; the others count samples that were consumed from there."""
    healed: int = 0
    """Samples read from the source because their copy in a tier failed its checksum."""
    tier_errors: int = 0
    """Errors of tiers' disks, after which samples or blocks came from elsewhere."""
    moved_bytes: int = 0
    """Bytes of blocks that filled a faster tier from a slower one of the node."""
    late: int = 0
    """Samples read from the source because a peer did not send them before the deadline."""
    single_bytes: int = 0
    """Payload bytes of samples that were read from the source on their own, as they were wanted
    before their block had come, or had failed their checksum, or have no tier."""
    sent: int = 0
    """Payload bytes pushed to peers."""
    messages: int = 0
    """Messages pushed to peers."""
    decoded: int = 0
    """Samples taken from a tier of decoded images."""
    decode_saved_s: float = 0.0
    """Seconds of decoding that these samples saved, estimated from the first images."""
    device_images: int = 0
    """Images that a device decoded."""
    device_bytes: int = 0
    """Coded bytes that it was given for them."""
    fallbacks: int = 0
    """Images that the CPU decoded in place of the device."""
    samples: int = 0
    """Samples that were handed to the consumer, in all passes."""
    waited_s: float = 0.0
    """Seconds that the consumer waited for batches, in all passes."""
    by_source: Callable[[], dict[str, int]] | None = field(default=None, repr=False)
    """Returns the payload bytes read from each source of a mixture."""
    _lock: threading.Lock = field(default_factory=new_lock, repr=False)

    def add_bytes(self, place: str, count: int) -> None:
        """Add payload bytes that were read from one of PLACES."""
        with self._lock:
            self.bytes[place] += count

    def add(self, event: str, count: float = 1) -> None:
        """Add to the counter named `event`."""
        with self._lock:
            setattr(self, event, getattr(self, event) + count)

    def hand_over(self, samples: int, waited_s: float) -> None:
        """Count a batch that the consumer takes."""
        with self._lock:
            self.samples += samples
            self.waited_s += waited_s

    def snapshot(self) -> dict[str, object]:
        """Return all counts, for a report."""
        sources = {} if self.by_source is None else {"source_bytes": self.by_source()}
        with self._lock:
            return {
                **sources,
                "bytes": dict(self.bytes),
                "healed": self.healed,
                "tier_errors": self.tier_errors,
                "moved_bytes": self.moved_bytes,
                "late": self.late,
                "single_bytes": self.single_bytes,
                "sent": self.sent,
                "messages": self.messages,
                "decoded": self.decoded,
                "decode_saved_s": self.decode_saved_s,
                "device_images": self.device_images,
                "device_bytes": self.device_bytes,
                "fallbacks": self.fallbacks,
            }
