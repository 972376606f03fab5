"""A job of torchft for the bench: its command, and the arithmetic of the files that it writes."""

import glob
import json
import os
import statistics
import subprocess
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypedDict

import numpy as np
import torch
from torch.jit.frontend import FrontendError

from dlio.errors import UsageError
from dlio.train.ledger_file import LedgerLine
from dlio_bench.chaos.chaos_job import IMAGE_SIZE
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.scheduled_faults import InjectedFault
from dlio_bench.chaos.stamps import LossStamp, RankStamps, next_of_all, steps_of
from dlio_bench.chaos.torchft_program import TorchftSettings

_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torchft_program.py")
_VERSIONS: Final = (
    "import importlib.metadata as m, torchft; print(*(m.version(n) for n in ('torchft', 'torch')))"
)
_LOOK_S: Final = 120.0


def torchft_versions(python: str) -> dict[str, str]:
    """Return the versions of torchft and torch. Raises UsageError if an interpreter cannot import
    them."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _VERSIONS],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--torchft {python}: cannot be run: {error}") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UsageError(
            f"--torchft {python}: cannot import torchft ({reason[0]}): name the interpreter of an "
            "environment made by `pip install torchft torch`"
        )
    torchft, torch_ = done.stdout.split()
    return {"torchft": torchft, "torch": torch_}


def torchft_argv(
    options: ChaosOptions, source: str, folder: str, model: str, plain: bool = False
) -> list[str]:
    """Return the command of a job of torchft that stamps its steps into `folder`, which is made.

    Pictures are decoded once, as their middle, next to the job's folder; the model has the same
    shape as dlio's, and the same initial weights in all replica groups. A plain job trains by
    torch's DistributedDataParallel, without torchft.

    Raises UsageError for a model that cannot be scripted.
    """
    if options.torchft is None:
        raise UsageError("--torchft: name a Python interpreter")
    data = os.path.join(os.path.dirname(folder), "torchft-data")
    classes = _decode(source, data)
    os.makedirs(folder)
    settings: TorchftSettings = {
        "data": data,
        "model": os.path.join(folder, "model.pt"),
        "ranks": options.ranks,
        "batch_size": options.batch_size,
        "epochs": options.epochs,
        "pause_s": options.pause_ms / 1000,
        "heartbeat_ms": options.torchft_heartbeat_ms,
        "seed": options.seed,
        "bench": os.getpid(),
        "plain": plain,
    }
    _script(model, classes, options.seed, settings["model"])
    with open(os.path.join(folder, "settings.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)
    # -I: the folder of the program has modules of names that others may use.
    return [options.torchft, "-I", _PROGRAM, "supervise", folder]


def _decode(source: str, folder: str) -> int:
    """Write decoded pictures and labels, unless they are there; return the number of classes."""
    import dlio

    with dlio.open(source, tiers="none", image_size=IMAGE_SIZE, train=False) as dataset:
        classes = len(dataset.classes)
        if not os.path.isdir(folder):
            os.makedirs(folder)
            pictures = np.empty((len(dataset), 3, IMAGE_SIZE, IMAGE_SIZE), np.uint8)
            for sample in range(len(dataset)):
                pictures[sample] = dataset[sample][0]
            np.save(os.path.join(folder, "pictures.npy"), pictures)
            np.save(os.path.join(folder, "labels.npy"), np.asarray(dataset.targets, np.int64))
    return classes


def _script(text: str, classes: int, seed: int, path: str) -> None:
    """Write a model in a form that needs only torch. Raises UsageError if there is none."""
    from dlio.train.model import make_model

    torch.manual_seed(seed)
    model = make_model(text, classes, IMAGE_SIZE)
    with warnings.catch_warnings():
        # torch.export has no training mode whose batches may end with a smaller one.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        try:
            torch.jit.save(torch.jit.script(model), path)
        except (FrontendError, OSError, RuntimeError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"--model {text}: torch.jit.script cannot script it for --torchft: {reason}"
            ) from error


# Arithmetic of the files that `torchft_program` writes


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

    A quorum without them is newer than all that had a step before the fault. None if there is not
    one: the fault was not felt before the end.
    """
    before = [step for each in ranks for step in each.steps if step["t"] <= made.at]
    quorum = max(step["generation"] for step in before)
    return next_of_all(ranks, made.at, quorum + 1)


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
    nobody was left who had it, counts in the later quorum. Replica groups that were never away come
    to epochs beyond those of the job, in the place of others that were.
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
