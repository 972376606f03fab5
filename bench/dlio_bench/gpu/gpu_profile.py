"""Copies, kernels and waits in a trace of torch.profiler."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

Span = tuple[float, float]
"""Beginning and end, in microseconds."""


class _Range(Protocol):
    start: float
    end: float


class _ProfilerEvent(Protocol):
    """An event of `torch.profiler.profile.events()`."""

    name: str
    device_type: object

    @property
    def time_range(self) -> _Range: ...


_WAITS: Final = ("cudaDeviceSynchronize", "cudaStreamSynchronize")


@dataclass(frozen=True, slots=True)
class TraceSums:
    """Sums over a trace."""

    copies_us: float
    """Time of copies to the device."""
    covered_us: float
    """Part of it in which kernels ran."""
    waits: int
    """Calls by which the host waited for the device or for a whole stream."""


def traced(events: Iterable[_ProfilerEvent]) -> TraceSums:
    """Sum up the events of a profile."""
    copies: list[Span] = []
    kernels: list[Span] = []
    waits = 0
    for event in events:
        name, span = event.name, (event.time_range.start, event.time_range.end)
        if name in _WAITS:
            waits += 1
        elif "HtoD" in name:
            copies.append(span)
        elif str(event.device_type).endswith("CUDA") and not name.startswith(("Mem", "mem")):
            kernels.append(span)
    total = sum(end - begin for begin, end in copies)
    return TraceSums(total, covered(copies, kernels), waits)


def covered(spans: Sequence[Span], by: Sequence[Span]) -> float:
    """Return the length of the parts of `spans` that lie in the union of `by`."""
    union: list[list[float]] = []
    for begin, end in sorted(by):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    return sum(
        max(0.0, min(end, there[1]) - max(begin, there[0]))
        for begin, end in spans
        for there in union
    )
