"""Findings of checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

State = Literal["ok", "warning", "error"]
"""error: a job fails or gives wrong results; warning: it works, more slowly or not in all cases."""
_RANKS: Final[tuple[State, ...]] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, and the remedy if something is wrong."""

    topic: str
    """`software`, `ranks`, `limits`, `tiers`, `source` or `clocks`."""
    subject: str
    """The thing that was checked, such as `MPI` or `/dev/shm`."""
    text: str
    """The fact, with units."""
    state: State = "ok"
    remedy: str = ""
    """Empty if all is well."""
    where: tuple[str, ...] = ()
    """Nodes on which it was found; empty for all."""


@dataclass(frozen=True, slots=True)
class FindingTopic:
    """Makes the findings of one topic."""

    topic: str

    def ok(self, subject: str, text: str) -> Finding:
        """Return a finding of something that is well."""
        return Finding(self.topic, subject, text)

    def warning(self, subject: str, text: str, remedy: str) -> Finding:
        """Return a finding of something that works, but not as well as it could."""
        return Finding(self.topic, subject, text, "warning", remedy)

    def error(self, subject: str, text: str, remedy: str) -> Finding:
        """Return a finding of something that fails, or gives wrong results."""
        return Finding(self.topic, subject, text, "error", remedy)


def worst(findings: Iterable[Finding]) -> State:
    """Return the worst state; `ok` for none."""
    return max((each.state for each in findings), key=_RANKS.index, default="ok")
