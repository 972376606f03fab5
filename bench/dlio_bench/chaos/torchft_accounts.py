"""Arithmetic of a job of torchft, from the files that `torchft_program` writes."""

import glob
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

from dlio.train.ledger_file import LedgerLine
from dlio_bench.chaos.scheduled_faults import InjectedFault
from dlio_bench.chaos.stamps import LossStamp, RankStamps, steps_of


class ComputedBatch(TypedDict):
    """A batch whose gradients a replica group has computed."""

    epoch: int
    batch: int
    samples: list[int]
    step: int
    """Step of the sum, from 1."""
    quorum: int
    sums: bool
    """False if zeros were added in the place of its gradients."""


@dataclass(frozen=True, slots=True)
class LedgerAccount:
    """A ledger, and the samples of which it has no line."""

    lines: list[LedgerLine]
    """One for each epoch."""
    dropped: int
    """Samples of batches that were computed and are not in the model. All others that are lost were
    never computed: their replica group was away, and did not come to them before the end."""
    beyond: int
    """Samples that are in the model in epochs after the last one."""


def next_quorum_step(ranks: Sequence[RankStamps], made: InjectedFault) -> float | None:
    """Return when all that were left had committed their first step without the ranks of a fault.

    A quorum without them is newer than all that had a step before the fault. Replica groups that
    join later are not waited for. None if there is not one: the fault was not felt before the end.
    """
    before = [each for each in ranks if each.steps and each.steps[0]["t"] <= made.at]
    quorum = max(
        step["generation"] for each in before for step in each.steps if step["t"] <= made.at
    )
    firsts = [
        next((step["t"] for step in each.steps if step["generation"] > quorum), None)
        for each in before
    ]
    return max((first for first in firsts if first is not None), default=None)


def joins(ranks: Sequence[RankStamps]) -> list[tuple[RankStamps, LossStamp]]:
    """Return the replica groups that joined a job that made steps, each with its join.

    The others were held for as long as the step in which it joined was longer than the median one.
    """
    steps = steps_of(ranks)
    if not steps:
        return []
    ends = {step.number: step.at for step in steps}
    usual = statistics.median([after.at - before.at for before, after in pairwise(steps)] or [0.0])
    joined = []
    for each in ranks:
        if not each.steps or each.begun <= steps[0].at:
            continue
        first = each.steps[0]
        took = first["t"] - ends.get(first["step"] - 1, first["t"])
        loss: LossStamp = {
            "t": first["t"],
            "change": "joined",
            "ranks": [each.rank],
            "generation": first["generation"],
            "seconds": max(0.0, took - usual),
            "renew_s": 0.0,
            "settle_s": 0.0,
            "samples_again": 0,
        }
        joined.append((each, loss))
    return joined


def read_batches(folder: str) -> list[tuple[int, ComputedBatch]]:
    """Return the batches of all replica groups in the folder of a job, each with its group."""
    batches = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "batches-*.jsonl"))):
        rank = int(os.path.basename(path).split("-")[1])
        with open(path, encoding="utf-8") as file:
            batches += [(rank, json.loads(line)) for line in file]
    return batches


def account(
    batches: Iterable[tuple[int, ComputedBatch]], ranks: Sequence[RankStamps], epochs: int
) -> LedgerAccount:
    """Return the ledger of a job, of the batches that are in the model.

    A batch is in the model if its step was committed in its quorum, by any replica group: also if
    its own one was killed between the sum and its own commit. A step that was committed twice, as
    nobody was left who had it, counts in the later quorum.

    Args:
        epochs: epochs of the job; replica groups that were never away come to later ones, in the
            place of others that were.
    """
    quorum_of: dict[int, int] = {}
    for each in ranks:
        for step in each.steps:
            quorum_of[step["step"]] = max(step["generation"], quorum_of.get(step["step"], -1))
    samples: dict[int, list[int]] = {}
    tried: dict[int, set[int]] = {}
    beyond = 0
    for _, batch in batches:
        counts = batch["sums"] and quorum_of.get(batch["step"]) == batch["quorum"]
        if batch["epoch"] >= epochs:
            beyond += counts * len(batch["samples"])
            continue
        tried.setdefault(batch["epoch"], set()).update(batch["samples"])
        if counts:
            samples.setdefault(batch["epoch"], []).extend(batch["samples"])
    dropped = sum(len(each.difference(samples.get(epoch, ()))) for epoch, each in tried.items())
    lines: list[LedgerLine] = [
        {"epoch": epoch, "step": 0, "rank": 0, "samples": samples.get(epoch, [])}
        for epoch in range(epochs)
    ]
    return LedgerAccount(lines, dropped, beyond)
