"""A contender's side of `dlio bench loader`: requests on standard input, answers on a pipe.

    request                          answer
    {"task": FILE}                   {"ready": true, "versions": {NAME: VERSION}}
    {"passes": NUMBER}               {"samples", "seconds", "first_batch_s", "labels", "output",
                                      "values"}

`FILE` holds a `Task` as JSON. Figures are those of the last pass. `labels` has a checksum of the
multiset of labels of each pass, `output` describes the batches. `values` has the `weight` of each
pass over rows that was not timed. An answer `{"error": TEXT}` is the last one. Every answer is one
line that starts with `MARK`; the pipe is the standard output that the process was started with, and
all that libraries print goes to standard error.
"""

import ctypes
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MARK: Final = "dlio-peer "
_PR_SET_PDEATHSIG: Final = 1
_LEAST_S: Final = 0.25
"""Least seconds of the timed passes over rows."""


@dataclass(frozen=True, slots=True)
class Task:
    """Pictures to be loaded as random resized crops, half of them flipped; or rows, as they are."""

    files: list[str]
    """Paths of JPEG files; of rows: a NumPy file of shape (samples, columns), and the paths that
    dlio's contenders read."""
    labels: list[int]
    """Class of each file, or label of each row."""
    size: int
    """Side of the crops in pixels; 0 for rows."""
    batch_size: int
    workers: int
    """Threads or processes that decode."""
    scratch: str
    """A folder of the contender's own, which exists."""


Pass = Callable[[], Iterator[tuple[Any, Any]]]
"""One pass over all pictures; yields (images, labels) of each batch.

Images are an array of shape (n, 3, size, size) or (n, size, size, 3), of rows (n, columns), or None
where a loop keeps none; labels are integers, shape (n,).
"""


def checksum(labels: Sequence[int]) -> str:
    """Checksum of a multiset of labels: equal for the same labels in any order."""
    ordered = np.sort(np.asarray(labels, np.int64))
    return hashlib.sha256(ordered.astype("<i8").tobytes()).hexdigest()[:16]


def weight(rows: npt.ArrayLike, labels: npt.ArrayLike) -> int:
    """Return the sum of rows' values, each row's times 1 + its label % 97: equal for the same rows
    with the same labels in any order. Rows hold whole numbers, of any type; shape (n, columns)."""
    sums = np.asarray(rows).sum(1, np.float64).astype(np.int64)
    return int(sums @ (1 + np.asarray(labels, np.int64) % 97))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(make: Callable[[Task], Pass], packages: Sequence[str]) -> None:
    """Answer requests until standard input ends: `make` prepares the data of a task and returns its
    pass; versions of the distributions in `packages` are reported."""
    # Paused processes would outlive a benchmark that is killed.
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries must not mix with answers.

    def answer(content: Mapping[str, object]) -> None:
        answers.write(MARK + json.dumps(content) + "\n")
        answers.flush()

    task: Task | None = None
    run: Pass | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "task" in request:
                with open(request["task"], encoding="utf-8") as file:
                    task = Task(**json.load(file))
                run = make(task)
                answer({"ready": True, "versions": _versions(packages)})
            else:
                assert task is not None
                assert run is not None
                answer(_timed(run, task.size, request["passes"]))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        answer({"error": f"{type(error).__name__}: {text}"})
        raise


def _timed(run: Pass, size: int, passes: int) -> dict[str, object]:
    """Figures of the last of some passes, from the end of the one before it to its own.

    Loaders that work ahead, into the next pass, gain nothing by it: as much has been done before
    the timed pass begins as is done by its end. A timed pass over rows that takes too little time
    for the clock is followed by more, all of them timed.
    """
    labels: list[list[Any]] = []
    values: list[int] = []
    last: Any = None
    first = 0.0
    started = ended = time.perf_counter()
    for number in itertools.count():
        enough = size > 0 or passes == 1 or ended - started >= _LEAST_S
        if number >= passes and enough:
            break
        labels.append([])
        # Sums would take longer than fast loaders: the timed pass of several does without.
        weighs = size == 0 and (number + 1 < passes or passes == 1)
        values += [0] * weighs
        began = ended
        started = began if number < passes else started
        for images, ones in run():
            if not labels[-1]:
                first = time.perf_counter() - began
            labels[-1].append(np.array(ones).reshape(-1))
            if images is not None and len(images) != len(labels[-1][-1]):
                raise ValueError(
                    f"a batch of {len(images)} images has {len(labels[-1][-1])} labels"
                )
            if weighs:
                values[-1] += weight(images, labels[-1][-1])
            last = images
        ended = time.perf_counter()
    together = [np.concatenate(part).tolist() if part else [] for part in labels]
    return {
        "samples": sum(map(len, together[passes - 1 :])),
        "seconds": ended - started,
        "first_batch_s": first,
        "labels": [checksum(part) for part in together],
        "output": None if last is None else _described(last, size),
        "values": values,
    }


def _described(images: Any, size: int) -> str:
    """Type and layout of a batch. Raises ValueError for a wrong shape or blank images."""
    batch = np.asarray(images)
    if size == 0:
        return f"{batch.dtype} x {batch.shape[1]}"
    if batch.shape[1:] == (3, size, size):
        layout = "CHW"
    elif batch.shape[1:] == (size, size, 3):
        layout = "HWC"
    else:
        raise ValueError(f"batches have the shape {batch.shape}, not crops of {size} pixels")
    if float(batch[0].max()) == float(batch[0].min()):
        raise ValueError("an image is blank")
    return f"{batch.dtype} {layout}"


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
