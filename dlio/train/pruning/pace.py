"""When neurons are looked for, and how many may go: what the last rounds did decides.

A round is due when its window of statistics is full. One that succeeds lets the next one take
more; one that finds nothing makes the next one wait longer; one that hurts is undone, lets the next
one take less, and the groups that it was for are left alone for 1, 2, 4, ... rounds. What all of
them may cost is spent as early as it can be: the steps after it are cheaper, and make good.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

from dlio.errors import DlioError, UsageError
from dlio.train.pruning.removal import Limits

TOLERANCE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a user can set; nothing has to be. Raises UsageError for what is none."""

    tolerance: float = TOLERANCE
    """Points of held-out accuracy that pruning may cost."""
    every: int = 8
    """Steps from one look at neurons to the next."""
    looks: int = 6
    """Looks that fill a window, and so the least steps between rounds are `every * looks`."""
    begin: float = 0.02
    """Part of the training before the first round."""
    end: float = 0.65
    """Part of the training after which no round is: what is left makes good."""
    allowed: float = 40.0
    """By how much all rounds together may raise the probe's loss: so many times the tolerance, as a
    part of 1, of the loss that there was first. More than 1, as the steps that follow make good."""
    part: float = 0.25
    """Of what is allowed in all, that one round may take."""
    keep: float = 0.45
    """Of a group's neurons as it was made, that stay although the loss seems not to need them: what
    a network will learn with them shows only later. Halved whenever training's accuracy is above
    the held-out one by more than the tolerance, and what is allowed begins anew: a network that
    overfits has more than it needs."""
    share: float = 0.5
    """Of a group's neurons, that may go in the first round."""
    most: float = 0.5
    """Of a group's neurons, that may go in any round."""
    patience: int = 8
    """Windows that are waited at most between rounds."""

    def __post_init__(self) -> None:
        for name in ("tolerance", "allowed"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"Schedule({name}={getattr(self, name)}): choose 0 or more")
        for name in ("every", "looks", "patience"):
            if getattr(self, name) < 1:
                raise UsageError(f"Schedule({name}={getattr(self, name)}): choose 1 or more")
        if not 0 <= self.begin <= self.end <= 1:
            raise UsageError(
                f"Schedule(begin={self.begin}, end={self.end}): choose parts of the training, 0 to "
                "1, the first one not above the second"
            )
        for name in ("keep", "share", "most", "part"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"Schedule({name}={getattr(self, name)}): choose a part, to 1")

    @property
    def window(self) -> int:
        """Steps."""
        return self.every * self.looks


@dataclass(slots=True)
class Pace:
    """Where a schedule is; the same on all ranks, as it is told the same."""

    schedule: Schedule
    steps: int | None
    """Of the whole training; None where nobody knows, and no round is the last."""
    next_step: int = 0
    """After which a round is due."""
    rounds: int = 0
    boldness: float = 1.0
    keep: float = 0.0
    """Of the groups' neurons as they were made; the schedule's at first."""
    waits: int = 1
    """Windows to the next round."""
    first_loss: float | None = None
    """Of the first probe."""
    spent: float = 0.0
    """By how much rounds have raised the probe's loss."""
    best: float | None = None
    """Held-out accuracy."""
    fell: int = 0
    """How often in a row it was below the best by more than the tolerance."""
    stopped: str = ""
    """Why there are no more rounds."""
    fails: dict[str, int] = field(default_factory=dict)
    """By group, how often in a row it hurt."""
    until: dict[str, int] = field(default_factory=dict)
    """By group, the round before which it is left alone."""

    def __post_init__(self) -> None:
        self.keep = self.keep or self.schedule.keep
        begin = int(self.schedule.begin * (self.steps or 0))
        self.next_step = self.next_step or max(begin, self.schedule.window)

    @property
    def last_step(self) -> float:
        """After which there is no round."""
        return float("inf") if self.steps is None else self.schedule.end * self.steps

    def over(self, step: int) -> bool:
        """Whether there is no round after `step` any more."""
        return bool(self.stopped) or step >= self.last_step or self.next_step > self.last_step

    def due(self, step: int) -> bool:
        """Whether a round is to be after step number `step`, counted from 1."""
        return not self.stopped and self.next_step <= step <= self.last_step

    def allowed(self, loss: float) -> float:
        """By how much a round may raise the loss, which is `loss` before it."""
        if self.first_loss is None:
            self.first_loss = loss
        schedule = self.schedule
        total = schedule.allowed * schedule.tolerance / 100 * abs(self.first_loss)
        return max(0.0, min(schedule.part * total, total - self.spent))

    def limits(self, base: Limits, allowed: float | None) -> Limits:
        """Of the round that is due.

        Args:
            allowed: what the probe's loss may rise by; without one, what is known by computation
                alone may go, within `base` and never more boldly.
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
        """Some neurons went.

        Args:
            easily: whether it cost less than half of what was allowed.
            gently: whether it was less than was planned first, as that hurt.
            rise: of the probe's loss.
        """
        self.spent += max(0.0, rise)
        for name in taken:
            self.fails.pop(name, None)
        self.waits = 1
        if gently:
            self.boldness = max(self.boldness / 2, 1e-3)
        elif easily:
            self.boldness = min(2 * self.boldness, 1e6)
        self._next(step)

    def hurt(self, names: Iterable[str]) -> None:
        """These groups' removals were undone, all of a round's or some; before `succeeded` or
        `nothing`."""
        for name in names:
            self.fails[name] = fails = self.fails.get(name, 0) + 1
            self.until[name] = self.rounds + 1 + 2 ** min(fails - 1, 10)

    def nothing(self, step: int, hurt: bool) -> None:
        """Nothing went: it hurt, or there was nothing to take."""
        self.boldness *= 0.25 if hurt else 2.0
        self.boldness = min(max(self.boldness, 1e-3), 1e6)
        if not hurt:
            self.waits = min(2 * self.waits, self.schedule.patience)
        self._next(step)

    def held_out(self, accuracy: float, step: int, training: float | None = None) -> None:
        """The accuracy on held-out data, a part of 1, at an epoch's end, and the epoch's own on
        training data."""
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

    def anew(self, step: int) -> None:
        """A window begins, after some time in which nobody looked."""
        self.next_step = max(self.next_step, step + self.schedule.window)

    def rested(self, step: int) -> None:
        """All groups were to be left alone."""
        self._next(step)

    def skipped(self, step: int) -> None:
        """The round could not be: it is tried again after the next look."""
        self.next_step = step + self.schedule.every

    def _next(self, step: int) -> None:
        self.rounds += 1
        self.next_step = step + self.waits * self.schedule.window

    def to_json(self) -> dict[str, Any]:
        """All but the schedule and the training's length, which the next run is given anew."""
        told = asdict(self)
        return {name: value for name, value in told.items() if name not in ("schedule", "steps")}

    @classmethod
    def from_json(cls, schedule: Schedule, steps: int | None, data: dict[str, Any]) -> Self:
        """Raises DlioError for what to_json did not write."""
        try:
            return cls(schedule, steps, **data)
        except TypeError as error:
            raise DlioError(f"not the state of a pruning schedule: {error}") from error
