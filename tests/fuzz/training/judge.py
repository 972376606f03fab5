"""Runs of drawn scripts, and the verdict on each: as one process, stopped with a reason, or silent.

One process (plain Python and torch) is the measure. Weights of every rank, printed lines and saved
files are compared with its. Differences have to be named by a notice (see `reasons`).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tests.conftest import SOURCES
from tests.fuzz.training.choices import Choices, draws_by_part, runs_of, without_draws
from tests.fuzz.training.grammar import render
from tests.fuzz.training.reasons import WEIGHTS, is_true_stop, read

Mpi = Callable[..., subprocess.CompletedProcess[str]]
BOUND: Final = 1e-4
"""Largest difference of a tensor of weights, as a part of its norm (plus 0.01)."""
_HALF: Final = 6e-2
"""The same with bfloat16 in the forward pass."""
_DOUBLE: Final = 1e-9
_EXCUSED: Final = 1.5
"""The same where a notice says that weights differ, of all tensors together: unrelated weights of
one size are 1.4 apart."""
_CHAOS: Final = 3e-2
"""The same where rounding alone leads far: a larger one tells nothing."""
_FAR: Final = 0.3
"""The same where a script in finer numbers proves that rounding leads it there, or where other
random numbers lead it farther: a larger one may be a fault of its type of numbers alone, or any."""
_FINER: Final = {"float32": "float64", "float64": "float64"}
"""Numbers that round less, where it is not float32."""
_NEARLY: Final = 5e-2
"""Largest relative difference of a mean weighed by the rounded sizes of parts."""
_RANKS: Final = 1e-6
"""Largest difference between ranks."""
_JOB_S: Final = 600.0
_WAIT_S: Final = "25"
_NUMBER: Final = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?|nan")
_LABEL: Final = re.compile(r"(?:epoch|step) \d+: ([a-z ]+) [-\dn]")
_NOTICE: Final = "dlio run: "
_ERROR: Final = "dlio: error: "
GOOD: Final = ("same", "said", "stopped", "chaotic", "invalid")
"""Verdicts that keep the promise, or tell nothing: rounding alone leads `chaotic` scripts as far,
and `invalid` scripts fail in one process, too."""


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
    """One of `GOOD`; or `silent`, `untrue`, `no reason`, `hang`."""
    detail: str = ""
    apart: float = 0.0
    """Largest difference of weights from one process's, as a part of a tensor's norm."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """Something that is not one process's."""

    value: str
    """`weights`, a printed number's name; empty if nothing can excuse it."""
    text: str
    is_small: bool = False
    """True for a number that is about one process's."""


def judge(cases: Sequence[Case], folder: Path, mpi: Mpi, fault: str | None = None) -> list[Verdict]:
    """Run cases in jobs of many, and those that break the promise again, in a job each.

    Args:
        folder: for their files, empty.
        mpi: runs a Python program on a number of ranks, as the fixture `mpirun` does.
        fault: break dlio on the ranks first (see `faults`).
    """
    scripts = {case.name: case.script for case in cases}
    alone = run_alone(cases, folder / "alone")
    sound = [case for case in cases if scripts[case.name] in alone]
    errors = _together(sound, folder / "together", mpi, fault)

    def judged(case: Case, shaken: Mapping[str, Path]) -> Verdict:
        script = scripts[case.name]
        place = folder / "together" / case.name
        if case.name in errors:
            return _stopped(case, errors[case.name])
        return _verdict(case, alone[script], place, shaken.get(script))

    verdicts = {case.name: judged(case, {}) for case in sound}
    # Rounding alone may lead a script elsewhere: by how much it does is known from a run with
    # weights that differ by rounding.
    doubtful = [case for case in sound if verdicts[case.name].kind in ("silent", "said")]
    if doubtful:
        shaken = run_alone(doubtful, folder / "shaken", shakes=True)
        verdicts |= {case.name: judged(case, shaken) for case in doubtful}
        for case in sound:
            if verdicts[case.name].kind not in GOOD and not fault:
                # In a job of its own, as users start it: no script before it can be the reason.
                script = scripts[case.name]
                again = _single(case, folder, mpi, alone[script], shaken.get(script))
                if again.kind == "silent" and _is_rounding(case, again, folder, mpi):
                    again = Verdict("chaotic", again.detail, again.apart)
                verdicts[case.name] = again
            elif verdicts[case.name].kind == "chaotic" and not fault:
                verdicts[case.name] = _without_chaos(case, verdicts[case.name], folder, mpi)
    return [verdicts.get(case.name) or Verdict("invalid") for case in cases]


