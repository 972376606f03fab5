"""Decide when pruning rounds happen and how much each may remove, from the last rounds' results.

A round is due when its window of statistics is full. After a success the next round may remove
more. After a round without candidates the next one waits longer. A round that raises the loss too
much is not carried out: the next one removes less, and the affected groups are left alone for 1, 2,
4, ... rounds. The total allowed rise of the loss is spent as early as possible, because later steps
are then cheaper and recover the accuracy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self, cast

from dlio.errors import DlioError, UsageError
from dlio.features.pruning.removal_plan import Limits, check_least

TOLERANCE: Final = 0.5
"""Percentage points of held-out accuracy that pruning may cost by default."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """User settings of when and how much to prune. Raises UsageError for values out of range."""

    tolerance: float = TOLERANCE
    """Percentage points of held-out accuracy that pruning may cost."""
    every: int = 8
    """Steps between two samplings of the statistics."""
    looks: int = 6
    """Samplings per window. Rounds are at least `every * looks` steps apart."""
    begin: float = 0.02
    """Fraction of the training before the first round."""
    end: float = 0.65
    """Fraction of the training after which rounds end, so that the rest can recover accuracy."""
    allowed: float = 40.0
    """Total allowed rise of the probe's loss over all rounds, in units of tolerance / 100 times the
    first loss. Well above 1, because the steps after a round recover most of the rise."""
    part: float = 0.25
    """Fraction of the total allowed rise that one round may use."""
    keep: float = 0.45
    """Fraction of each original group that is safe from removal as unneeded: a neuron may prove
    useful only later. When training accuracy exceeds held-out accuracy by more than the tolerance,
    the network overfits; this fraction is then halved, and the spent rise is reset to 0."""
    share: float = 0.5
    """Fraction of a group's neurons that the first round may remove."""
    most: float = 0.5
    """Fraction of a group's neurons that any round may remove."""
    patience: int = 8
    """Longest wait between rounds, in windows."""
    target: float | None = None
    """Fraction of the parameters to keep. The first round then removes all others, those that the
    loss needs least, whatever that does to the loss, and is the only one; `tolerance` and the
    settings of loss and shares have no effect. None to remove as much as the loss allows."""

    def __post_init__(self) -> None:
        check_least(self, 0, "tolerance", "allowed")
        check_least(self, 1, "every", "looks", "patience")
        if not 0 <= self.begin <= self.end <= 1:
            raise UsageError(
                f"Schedule(begin={self.begin}, end={self.end}): choose fractions of the training "
                "with 0 <= begin <= end <= 1"
            )
        for name in ("keep", "share", "most", "part", "target"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"Schedule({name}={value}): choose a fraction above 0, up to 1")

    @property
    def window(self) -> int:
        """Steps per window of statistics."""
        return self.every * self.looks


