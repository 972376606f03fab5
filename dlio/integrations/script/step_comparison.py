"""Comparison of the first steps of one process with those of ranks, and likely causes.

Pure: it reads records and prints nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dlio.integrations.script.step_records import Array, ScriptRecord

BOUND: Final = 1e-3
"""Relative difference up to which values count as the same: float32 sums in another order differ by
about 1e-6, and more from step to step."""
_HALF_BOUND: Final = 5e-2
"""The same where values of 16 bits take part."""
_ALIKE: Final = 0.05
"""Share of a gradient by which it may differ from a multiple of another."""
_SMALL: Final = 1e-5
"""Share of the norm of all gradients below which a difference is rounding."""
_NUMBER: Final = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")
_TIMES: Final = re.compile(
    r"(?i)\d+:\d\d(:\d\d)?|[\d.]+ ?(?:s|ms|us|sec|secs|seconds|it/s|img/s|samples/s|/s)\b"
    r"|\b(?:time|elapsed|took|eta|duration|speed|throughput|ms|secs?|seconds)\b[/\w]*[ :=]*[\d.]+"
    r"(?: *\( *[\d.]+\))?"
    # Paths of the scratch folders, and digests of paths.
    r"|[\w/.-]*/dlio-check-\w+/(?:one|ranks)\b"
    r"|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b"
)


@dataclass(slots=True)
class Comparison:
    """The result: nothing in `lines` if all is the same."""

    bound: float = BOUND
    largest: float = 0.0
    """Largest difference of gradients, as a part of the norm of one process's."""
    lines: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


def compare(one: ScriptRecord, ranks: Sequence[ScriptRecord], exchange: str) -> Comparison:
    """Compare the record of one process with those of all ranks; without ranks, nothing.

    Each kind of value is named once, at the first step at which it differs.
    """
    traits = {trait for each in (one, *ranks) for trait in each.traits}
    result = Comparison(_HALF_BOUND if "half" in traits else BOUND)
    if ranks:
        _Comparer(one, ranks, traits, exchange, result).run()
    return result