def _is_rounding(case: Case, verdict: Verdict, folder: Path, mpi: Mpi) -> bool:
    """True if the same script in finer numbers gets one process's weights: a difference from these
    that is left without them is rounding's."""
    if case.choices.get("precision") == "float64" or not verdict.apart <= _FAR:
        return False
    finer = _finer(case)
    alone = run_alone([finer], folder / f"alone-{finer.name}").get(finer.script)
    if alone is None:
        return False
    proof = _single(finer, folder, mpi, alone, None)
    return proof.kind in ("same", "said") and proof.apart <= _bound(finer, alone, None)


def _without_chaos(case: Case, chaotic: Verdict, folder: Path, mpi: Mpi) -> Verdict:
    """Return the verdict on a chaotic case: another one than `chaotic` if the same script in finer
    numbers, and without random numbers that ranks draw otherwise, breaks the promise, too."""
    finer = _finer(case)
    finer = replace(finer, choices=without_draws(finer.choices))
    if finer.choices == case.choices:
        return chaotic
    alone = run_alone([finer], folder / f"alone-{finer.name}").get(finer.script)
    shaken = run_alone([finer], folder / f"shaken-{finer.name}", shakes=True).get(finer.script)
    if alone is None:
        return chaotic
    proof = _single(finer, folder, mpi, alone, shaken)
    if proof.kind in GOOD:
        return chaotic
    return replace(proof, detail=f"{repeat_command(finer)}: {proof.detail}")


def _finer(case: Case) -> Case:
    """Return a case in numbers that round less."""
    precision = case.choices.get("precision", "float32")
    choices = {**case.choices, "precision": _FINER.get(precision, "float32")}
    return replace(case, name=f"finer-{case.name}", choices=choices)


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


def _prepare(name: str, script: str, folder: Path) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (folder / f"{name}.out").mkdir()
    (place / "train.py").write_text(script, encoding="utf-8")
    return place


def run_alone(cases: Sequence[Case], folder: Path, *, shakes: bool = False) -> dict[str, Path]:
    """Run the scripts of some cases in one process, each once; returns the folders of those that
    have ended well, by script.

    Args:
        shakes: begin with weights that differ by rounding.
    """
    shaken = {"FUZZ_SHAKE": "1"} if shakes else {}
    scripts = {case.script: case.name for case in cases}
    places = {script: _prepare(name, script, folder) for script, name in scripts.items()}
    (folder / "list").write_text("\n".join(map(str, places.values())), encoding="utf-8")
    subprocess.run(
        [sys.executable, _WORKER, "alone", str(folder / "list")],
        check=True,
        timeout=_JOB_S + 60 * len(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCES, **shaken},
    )
    return {s: place for s, place in places.items() if _is_sound(place)}


def _is_sound(place: Path) -> bool:
    """True if a script has ended well, with parameters that tell something: all are numbers."""
    if not Path(f"{place}.out/0.done").exists():
        return False
    weights = _arrays(f"{place}.out/rank0.npz")
    return all(np.isfinite(weights[name]).all() for name in weights if "buffer" not in name)