@dataclass(slots=True)
class PruningPace:
    """Progress along a schedule. All ranks make the same calls and so hold the same state."""

    schedule: Schedule
    steps: int | None
    """Steps of the whole training; None if unknown, in which case rounds never end."""
    next_step: int = 0
    """Step after which the next round is due."""
    rounds: int = 0
    """Rounds so far."""
    boldness: float = 1.0
    """Factor on the amounts that a round may remove; adapted to the last rounds' results."""
    keep: float = 0.0
    """Fraction of each original group that is safe; starts at the schedule's."""
    waits: int = 1
    """Windows until the next round."""
    first_loss: float | None = None
    """Loss of the first probe."""
    spent: float = 0.0
    """Total rise of the probe's loss by rounds so far."""
    best: float | None = None
    """Best held-out accuracy so far."""
    fell: int = 0
    """Consecutive held-out accuracies that were below the best by more than the tolerance."""
    stopped: str = ""
    """Reason why there are no more rounds; empty while there may be."""
    fails: dict[str, int] = field(default_factory=dict)
    """Consecutive failures by group."""
    until: dict[str, int] = field(default_factory=dict)
    """Round before which a group is left alone, by group."""

    def __post_init__(self) -> None:
        self.keep = self.keep or self.schedule.keep
        begin = int(self.schedule.begin * (self.steps or 0))
        self.next_step = self.next_step or max(begin, self.schedule.window)

    @property
    def last_step(self) -> float:
        """Last step after which a round may follow."""
        return float("inf") if self.steps is None else self.schedule.end * self.steps

    def over(self, step: int) -> bool:
        """True if no round will follow `step`."""
        return bool(self.stopped) or step >= self.last_step or self.next_step > self.last_step

    def due(self, step: int) -> bool:
        """True if a round follows step number `step`, counted from 1."""
        return not self.stopped and self.next_step <= step <= self.last_step

    def allowed(self, loss: float) -> float:
        """Allowed rise of the probe's loss in this round, given the `loss` before it."""
        if self.first_loss is None:
            self.first_loss = loss
        schedule = self.schedule
        total = schedule.allowed * schedule.tolerance / 100 * abs(self.first_loss)
        return max(0.0, min(schedule.part * total, total - self.spent))

    def limits(self, base: Limits, allowed: float | None) -> Limits:
        """Return the limits of the round that is due, of which `share` never exceeds `base`.

        `allowed` is the allowed rise of the probe's loss; without a probe it is None, and no limit
        grows beyond `base`.
        """
        alone = {name for name, until in self.until.items() if self.rounds < until}
        boldness = self.boldness if allowed is not None else min(1.0, self.boldness)
        share = min(self.schedule.most, self.schedule.share * boldness, base.share)
        loss = boldness * (base.loss if allowed is None else allowed)
        return replace(base, loss=loss, share=share, frozen=base.frozen | frozenset(alone))

    def succeeded(
        self,
        step: int,
        taken: Iterable[str],
        easily: bool,
        gently: bool = False,
        rise: float = 0.0,
    ) -> None:
        """Record a round that cut the groups `taken` after a step, and the rise of the probe's
        loss.

        `easily`: it used less than half of the allowed rise. `gently`: it removed less than the
        first plan, which had failed.
        """
        self.spent += max(0.0, rise)
        for name in taken:
            self.fails.pop(name, None)
        self.waits = 1
        if gently:
            self.boldness = max(self.boldness / 2, 1e-3)
        elif easily:
            self.boldness = min(2 * self.boldness, 1e6)
        self.next_round(step)

    def hurt(self, names: Iterable[str]) -> None:
        """Record groups whose removals failed; call before `succeeded` or `nothing`."""
        for name in names:
            self.fails[name] = fails = self.fails.get(name, 0) + 1
            self.until[name] = self.rounds + 1 + 2 ** min(fails - 1, 10)

    def nothing(self, step: int, hurt: bool) -> None:
        """Record a round that removed nothing, because it failed (`hurt`) or had no candidates."""
        self.boldness *= 0.25 if hurt else 2.0
        self.boldness = min(max(self.boldness, 1e-3), 1e6)
        if not hurt:
            self.waits = min(2 * self.waits, self.schedule.patience)
        self.next_round(step)

    def held_out(self, accuracy: float, step: int, training: float | None = None) -> None:
        """Record accuracies, as fractions of 1, on held-out and on training data."""
        if training is not None and training > accuracy + self.schedule.tolerance / 100:
            self.keep, self.spent, self.waits = self.keep / 2, 0.0, 1
            self.boldness = max(1.0, self.boldness)
            self.next_step = min(self.next_step, step + self.schedule.window)
        if self.best is not None and accuracy < self.best - self.schedule.tolerance / 100:
            self.fell += 1
            self.boldness /= 4
            self.waits = min(4 * self.waits, self.schedule.patience)
            self.next_step = max(self.next_step, step + self.waits * self.schedule.window)
            if self.fell > 1:
                self.stopped = "held-out accuracy fell twice in a row"
        else:
            self.fell = 0
        self.best = accuracy if self.best is None else max(self.best, accuracy)

    def restart(self, step: int) -> None:
        """Begin a new window after a pause of the statistics."""
        self.next_step = max(self.next_step, step + self.schedule.window)

    def skipped(self, step: int) -> None:
        """Record that the round had no loss to compare with; it is due again after `every`."""
        self.next_step = step + self.schedule.every

    def next_round(self, step: int) -> None:
        """Count a round; the next one is due when the windows to wait for are full."""
        self.rounds += 1
        self.next_step = step + self.waits * self.schedule.window

    def to_json(self) -> dict[str, object]:
        """Convert to JSON types, without the schedule and the number of steps."""
        state = asdict(self)
        return {name: value for name, value in state.items() if name not in ("schedule", "steps")}

    @classmethod
    def from_json(cls, schedule: Schedule, steps: int | None, record: Mapping[str, object]) -> Self:
        """Rebuild the state that `to_json` converted. Raises DlioError for any other record."""
        try:
            return cls(schedule, steps, **cast(dict[str, Any], record))
        except TypeError as error:
            raise DlioError(f"not the state of a pruning schedule: {error}") from error
