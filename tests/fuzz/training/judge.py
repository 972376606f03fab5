"""Runs of drawn scripts, and the verdict on each: as one process, stopped with a reason, or silent.

One process (plain Python and torch) is the measure. Weights of every rank, printed lines and saved
files are compared with its.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tests.conftest import SOURCES
from tests.fuzz.training.grammar import FEATURES, Choices, differs_by_design, render

Mpi = Callable[..., subprocess.CompletedProcess[str]]
BOUND: Final = 2e-3
"""Largest difference of a tensor of weights, as a part of its norm (plus 0.01)."""
_HALF: Final = 6e-2
"""The same with bfloat16 in the forward pass."""
_DOUBLE: Final = 1e-7
_JOB_S: Final = 600.0
_WAIT_S: Final = "25"
_NUMBER: Final = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
_SAYS_WEIGHTS: Final = re.compile(r"weight|gradient|loss|mean|batch norm", re.IGNORECASE)
_SAYS_PRINTED: Final = re.compile(r"print|metric|number|loss|part of|file", re.IGNORECASE)
GOOD: Final = ("same", "said", "stopped", "invalid")
"""Verdicts that keep the promise; `invalid` scripts fail in one process, too."""


@dataclass(frozen=True, slots=True)
class Case:
    """A script and a way to run it on ranks."""

    name: str
    choices: Choices
    way: str
    ranks: int

    @property
    def script(self) -> str:
        """Text of the script."""
        return render(self.choices, self.way)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a case."""

    kind: str
    """`same`, `said`, `stopped`, `invalid`; or `silent`, `no reason`, `hang`."""
    detail: str = ""


def judge(cases: Sequence[Case], folder: Path, mpi: Mpi) -> list[Verdict]:
    """Run cases in jobs of many, and those that are not the same again, in a job each.

    Args:
        folder: for their files, empty.
        mpi: runs a Python program on a number of ranks, as the fixture `mpirun` does.
    """
    measures = run_alone(cases, folder / "alone")
    run_alone(cases, folder / "shaken", shakes=True)
    _together(cases, folder / "together", mpi, measures)
    verdicts = []
    for case in cases:
        verdict = _verdict(case, folder / "alone" / case.name, folder / "together" / case.name)
        if verdict.kind not in ("same", "invalid"):
            # In a job of its own, as users start it: no script before it can be the reason.
            verdict = _single(case, folder, mpi)
        verdicts.append(verdict)
    return verdicts


def smaller(case: Case, folder: Path, mpi: Mpi) -> Case:
    """Return a case with as few choices as give the same kind of verdict."""
    kind = judge([case], folder / "first", mpi)[0].kind
    for name in list(case.choices):
        fewer = {key: value for key, value in case.choices.items() if key != name}
        tried = Case(f"without-{name.replace(' ', '-')}", fewer, case.way, case.ranks)
        if judge([tried], folder / tried.name, mpi)[0].kind == kind:
            case = Case(case.name, fewer, case.way, case.ranks)
    return case


def repeat_command(case: Case) -> str:
    """Return the command that judges a case again."""
    choices = json.dumps(case.choices)
    return f"python -m tests.fuzz.training --way {case.way} --ranks {case.ranks} '{choices}'"


def _prepare(case: Case, folder: Path) -> Path:
    place = folder / case.name
    place.mkdir(parents=True)
    (folder / f"{case.name}.out").mkdir()
    (place / "train.py").write_text(case.script, encoding="utf-8")
    return place


def run_alone(cases: Sequence[Case], folder: Path, *, shakes: bool = False) -> set[str]:
    """Run all cases in one process; returns the names of those that have ended well.

    Args:
        shakes: begin with weights that differ by rounding.
    """
    shaken = {"FUZZ_SHAKE": "1"} if shakes else {}
    places = [_prepare(case, folder) for case in cases]
    (folder / "list").write_text("\n".join(map(str, places)), encoding="utf-8")
    subprocess.run(
        [sys.executable, _WORKER, "alone", str(folder / "list")],
        check=True,
        timeout=_JOB_S + 60 * len(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCES, **shaken},
    )
    return {case.name for case in cases if (folder / f"{case.name}.out" / "0.done").exists()}