def _together(
    cases: Sequence[Case], folder: Path, mpi: Mpi, fault: str | None
) -> dict[str, str | None]:
    """Run the cases on ranks, those of one way and number of ranks in one job. Returns the errors
    of those that have ended a job, None for a hang."""
    errors: dict[str, str | None] = {}
    for way, ranks in sorted({(case.way, case.ranks) for case in cases}):
        left = [case for case in cases if (case.way, case.ranks) == (way, ranks)]
        for case in left:
            _prepare(case.name, case.script, folder)
        while left:
            places = [folder / case.name for case in left]
            listed = folder / f"list-{way}-{ranks}"
            listed.write_text("\n".join(map(str, places)), encoding="utf-8")
            words = (_WORKER, way, str(listed), *([fault] if fault else []))
            code, _, printed = _job(mpi, ranks, _JOB_S, *words)
            ended = [all(Path(f"{p}.out/{r}.done").exists() for r in range(ranks)) for p in places]
            if False not in ended:
                break
            # The first that has not ended has ended the job.
            bad = ended.index(False)
            texts = [_text(Path(f"{places[bad]}.out/{rank}.err")) for rank in range(ranks)]
            errors[left[bad].name] = None if code is None else "\n".join([*texts, printed])
            left = left[bad + 1 :]
    return errors


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _job(mpi: Mpi, ranks: int, limit_s: float, *words: str) -> tuple[int | None, str, str]:
    """Run a job; returns its exit code, None for a hang, and its output and errors."""
    try:
        done = mpi(ranks, *words, env={"DLIO_TIMEOUT": _WAIT_S}, timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout, done.stderr


def _single(case: Case, folder: Path, mpi: Mpi, alone: Path, shaken: Path | None) -> Verdict:
    place = _prepare(case.name, case.script, folder / "single")
    out = Path(f"{place}.out")
    code = "import os, sys, runpy; os.chdir(sys.argv[1]); os.environ['FUZZ_OUT'] = sys.argv[2]; "
    if case.way == "run":
        code += (
            "sys.argv = ['dlio', 'run', 'train.py']; "
            "from dlio.cli.command_line import guarded, run_command; "
            "guarded(lambda: run_command(sys.argv[1:]))"
        )
    else:
        code += (
            "from dlio.cli.command_line import guarded; "
            "guarded(lambda: runpy.run_path('train.py', run_name='__main__'))"
        )
    printed = errors = ""
    for _ in range(runs_of(case.script)):
        rc, *said = _job(mpi, case.ranks, _JOB_S / 3, "-c", code, str(place), str(out))
        printed, errors = printed + said[0], errors + said[1]
        if rc != 0:
            return _stopped(case, None if rc is None else errors)
    (out / "0.out").write_text(printed, encoding="utf-8")
    (out / "0.err").write_text(errors, encoding="utf-8")
    return _verdict(case, alone, place, shaken)


def _stopped(case: Case, errors: str | None) -> Verdict:
    """Return the verdict on a case that has ended a job."""
    if errors is None:
        return Verdict("hang", "no end in time")
    lines = [line for line in errors.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_ERROR)]
    # Ranks that the launcher ends after another one say so, too.
    ours = [line for line in ours if not line.endswith(": KeyboardInterrupt")] or ours
    if not ours:
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return Verdict("no reason", (raised or lines or ["nothing"])[-1][:300])
    if " waited " in ours[-1]:
        # A deadline blames a rank that has done nothing wrong but another thing.
        return Verdict("hang", ours[-1])
    is_true = case.way == "run" and is_true_stop(ours[-1], case.choices, case.script)
    return Verdict("stopped" if is_true else "untrue", ours[-1])


