"""Counting what was read, from where. Counts are what reports and tests stand on."""

import threading
from dataclasses import dataclass, field

PLACES = ("source", "peer", "ram", "disk")


@dataclass(slots=True)
class Counters:
    """Payload bytes and events of one rank; add from any thread."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    """Payload bytes by the place they were read from. `source` counts every read of it, those
    that fill a tier included; the others count samples that were consumed from there."""
    healed: int = 0
    """Samples whose copy in a tier failed its checksum, and that were read from the source."""
    late: int = 0
    """Samples that a peer did not send within the deadline, and that were read from the source."""
    sent: int = 0
    """Payload bytes pushed to peers."""
    messages: int = 0
    """Messages pushed to peers."""
    decoded: int = 0
    """Samples that were taken from a tier of decoded images."""
    decode_saved_s: float = 0.0
    """Seconds of decoding that these did without, by what the first images took."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_bytes(self, place: str, count: int) -> None:
        with self._lock:
            self.bytes[place] += count

    def add(self, event: str, count: float = 1) -> None:
        with self._lock:
            setattr(self, event, getattr(self, event) + count)

    def snapshot(self) -> dict[str, object]:
        with self._lock:
            return {
                "bytes": dict(self.bytes),
                "healed": self.healed,
                "late": self.late,
                "sent": self.sent,
                "messages": self.messages,
                "decoded": self.decoded,
                "decode_saved_s": self.decode_saved_s,
            }