class _Comparer:
    """A comparison under way."""

    def __init__(
        self,
        one: ScriptRecord,
        ranks: Sequence[ScriptRecord],
        traits: set[str],
        exchange: str,
        result: Comparison,
    ) -> None:
        self._one, self._ranks, self._traits = one, ranks, traits
        self._exchange, self._result = exchange, result
        self._starts: dict[str, Array] = {}
        self._noise: dict[str, bool] = {}
        """True for parameters whose gradients have been rounding alone so far."""
        self._kinds: dict[str, int] = {}
        """First step at which each kind differs, from 1."""
        self._factor: float | None = None
        """Ratio of the ranks' gradients to one process's where they first differ, if there is."""
        self._apart: str | None = None
        """Parameter by which the ranks' weights first differ from each other."""

    def run(self) -> None:
        counts = [len(each.steps) for each in (self._one, *self._ranks)]
        for step in range(min(counts)):
            self._losses(step)
            self._rates(step)
            self._arrays(step)
        if not min(counts):
            # A script that changes its weights itself.
            self._losses_between(0, min(len(each.losses) for each in (self._one, *self._ranks)), 0)
        ended = all(each.complete for each in (self._one, *self._ranks))
        if len(set(counts)) > 1 and ended:
            several = ", ".join(map(str, counts[1:]))
            self._say("steps", min(counts), f"one process makes {counts[0]}, the ranks {several}")
        if ended:
            self._printed()
        if self._result.lines:
            self._result.causes = list(dict.fromkeys(self._causes()))

    def _say(self, kind: str, step: int, text: str) -> None:
        if kind not in self._kinds:
            self._kinds[kind] = step + 1
            self._result.lines.append(f"{kind} differ at step {step + 1}: {text}")

    def _losses(self, step: int) -> None:
        """Compare the means over all ranks of the values passed to backward before a step."""
        first = self._one.steps[step - 1].losses if step else 0
        self._losses_between(first, self._one.steps[step].losses, step)

    def _losses_between(self, first: int, end: int, step: int) -> None:
        for place in range(first, end):
            if any(place >= len(each.losses) for each in self._ranks):
                return
            alone, parts = self._one.losses[place], [each.losses[place] for each in self._ranks]
            weights = [each.weights[place] for each in self._ranks]
            values = [value for value in parts if value is not None]
            if alone is None or len(values) < len(parts) or not sum(weights):
                continue
            mean = float(np.average(values, weights=weights))
            if not _close(alone, mean, self._result.bound):
                name = f"backward {place + 1}: " if end > 1 else ""
                self._say(
                    "losses",
                    step,
                    f"{name}one process has {alone:.6g}, the mean of the ranks is {mean:.6g}",
                )

    def _rates(self, step: int) -> None:
        alone = self._one.steps[step].rates
        for each in self._ranks:
            rates = each.steps[step].rates
            same = len(rates) == len(alone)
            if not same or not all(_close(a, b, 1e-6) for a, b in zip(alone, rates, strict=True)):
                text = f"one process has {_list(alone)}, rank {each.rank} {_list(rates)}"
                self._say("learning rates", step, text)

    def _arrays(self, step: int) -> None:
        alone, first = self._one.arrays(step), self._ranks[0].arrays(step)
        starts = {key.removeprefix("start/"): v for key, v in alone.items() if "start/" in key}
        self._starts |= starts
        self._gradients(step, alone, first)
        keys = [key.removeprefix("weight/") for key in alone if key.startswith("weight/")]
        total = _norm_of([alone[f"weight/{key}"] - self._starts[key] for key in keys])
        for other in self._ranks[1:]:
            arrays = other.arrays(step)
            worst = self._worst(step, keys, first, arrays, total)
            if worst is not None:
                name, size = worst
                self._apart = self._apart or name
                self._say(
                    "the ranks' weights",
                    step,
                    f"{name} of rank {other.rank} is {size:.2g} from rank 0's",
                )
        worst = self._worst(step, keys, alone, first, total)
        if worst is not None:
            self._say("weights", step, f"{worst[0]} by {worst[1]:.2g}")

    def _gradients(self, step: int, alone: dict[str, Array], ranks: dict[str, Array]) -> None:
        keys = [key for key in {**alone, **ranks} if key.startswith("gradient/")]
        total = _norm_of([alone[key] for key in keys if key in alone])
        worst, size, ratio = None, 0.0, None
        for key in keys:
            name = self._name(key.removeprefix("gradient/"))
            if key not in alone or key not in ranks or alone[key].shape != ranks[key].shape:
                has = "one process" if key in alone else "the ranks"
                self._say("gradients", step, f"{name} has one of this shape in {has} alone")
                continue
            own = float(np.linalg.norm(alone[key]))
            apart = float(np.linalg.norm(alone[key] - ranks[key]))
            quiet = own <= _SMALL * total
            short = key.removeprefix("gradient/")
            self._noise[short] = quiet and self._noise.get(short, True)
            if total and np.isfinite(apart):
                self._result.largest = max(self._result.largest, apart / total)
            wrong = apart > self._result.bound * own + _SMALL * total
            wrong = wrong or np.isfinite(own) != np.isfinite(apart)
            if wrong and (worst is None or not apart <= size):
                worst, size = name, apart
                ratio = _factor(alone[key], ranks[key])
                part = f"{apart / own:.2g} of its norm" if own else f"{apart:.2g} from 0"
        if worst is not None:
            if "gradients" not in self._kinds:
                self._factor = ratio
            self._say("gradients", step, f"{worst} by {part}")

    def _worst(
        self,
        step: int,
        keys: Sequence[str],
        first: dict[str, Array],
        second: dict[str, Array],
        total: float,
    ) -> tuple[str, float] | None:
        """Return the parameter whose weights differ most beyond the bound, and by how much."""
        worst: tuple[str, float] | None = None
        for key in keys:
            if f"weight/{key}" not in first or f"weight/{key}" not in second:
                return f"{self._name(key)} (missing)", np.inf
            a, b = first[f"weight/{key}"], second[f"weight/{key}"]
            if self._noise.get(key, False) or a.shape != b.shape:
                continue
            apart = float(np.linalg.norm(a - b))
            moved = float(np.linalg.norm(a - self._starts[key])) if key in self._starts else 0.0
            # Adam's steps are as large where a gradient is nearly 0 as elsewhere.
            allowed = 10 * self._result.bound * moved + _SMALL * total + 1e-6 * np.linalg.norm(a)
            if not apart <= allowed and (worst is None or apart > worst[1]):
                worst = self._name(key), apart
        return worst

    def _name(self, key: str) -> str:
        return self._one.names.get(key, f"parameter {key}")

    def _printed(self) -> None:
        one, ranks = (_lines(each.printed) for each in (self._one, self._ranks[0]))
        for number, (a, b) in enumerate(zip(one, ranks, strict=False)):
            if not _same_line(a, b, self._result.bound):
                lines = f'line {number + 1}: one process "{a}", the ranks "{b}"'
                self._result.lines.append(f"printed lines differ: {lines}")
                self._kinds["printed"] = 0
                return
        if len(one) != len(ranks):
            self._result.lines.append(
                f"printed lines differ: one process prints {len(one)}, the ranks {len(ranks)}"
            )
            self._kinds["printed"] = 0

    def _causes(self) -> Iterator[str]:
        kinds, size = self._kinds, len(self._ranks)
        if self._exchange.partition("+")[0] not in ("allreduce", "hierarchical", "tree", "ps"):
            yield f"--exchange {self._exchange} does not take one process's steps"
            return
        if self._rates_differ():
            yield (
                "a scheduler or the script sets each rank's learning rate by that rank's own "
                "loss or metric: average it over the ranks first"
            )
            return
        if "steps" in kinds:
            yield (
                "ranks or loaders end differently: the script stops, skips or counts batches by a "
                "value of its own rank"
            )
        if self._apart is not None:
            yield (
                f"{self._apart} is not exchanged: it was frozen or unknown when the optimizer was "
                "made, or its gradient or value is set by the script and not by backward"
            )
            return
        if "gradients" in kinds or "losses" in kinds:
            yield from self._of_gradients(size)
        elif set(kinds) == {"printed"}:
            yield (
                "printed values are computed from rank 0's part of the batches; those of "
                "evaluation (`model.eval()`, `torch.no_grad()`) come from all samples"
            )

    def _of_gradients(self, size: int) -> Iterator[str]:
        factor = self._factor
        if factor is not None and any(_close(factor, x, _ALIKE) for x in (size, 1 / size)):
            yield (
                'the loss is a sum over samples (reduction="sum"), not a mean: the ranks\' '
                f"gradient is {factor:.3g} times that of one process"
            )
            return
        if "dropout" in self._traits:
            yield (
                "dropout drops other units on each rank than in one process; to check the rest, "
                "set its rate to 0"
            )
        elif self._randoms_differ():
            yield (
                "the step draws random numbers (torch.randn, noise, sampling): ranks draw others "
                "than one process"
            )
        if "batch norm" in self._traits:
            yield (
                "batch norm takes the statistics of each rank's part of a batch; to check the "
                "rest, use a group norm or eval() there"
            )
        if not {"dropout", "batch norm"} & self._traits:
            yield (
                "the loss is not a mean over the samples of one batch, such as a mean over tokens "
                "or pairs, or a loss that compares samples with each other; or the data set draws "
                "random numbers, such as for crops, of which ranks have others"
            )

    def _rates_differ(self) -> bool:
        """True if the ranks have other learning rates than each other."""
        rates = [[step.rates for step in each.steps] for each in self._ranks]
        return any(a != b for other in rates[1:] for a, b in zip(rates[0], other, strict=False))

    def _randoms_differ(self) -> bool:
        pairs = zip(self._one.steps, self._ranks[0].steps, strict=False)
        return any(a.randoms != b.randoms for a, b in pairs)


