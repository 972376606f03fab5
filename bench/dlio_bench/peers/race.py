"""Passes of all contenders in turn, with the labels of each pass compared with the data's."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlio.errors import UsageError
from dlio_bench.peers.process import ContenderFigures, ContenderProcess
from dlio_bench.peers.standalone.runners.protocol import checksum
from dlio_bench.results.repeats import turns


@dataclass(slots=True)
class RaceOutcome:
    """Figures by contender."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    """Samples a second of each repeat."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Seconds on processors for each sample, of each timed pass and the one before it."""
    first: dict[str, list[float]] = field(default_factory=dict)
    """Seconds to the first batch of each timed pass."""
    cold: dict[str, float] = field(default_factory=dict)
    """Seconds to the first batch of the first pass of all."""
    footprint: dict[str, dict[str, float]] = field(default_factory=dict)
    output: dict[str, str | None] = field(default_factory=dict)
    """Type and layout of batches."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of libraries, by distribution."""
    absent: dict[str, str] = field(default_factory=dict)
    """Reasons why contenders did not take part, or not until the end."""


def race(
    starts: Mapping[str, Callable[[], ContenderProcess]],
    labels: Sequence[int],
    repeats: int,
    progress: Callable[[str], object] = lambda _: None,
) -> RaceOutcome:
    """Have contenders load the same pictures, each `repeats` times, in turn.

    Within each repeat every contender makes a pass that is not timed and one that is; the order is
    turned round from one repeat to the next. Whoever fails is left out, with the reason, and its
    figures are dropped.

    Args:
        starts: how to start each contender.
        labels: classes of the pictures. A contender that gives others in a pass has failed.
        progress: called before a contender prepares its data and before each timed pass, with a
            note; 1 + repeats times for each contender that does not fail.
    """
    outcome = RaceOutcome()
    expected = checksum(labels)

    def passes(contender: ContenderProcess, count: int) -> ContenderFigures:
        figures = contender.make_passes(count)
        if set(figures.labels) != {expected}:
            raise UsageError(
                f"{contender.name} gave other labels than the data has, in a pass of "
                f"{figures.samples} samples of {len(labels)}"
            )
        outcome.output[contender.name] = figures.output
        contender.pause()
        return figures

    with contextlib.ExitStack() as stack:
        running: dict[str, ContenderProcess] = {}

        def leave(name: str, error: UsageError) -> None:
            outcome.absent[name] = str(error)
            for figures in (
                *(outcome.rates, outcome.cpu, outcome.first),
                *(outcome.cold, outcome.output),
            ):
                figures.pop(name, None)
            if (gone := running.pop(name, None)) is not None:
                gone.close()

        def end() -> None:
            for contender in running.values():
                contender.close()

        stack.callback(end)
        for name, start in starts.items():
            progress(f"{name}: preparing")
            try:
                running[name] = start()
                outcome.versions.update(running[name].get_ready())
                outcome.cold[name] = passes(running[name], 1).first_batch_s
            except UsageError as error:
                leave(name, error)
        for repeat, name in turns(running, repeats):
            if name not in running:
                continue
            progress(f"{name}: pass {repeat + 1} of {repeats}")
            try:
                # The first is not timed: its memory may have been taken away meanwhile.
                timed = passes(running[name], 2)
            except UsageError as error:
                leave(name, error)
                continue
            outcome.rates.setdefault(name, []).append(timed.samples / timed.seconds)
            outcome.cpu.setdefault(name, []).append(timed.cpu_s / (2 * timed.samples))
            outcome.first.setdefault(name, []).append(timed.first_batch_s)
        for name, contender in running.items():
            outcome.footprint[name] = contender.footprint()
    return outcome