def _verdict(case: Case, alone: Path, place: Path, shaken: Path | None) -> Verdict:
    errors = _text(Path(f"{place}.out/0.err"))
    notices = [
        line.removeprefix(_NOTICE) for line in errors.splitlines() if line.startswith(_NOTICE)
    ]
    said = read(notices, case.choices, case.script)
    if said.untrue:
        return Verdict("untrue", "; ".join(said.untrue))
    bound = _bound(case, alone, shaken)
    draws = draws_by_part(case.choices)
    most = _CHAOS if _precise(case.choices) and not draws else _FAR
    is_chaotic = bound > most
    bound = min(bound, most) if is_chaotic else bound
    # A difference by design is not one process's in numbers that follow from the weights either.
    # Loops of their own are told in the documentation that batch norm is each rank's.
    by_design = case.way != "run" and case.choices.get("norm") == "batch"
    has_to_be_told = case.way == "run" and case.choices.get("data") == "augmented"
    is_excused = (draws and not has_to_be_told and not is_chaotic) or by_design
    excused = said.excused | ({WEIGHTS} if is_excused else set())
    apart, wrong = _weights(case, alone, place, bound, WEIGHTS in excused)
    if case.way == "run":
        wrong += [*_printed(case, alone, place, bound), *_files(alone, place, bound)]
    silent = [
        each.text
        for each in wrong
        if not (_is_excused(each, excused) or (each.is_small and each.value in said.nearly))
    ]
    if silent:
        return Verdict("chaotic" if is_chaotic else "silent", "; ".join(silent[:4]), apart)
    return (
        Verdict("said", " ".join(_NOTICE + each for each in notices), apart)
        if wrong
        else Verdict("same", "", apart)
    )


def _is_excused(difference: _Difference, excused: Collection[str]) -> bool:
    return bool(difference.value) and (WEIGHTS in excused or difference.value in excused)


def _bound(case: Case, alone: Path, shaken: Path | None) -> float:
    """Return the largest difference that may be rounding's, as a part of a tensor's norm.

    Optimizers such as L-BFGS multiply differences: where rounding alone leads one process
    elsewhere, the bound is ten times that way. Where ranks draw random numbers by parts of a batch,
    it is some times as far as other random numbers lead one process. Of bfloat16 in the forward
    pass it is three times as far as that leads one process away from float32.
    """
    precision = case.choices.get("precision", "float32")
    bound = _DOUBLE if precision == "float64" else BOUND if _precise(case.choices) else _HALF
    if shaken is None or precision == "bfloat16":
        return bound
    one, other = _arrays(f"{alone}.out/rank0.npz"), _arrays(f"{shaken}.out/rank0.npz")
    if one.keys() != other.keys():
        return bound
    most = max(_apart(other[name], one[name]) for name in one)
    if not _precise(case.choices):
        return max(bound, 3 * most)
    return max(bound, (4 if draws_by_part(case.choices) else 10) * most)


def _apart(values: np.ndarray[Any, Any], one: np.ndarray[Any, Any]) -> float:
    """Return the difference from one process's values as a part of their norm. Values that are not
    a number in both are equal."""
    same = (values == one) | (np.isnan(values) & np.isnan(one))
    far = np.where(same, 0.0, values - one)
    return float(np.linalg.norm(far) / (np.linalg.norm(np.nan_to_num(one)) + 1e-2))


def _precise(choices: Choices) -> bool:
    return choices.get("precision", "float32") in ("float32", "float64", "scaler off")


@cache
def _arrays(path: str) -> dict[str, Any]:
    with np.load(path) as stored:
        return dict(stored)


def _weights(
    case: Case, alone: Path, place: Path, bound: float, is_said: bool
) -> tuple[float, list[_Difference]]:
    """Return the largest difference of weights from one process's, and the faults."""
    one = _arrays(f"{alone}.out/rank0.npz")
    every = [_arrays(f"{place}.out/rank{rank}.npz") for rank in range(case.ranks)]
    wrong = []
    if any(each.keys() != one.keys() for each in every):
        return float("inf"), [_Difference("", "other parameters")]
    most = 0.0
    for name in one:
        others = [_apart(each[name], every[0][name]) for each in every[1:]]
        statistics = name.startswith("buffer") and case.choices.get("norm") == "batch"
        if not max(others) <= _RANKS and not statistics:
            wrong.append(_Difference("", f"ranks differ: {name} by {max(others):.1e}"))
            break
    worst = ""
    for name in one:
        apart = _apart(every[0][name], one[name])
        if not apart <= most:
            most, worst = apart, name
    if not most <= bound:
        # A notice explains a difference, but not any.
        together = [
            np.concatenate([each[name].ravel() for name in one]) for each in (every[0], one)
        ]
        value = WEIGHTS if _apart(*together) <= _EXCUSED and is_said else ""
        wrong.append(_Difference(value, f"not one process's: {worst} by {most:.1e}"))
    return most, wrong


