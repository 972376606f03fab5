"""Drawn training scripts train on ranks as in one process, or say why not. None is silent."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.fuzz.training.grammar import FEATURES, Choices, draw, render
from tests.fuzz.training.judge import GOOD, Case, all_ways, judge, repeat_command, run_alone

_SEEDS = 500
_CHUNK = 20
_DAILY: tuple[Choices, ...] = (
    {"batch": "16", "order": "shuffled", "norm": "layer", "accumulate": "2", "clip": "norm"},
    {"task": "classes", "optimizer": "adamw", "scheduler": "plateau", "ema": "averaged"},
    {"samples": "61", "several": "optimizers", "precision": "autocast", "save": "best by val"},
    {"order": "generator", "stage": "replaced head", "stop": "steps", "prints": "norm"},
)


class _Doctored(Case):
    """A case with a script of a test's own."""

    text = ""

    @property
    def script(self) -> str:
        return self.text


def _unkept(cases: list[Case], folder: Path, mpi: MpiRun) -> str:
    """Return the cases that break the promise, with commands that repeat them."""
    verdicts = judge(cases, folder, mpi)
    return "\n".join(
        f"{case.name}: {verdict.kind}: {verdict.detail}\n    {repeat_command(case)}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.kind not in GOOD
    )


@pytest.mark.mpi
def test_some_scripts_train_as_one_process_does(tmp_path: Path, mpirun: MpiRun) -> None:
    cases = [each for seed, choices in enumerate(_DAILY) for each in all_ways(seed, choices)]
    assert _unkept(cases, tmp_path, mpirun) == ""


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, _SEEDS, _CHUNK))
def test_no_drawn_script_is_trained_wrongly_in_silence(
    first: int, tmp_path: Path, mpirun: MpiRun
) -> None:
    seeds = range(first, first + _CHUNK)
    cases = [each for seed in seeds for each in all_ways(seed, draw(seed))]
    assert _unkept(cases, tmp_path, mpirun) == ""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("w = np.full(3, 1.0 + int(rank) / 100)", "silent"),
        ("w = np.full(3, 1.0 + (size > 1))", "silent"),
        ("w = np.ones(3); print('loss', size)", "silent"),
        ("w = np.ones(3); open('log' + rank, 'w').close()", "silent"),
        ("w = np.ones(3)\nif size > 1: raise ValueError('odd')", "no reason"),
        ("w = np.ones(3)\nraise ValueError('of its own')", "invalid"),
        ("w = np.ones(3)", "same"),
    ],
)
@pytest.mark.daily("w = np.full(3, 1.0 + int(rank) / 100)-silent", "w = np.ones(3)-same")
def test_the_judge_sees_faults(text: str, kind: str, tmp_path: Path, mpirun: MpiRun) -> None:
    case = _Doctored("doctored", {}, "run", 2)
    _Doctored.text = f"""
import os
import numpy as np
rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
{text}
np.savez(os.environ["FUZZ_OUT"] + f"/rank{{rank}}.npz", w=w)
"""
    assert judge([case], tmp_path, mpirun)[0].kind == kind


def test_a_seed_gives_one_script() -> None:
    assert draw(7) == draw(7)
    assert len({render(draw(seed)) for seed in range(40)}) == 40


@pytest.mark.nightly
def test_each_alternative_of_the_grammar_runs_in_one_process(tmp_path: Path) -> None:
    cases = [
        Case(f"{name}-{number}", {name: alternative}, "run", 2)
        for name, alternatives in FEATURES.items()
        for number, alternative in enumerate(alternatives)
    ]
    assert run_alone(cases, tmp_path) == {case.name for case in cases}
