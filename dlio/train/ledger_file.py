"""The lines of a trace (`--trace`), which is the ledger of a run, and their check.

Each line is a JSON object: the samples of one rank in one step of an epoch that are in the model.
Lines are in the order of (epoch, step, rank). `hash` chains the lines of an epoch, so that the hash
of its last line stands for all of them: it is the first 32 hexadecimal digits of

    SHA-256(hash of the line before in this epoch, or nothing + the line without `hash`)

where the line is compact JSON with sorted keys.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby, islice, pairwise
from typing import Any, Final, NotRequired, TypedDict, cast

import numpy as np

from dlio.errors import UsageError
from dlio.util.input_files import MOST_STATE, json_value, open_input

_DIGITS: Final = 32
_NUMBERS: Final = ("epoch", "step", "rank")
_OPTIONAL: Final = ("update", "ranks", "part", "start", "left_out")
_MOST_NUMBER: Final = 1 << 62
_MOST_MISSING: Final = 1000
"""Epochs, and steps in a row, without a line that are told one by one."""


class LedgerLine(TypedDict):
    """One line. `update`, `ranks` and `hash` are missing in files of earlier versions."""

    epoch: int
    """From 0."""
    step: int
    """Batch within the epoch, from 0."""
    rank: int
    """Number when the job began."""
    samples: list[int]
    update: NotRequired[int]
    """Optimizer step since the run began, from 0: several batches may be accumulated for one."""
    ranks: NotRequired[int]
    """Ranks that the batch was dealt to, also those that were lost before it counted."""
    part: NotRequired[int]
    """Times that all exchanges had been finished before it, in this epoch; missing for 0. Steps
    after the first time train on samples of lost ranks."""
    start: NotRequired[int]
    """Times that all ranks had begun again before it (`--nodes`); missing for 0. A rank may have
    been away before its first line of a start."""
    left_out: NotRequired[int]
    """Samples that the epoch does without (`--skip-samples`); missing if there are none."""
    lost: NotRequired[bool]
    """True for the lines of a rank that was lost before the end of the epoch."""
    hash: NotRequired[str]


def placed(line: LedgerLine, update: int, ranks: int, part: int, start: int) -> LedgerLine:
    """Return a line with its place in the run; see `LedgerLine` for the fields."""
    line["update"], line["ranks"] = update, ranks
    if part:
        line["part"] = part
    if start:
        line["start"] = start
    return line


@dataclass(frozen=True, slots=True)
class EpochCheck:
    """The result of checking the lines of one epoch."""

    epoch: int
    steps: int
    ranks: tuple[int, ...]
    """Ranks with a line."""
    samples: int
    """Samples of all lines."""
    left_out: int
    """Samples that the run left out on purpose."""
    lost: int
    """Samples that nobody trained on, but for those left out on purpose."""
    doubled: int
    """Times that a sample was trained on after the first."""
    lost_samples: tuple[int, ...]
    """Samples without a line, those left out on purpose included."""
    doubled_samples: Mapping[int, Sequence[tuple[int, int]]]
    """The (step, rank) of each line of a sample that has several."""
    problems: tuple[str, ...]
    """Lines that are missing, contradict each other, or were changed; one sentence each."""
    hash: str
    """Hash of the last line; empty if lines have none."""

    @property
    def exact(self) -> bool:
        """True if every sample that was to be trained on was, exactly once."""
        return not (self.lost or self.doubled or self.problems)


def line_hash(before: str, line: LedgerLine) -> str:
    """Return the hash of a line, by that of the line before in its epoch, empty for the first."""
    rest = {key: value for key, value in line.items() if key != "hash"}
    text = before + json.dumps(rest, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def read_lines(path: str) -> Iterator[LedgerLine]:
    """Yield the lines of a file. Raises UsageError if it cannot be read, or is not a trace."""
    try:
        with open_input(path) as file:
            for number in count(1):
                if not (text := file.readline(MOST_STATE)):
                    return
                yield _parsed(text, f"{path}, line {number}")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"{path} cannot be read: {reason}; give a file that `dlio train --trace` has written"
        ) from error


def check_ledger(
    lines: Iterable[LedgerLine], samples: int, epochs: int | None = None
) -> list[EpochCheck]:
    """Check that each epoch has every sample exactly once, steps without gaps, and its hashes.

    Needs the memory of one epoch's lines. There should be so many epochs, from 0 on; any for None.
    """
    checked: list[EpochCheck] = []
    done: set[int] = set()
    for epoch, rows in groupby(lines, lambda line: line["epoch"]):
        order = []
        if epoch in done or (done and epoch < max(done)):
            order.append(f"epoch {epoch} comes after epoch {max(done)}")
        if epochs is not None and epoch >= epochs:
            order.append(f"epoch {epoch} is one too many: there should be {epochs}")
        done.add(epoch)
        checked.append(_check_epoch(epoch, list(rows), samples, order))
    wanted = range(min(done, default=0), max(done, default=-1) + 1)
    if epochs is not None:
        wanted = range(epochs)
    missing = list(islice((epoch for epoch in wanted if epoch not in done), _MOST_MISSING + 1))
    if len(missing) > _MOST_MISSING:
        raise UsageError(
            f"no line of epoch {missing[0]}, nor of {_MOST_MISSING} others: the trace is damaged, "
            "or not of one run; give a file that `dlio train --trace` has written"
        )
    checked += [_check_epoch(each, [], samples, [f"epoch {each} has no line"]) for each in missing]
    return sorted(checked, key=lambda each: each.epoch)


def _parsed(text: bytes, where: str) -> LedgerLine:
    try:
        line: Any = json_value(text)
        numbers = [*(line[key] for key in _NUMBERS), *(line.get(key, 0) for key in _OPTIONAL)]
        good = all(type(each) is int and 0 <= each < _MOST_NUMBER for each in numbers)
        samples = line["samples"]
        good = good and type(samples) is list and type(line.get("hash", "")) is str
        good = good and all(type(each) is int for each in samples)
        good = good and -_MOST_NUMBER < min(samples, default=0) <= max(samples, default=0)
        good = good and max(samples, default=0) < _MOST_NUMBER
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise UsageError(
            f"{where}: not a line of a trace: give a file that `dlio train --trace` has written"
        )
    return cast(LedgerLine, line)


def _check_epoch(
    epoch: int, rows: Sequence[LedgerLine], samples: int, problems: list[str]
) -> EpochCheck:
    taken = np.fromiter(chain.from_iterable(row["samples"] for row in rows), np.int64)
    inside = taken[(taken >= 0) & (taken < samples)]
    if len(inside) < len(taken):
        wrong = sorted(set(taken.tolist()) - set(inside.tolist()))
        problems.append(f"sample {wrong[0]} is not one of {samples}")
    times = np.bincount(inside, minlength=samples)
    missing = np.flatnonzero(times == 0)
    left_out = rows[0].get("left_out", 0) if rows else 0
    if any(row.get("left_out", 0) != left_out for row in rows):
        problems.append("lines differ in the number of samples left out")
    several: dict[int, list[tuple[int, int]]] = {
        sample: [] for sample in np.flatnonzero(times > 1).tolist()
    }
    if several:
        for row in rows:
            for sample in row["samples"]:
                if sample in several:
                    several[sample].append((row["step"], row["rank"]))
    problems += _gaps(rows)
    problems += _wrong_hashes(rows)
    return EpochCheck(
        epoch=epoch,
        steps=len({row["step"] for row in rows}),
        ranks=tuple(sorted({row["rank"] for row in rows})),
        samples=len(taken),
        left_out=left_out,
        lost=max(0, len(missing) - left_out),
        doubled=int((times - 1).clip(min=0).sum()),
        lost_samples=tuple(missing.tolist()),
        doubled_samples=several,
        problems=tuple(problems),
        hash=rows[-1].get("hash", "") if rows else "",
    )


def _gaps(rows: Sequence[LedgerLine]) -> Iterator[str]:
    """Yield the steps that are missing, come twice or out of order, and wrong optimizer steps."""
    if not rows:
        return
    updates: defaultdict[int, set[int | None]] = defaultdict(set)
    of_rank: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        updates[row["step"]].add(row.get("update"))
        of_rank[row["rank"]].append((row["step"], row.get("start", 0)))
    # In an exchange whose ranks do not wait for each other, all ranks that were that far may have
    # been lost before a step of theirs counted, and a spare may have begun later.
    lasting = [(steps[0][0], steps[-1][0]) for steps in of_rank.values()]
    for one, other in pairwise([-1, *sorted(updates)]):
        if one >= 0 and not any(low <= one and other <= high for low, high in lasting):
            continue
        absent = range(one + 1, other)
        for step in absent[:_MOST_MISSING]:
            yield f"step {step} has no line"
        if more := absent[_MOST_MISSING:]:
            yield f"steps {more[0]} to {more[-1]} have no line"
    for rank, steps in sorted(of_rank.items()):
        for (one, start), (other, later) in pairwise(steps):
            if other == one:
                yield f"rank {rank} has two lines for step {one}"
            elif other < one:
                yield f"rank {rank} has step {other} after step {one}"
            elif other > one + 1 and start == later:
                yield f"rank {rank} has no line between step {one} and step {other}"
    before: int | None = None
    for step, numbers in sorted(updates.items()):
        update = next(iter(numbers))
        if len(numbers) > 1:
            yield f"step {step} belongs to several optimizer steps"
        elif update is not None and before is not None and update - before not in (0, 1):
            yield f"step {step} belongs to optimizer step {update}, that before to {before}"
        before = update


def _wrong_hashes(rows: Sequence[LedgerLine]) -> Iterator[str]:
    before = ""
    hashed = any("hash" in row for row in rows)
    for row in rows:
        stated = row.get("hash", "")
        if hashed and stated != line_hash(before, row):
            yield (
                f"the hash of step {row['step']}, rank {row['rank']} does not fit: this line was "
                "changed, or the one before it was changed or removed"
            )
        before = stated