def _printed(case: Case, alone: Path, place: Path, bound: float) -> list[_Difference]:
    texts = [_text(Path(f"{each}.out/0.out")) for each in (alone, place)]
    wrong = _text_differences("printed", texts[0], texts[1], bound)
    for rank in range(1, case.ranks):
        if text := _text(Path(f"{place}.out/{rank}.out")):
            wrong.append(_Difference("", f"rank {rank} prints {text[:60]!r}"))
    return wrong


def _text_differences(name: str, one: str, ranks: str, bound: float) -> list[_Difference]:
    first, second = one.splitlines(), ranks.splitlines()
    if len(first) != len(second):
        return [_Difference(WEIGHTS, f"{name}: {len(first)} lines, on ranks {len(second)}")]
    wrong: dict[tuple[str, bool], _Difference] = {}
    for a, b in zip(first, second, strict=True):
        x, y = (np.array(_NUMBER.findall(line), float) for line in (a, b))
        same = _NUMBER.sub("#", a) == _NUMBER.sub("#", b)
        if not same or not np.allclose(x, y, atol=1.5e-3, rtol=10 * bound, equal_nan=True):
            label = _LABEL.match(a)
            value = label[1] if label is not None and same else WEIGHTS
            small = same and np.allclose(x, y, atol=1.5e-3, rtol=_NEARLY)
            text = f"{name}: {a!r}, on ranks {b!r}"
            wrong.setdefault((value, small), _Difference(value, text, small))
    return list(wrong.values())


def _files(alone: Path, place: Path, bound: float) -> list[_Difference]:
    one, ranks = (
        {str(f.relative_to(p)) for f in p.rglob("*") if "__pycache__" not in f.parts}
        for p in (alone, place)
    )
    if one != ranks:
        text = f"files: {sorted(one ^ ranks)} in one of the two runs alone"
        return [_Difference(WEIGHTS, text)]
    wrong = []
    for name in sorted(one - {"train.py"}):
        first, second = alone / name, place / name
        if name.endswith(".pt"):
            stored = [_flat(torch.load(path, weights_only=True)) for path in (first, second)]
            wrong += _stored_differences(name, stored[0], stored[1], bound)
        elif name.endswith(".npy"):
            if not np.allclose(np.load(first), np.load(second), rtol=10 * bound, atol=1e-3):
                wrong.append(_Difference(WEIGHTS, f"{name} differs"))
        elif first.is_file():
            wrong += _text_differences(name, _text(first), _text(second), bound)
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
) -> list[_Difference]:
    if one.keys() != ranks.keys():
        return [_Difference(WEIGHTS, f"{name}: other entries")]
    for key, tensor in one.items():
        # Second moments of Adam's are squares: they differ by twice as much.
        apart = _apart(ranks[key].double().numpy(), tensor.double().numpy())
        if not apart <= 4 * bound:
            return [_Difference(WEIGHTS, f"{name}: {key} by {apart:.1e}")]
    return []


def all_ways(seed: int, choices: Choices) -> list[Case]:
    """Return the cases of a seed: `dlio run` and a loop of its own, each on 2 and 3 ranks."""
    own = ("distribute", "slices")[seed % 2]
    return [
        Case(f"{seed}-{way}-{ranks}", choices, way, ranks)
        for way in ("run", own)
        for ranks in (2, 3)
    ]


_WORKER: Final = str(Path(__file__).with_name("worker.py"))