def _together(cases: Sequence[Case], folder: Path, mpi: Mpi, sound: set[str]) -> None:
    """Run the cases on ranks, those of one way and number of ranks in one job."""
    kinds = sorted({(case.way, case.ranks) for case in cases})
    for way, ranks in kinds:
        left = [c for c in cases if (c.way, c.ranks) == (way, ranks) and c.name in sound]
        places = [_prepare(case, folder) for case in left]
        while places:
            listed = folder / f"list-{way}-{ranks}"
            listed.write_text("\n".join(map(str, places)), encoding="utf-8")
            _job(mpi, ranks, _JOB_S, _WORKER, way, str(listed))
            ended = [all(Path(f"{p}.out/{r}.done").exists() for r in range(ranks)) for p in places]
            # The first that has not ended has ended the job: it is judged by itself later.
            places = places[ended.index(False) + 1 :] if False in ended else []


def _job(mpi: Mpi, ranks: int, limit_s: float, *words: str) -> tuple[int | None, str, str]:
    """Run a job; returns its exit code, None for a hang, and its output and errors."""
    try:
        done = mpi(ranks, *words, env={"DLIO_TIMEOUT": _WAIT_S}, timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout, done.stderr


def _single(case: Case, folder: Path, mpi: Mpi) -> Verdict:
    place = _prepare(case, folder / "single")
    out = Path(f"{place}.out")
    code = "import os, sys, runpy; os.chdir(sys.argv[1]); os.environ['FUZZ_OUT'] = sys.argv[2]; "
    if case.way == "run":
        code += (
            "sys.argv = ['dlio', 'run', 'train.py']; from dlio.cli import guarded, run_command; "
            "guarded(lambda: run_command(sys.argv[1:]))"
        )
    else:
        code += (
            "from dlio.cli import guarded; "
            "guarded(lambda: runpy.run_path('train.py', run_name='__main__'))"
        )
    rc, printed, errors = _job(mpi, case.ranks, _JOB_S / 3, "-c", code, str(place), str(out))
    (out / "0.out").write_text(printed, encoding="utf-8")
    (out / "0.err").write_text(errors, encoding="utf-8")
    if rc is None:
        return Verdict("hang", f"no end within {_JOB_S / 3:.0f} s")
    if rc:
        lines = [line for line in errors.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("dlio: error: ")]
        if ours:
            # A deadline blames a rank that has done nothing wrong but another thing.
            kind = "hang" if " waited " in ours[-1] else "stopped"
            return Verdict(kind, ours[-1])
        if case.way == "slices" and "Traceback" in errors:
            # The script shares its data itself: an error of its own is its own.
            return Verdict("stopped", lines[-1])
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return Verdict("no reason", (raised or lines or [f"exit code {rc}"])[-1][:300])
    for rank in range(case.ranks):
        (out / f"{rank}.done").touch()
    return _verdict(case, folder / "alone" / case.name, place)


def _verdict(case: Case, alone: Path, place: Path) -> Verdict:
    if not Path(f"{alone}.out/0.done").exists():
        lines = Path(f"{alone}.out/0.err").read_text(encoding="utf-8").strip().splitlines()
        return Verdict("invalid", lines[-1] if lines else "")
    if not all(Path(f"{place}.out/{rank}.done").exists() for rank in range(case.ranks)):
        return Verdict("stopped", "the job ended early")
    errors = Path(f"{place}.out/0.err").read_text(encoding="utf-8", errors="replace")
    notices = " ".join(line for line in errors.splitlines() if line.startswith("dlio run: "))
    wrong = _weights(case, alone, place, bool(_SAYS_WEIGHTS.search(notices)))
    if case.way == "run" and not differs_by_design(case.choices):
        printed = [*_printed(case, alone, place), *_files(case, alone, place)]
        says = bool(_SAYS_PRINTED.search(notices))
        wrong += [(says, text) for text in printed]
    silent = [text for is_said, text in wrong if not is_said]
    if silent:
        return Verdict("silent", "; ".join(silent[:4]))
    return Verdict("said", notices) if wrong else Verdict("same")


def _bound(case: Case, alone: Path) -> float:
    """Return the largest difference that may be rounding's, as a part of a tensor's norm.

    L-BFGS multiplies differences: where rounding alone leads one process elsewhere, the bound is
    ten times that way.
    """
    precision = case.choices.get("precision", "float32")
    bound = {"float64": _DOUBLE, "autocast": _HALF, "scaler": _HALF}.get(precision, BOUND)
    shaken = alone.parent.with_name("shaken") / f"{case.name}.out" / "rank0.npz"
    if not shaken.exists():
        return bound
    one, other = np.load(f"{alone}.out/rank0.npz"), np.load(shaken)
    ways = [np.linalg.norm(one[n] - other[n]) / (np.linalg.norm(one[n]) + 1e-2) for n in one.files]
    return max(bound, 10 * float(max(ways)))


def _weights(case: Case, alone: Path, place: Path, is_said: bool) -> list[tuple[bool, str]]:
    """Return the differences of weights: from one process, which may be said, and of ranks."""
    one = np.load(f"{alone}.out/rank0.npz")
    every = [np.load(f"{place}.out/rank{rank}.npz") for rank in range(case.ranks)]
    wrong, bound = [], _bound(case, alone)
    for name in one.files:
        size = np.linalg.norm(one[name]) + 1e-2
        others = [float(np.linalg.norm(every[0][name] - each[name]) / size) for each in every[1:]]
        statistics = name.startswith("buffer") and case.choices.get("norm") == "batch"
        if not max(others) <= min(bound, 1e-4) and not statistics:
            wrong.append((False, f"ranks differ: {name} by {max(others):.1e}"))
            break
    for name in one.files:
        size = np.linalg.norm(one[name]) + 1e-2
        apart = float(np.linalg.norm(every[0][name] - one[name]) / size)
        if not apart <= bound and not differs_by_design(case.choices):
            wrong.append((is_said, f"not one process's: {name} by {apart:.1e}"))
            break
    return wrong


def _printed(case: Case, alone: Path, place: Path) -> list[str]:
    texts = [Path(f"{p}.out/0.out").read_text(encoding="utf-8") for p in (alone, place)]
    return _text_differences("printed", texts[0], texts[1], _bound(case, alone))


def _text_differences(name: str, one: str, ranks: str, bound: float) -> list[str]:
    first, second = one.splitlines(), ranks.splitlines()
    if len(first) != len(second):
        return [f"{name}: {len(first)} lines, on ranks {len(second)}"]
    for a, b in zip(first, second, strict=True):
        x, y = (np.array(_NUMBER.findall(line), float) for line in (a, b))
        same = _NUMBER.sub("#", a) == _NUMBER.sub("#", b)
        if not same or not np.allclose(x, y, atol=2.5e-3, rtol=10 * bound, equal_nan=True):
            return [f"{name}: {a!r}, on ranks {b!r}"]
    return []


def _files(case: Case, alone: Path, place: Path) -> list[str]:
    one, ranks = (
        {str(f.relative_to(p)) for f in p.rglob("*") if "__pycache__" not in f.parts}
        for p in (alone, place)
    )
    if one != ranks:
        return [f"files: {sorted(one ^ ranks)} in one of the two runs alone"]
    wrong = []
    for name in sorted(one - {"train.py"}):
        first, second = alone / name, place / name
        if name.endswith(".pt"):
            stored = [_flat(torch.load(path, weights_only=True)) for path in (first, second)]
            wrong += _stored_differences(name, stored[0], stored[1], _bound(case, alone))
        elif name.endswith(".npy"):
            if not np.allclose(
                np.load(first), np.load(second), rtol=10 * _bound(case, alone), atol=1e-3
            ):
                wrong.append(f"{name} differs")
        elif first.is_file():
            texts = [path.read_text(encoding="utf-8") for path in (first, second)]
            wrong += _text_differences(name, texts[0], texts[1], _bound(case, alone))
    return wrong


def _flat(stored: Any) -> dict[str, torch.Tensor]:
    if isinstance(stored, torch.Tensor):
        return {"": stored}
    if isinstance(stored, int | float):
        return {"": torch.tensor(float(stored))}
    if isinstance(stored, dict | list | tuple):
        items = stored.items() if isinstance(stored, dict) else enumerate(stored)
        return {f"{key}.{name}": t for key, value in items for name, t in _flat(value).items()}
    return {}


def _stored_differences(
    name: str, one: dict[str, torch.Tensor], ranks: dict[str, torch.Tensor], bound: float
) -> list[str]:
    if one.keys() != ranks.keys():
        return [f"{name}: other entries"]
    for key, tensor in one.items():
        # Second moments of Adam's are squares: they differ by twice as much.
        apart = (tensor.double() - ranks[key].double()).norm().item()
        if not apart <= 4 * bound * (tensor.double().norm().item() + 1e-2):
            return [f"{name}: {key} by {apart:.1e}"]
    return []


def all_ways(seed: int, choices: Choices) -> list[Case]:
    """Return the cases of a seed: `dlio run` on 2 and 3 ranks, and a loop of its own on one."""
    own = ("distribute", "slices")[seed % 2]
    hand = {k: v for k, v in choices.items() if k in FEATURES}
    return [
        Case(f"{seed}-run-2", choices, "run", 2),
        Case(f"{seed}-run-3", choices, "run", 3),
        Case(f"{seed}-{own}-{2 + seed // 2 % 2}", hand, own, 2 + seed // 2 % 2),
    ]


_WORKER: Final = str(Path(__file__).with_name("worker.py"))