def _factor(one: Array, other: Array) -> float | None:
    """Return the factor from one array to another of the same direction; None of another one."""
    sizes, product = _norm_of([one]) * _norm_of([other]), float(one @ other)
    return product / float(one @ one) if sizes and product > 0.99 * sizes else None


def _close(a: float, b: float, bound: float) -> bool:
    return bool(np.isclose(a, b, rtol=bound, atol=1e-7, equal_nan=True))


def _norm_of(arrays: Sequence[Array]) -> float:
    return float(np.sqrt(sum(float(np.square(each).sum()) for each in arrays)))


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _lines(text: str) -> list[str]:
    return [line.rpartition("\r")[2].rstrip() for line in text.splitlines() if line.strip()]


def _same_line(a: str, b: str, bound: float) -> bool:
    """True if two lines are alike but for rounding and times."""
    a, b = _TIMES.sub("", a), _TIMES.sub("", b)
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    return all(_same_number(x, y, bound) for x, y in pairs)


def _same_number(a: str, b: str, bound: float) -> bool:
    decimals = len(a.lower().partition("e")[0].partition(".")[2])
    last = 10.0**-decimals if "." in a and "e" not in a.lower() else 0.0
    x, y = float(a), float(b)
    return abs(x - y) <= 10 * bound * max(abs(x), abs(y)) * bool("." in a) + 1.5 * last
