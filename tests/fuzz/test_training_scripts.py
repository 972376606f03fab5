"""Drawn training scripts train on ranks as in one process, or say why not. None is silent."""

from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.fuzz.training.choices import FEATURES, Choices, draw
from tests.fuzz.training.faults import FAULTS
from tests.fuzz.training.grammar import render
from tests.fuzz.training.judge import (
    GOOD,
    Case,
    Verdict,
    all_ways,
    judge,
    repeat_command,
    run_alone,
)

_SEEDS = 500
_CHUNK = 20
_DAILY: tuple[Choices, ...] = (
    {"batch": "16", "order": "shuffled", "norm": "layer", "accumulate": "2", "clip": "norm"},
    {"task": "classes", "optimizer": "adamw", "scheduler": "plateau", "ema": "averaged"},
    {"samples": "61", "several": "optimizers", "precision": "autocast", "save": "best by val"},
    {"order": "generator", "stage": "replaced head", "stop": "steps", "prints": "norm"},
    # A checkpoint that computes again in backward must not weigh the loss by samples.
    {"loss": "by class", "gradient": "two backwards", "habit": "checkpointing"},
)


class _Doctored(Case):
    """A case with a script of a test's own."""

    text = ""

    @property
    def script(self) -> str:
        return f"precision = {self.choices.get('precision')!r}\n{self.text}"


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


_COUNTED: Choices = {"average": "dataset", "prints": "train loss", "read": "after"}
# Scripts in which faults of dlio's were found.
_FOUND: tuple[tuple[Choices, str, int, str], ...] = (
    # A rank's mask is empty: `clamp(min=1)` made it count as one element.
    ({"loss": "masked", "optimizer": "adagrad"}, "run", 2, "same"),
    # A broken-off pass had drawn more from the generator than one process's.
    ({"batch": "16", "order": "generator", "stop": "steps", "epochs": "3"}, "run", 2, "same"),
    # A constant divisor is the size of a part by chance.
    ({"batch": "7", "layout": "time first", "loss": "sum", "samples": "48"}, "run", 3, "same"),
    # Rank 0's part is too small to see that samples are compared.
    ({"samples": "37", "batch": "8", "loss": "pairs", "task": "classes"}, "run", 3, "said"),
    # The whole batch's loss, weighed by the length of a part.
    (_COUNTED, "run", 2, "said"),
    # The first gradients after parameters were unfrozen were clipped before they were averaged.
    ({"clip": "value", "optimizer": "rmsprop", "stage": "unfreeze"}, "run", 2, "same"),
    ({"clip": "value", "optimizer": "rmsprop", "stage": "unfreeze"}, "slices", 2, "same"),
    ({"loader": "fetch ahead", "epochs": "3"}, "run", 2, "same"),
    ({"gradient": "autograd.grad"}, "run", 2, "same"),
    ({"loader": "iterable"}, "run", 2, "same"),
    # Batches whose first dimension is time were counted by it.
    ({"samples": "50", "layout": "time first"}, "distribute", 3, "same"),
    # Of two loaders in turn, the first drew its order before the second drew its seed.
    ({"order": "weighted", "several": "loaders"}, "run", 2, "same"),
    ({"order": "shuffled", "several": "loaders", "loader": "workers"}, "run", 2, "same"),
    # Sizes of batches were counted in a loop over an iterator, or in the second dimension.
    ({**_COUNTED, "resume": "in the middle"}, "run", 2, "said"),
    ({**_COUNTED, "layout": "time first"}, "run", 2, "said"),
    # A planned step counted an empty mask, or the class weights of the steps before.
    ({"batch": "4", "loss": "masked"}, "run", 2, "same"),
    ({"samples": "61", "batch": "8", "loss": "by class", "stage": "unfreeze"}, "run", 3, "same"),
    # As many features as samples: products with weights seemed to add up samples.
    ({"batch": "16", "gradient": "penalty", "task": "classes"}, "run", 2, "same"),
    ({"norm": "group", "gradient": "penalty"}, "run", 3, "same"),
    # A part's loss, read after the pass, or of sums and means.
    ({"loss": "sum", "optimizer": "lbfgs", "prints": "last loss"}, "run", 2, "said"),
    ({"loss": "sum", "gradient": "penalty", "prints": "last loss"}, "run", 2, "said"),
    # A constant of the script that was the number of elements of a part by chance.
    ({"samples": "60", "batch": "4", "loss": "sum", "layout": "time first"}, "run", 2, "same"),
    # A part of one loader's batch was as large as a whole batch of the other one.
    ({"loss": "by hand", "several": "loaders"}, "run", 2, "same"),
    # Parts of one sample do not show that samples are compared.
    ({"batch": "2", "samples": "37", "loss": "pairs"}, "run", 2, "said"),
    # A validation with gradients was taken for training, as the batches are a list.
    ({"loader": "slices", "inner": "with gradients"}, "run", 2, "same"),
    # Samples that meet before the network, and a branch by the values of a part.
    ({"habit": "mixed", "optimizer": "adam"}, "run", 2, "said"),
    ({"habit": "centred", "optimizer": "adam", "layout": "time first"}, "run", 3, "said"),
    ({"habit": "branch by data", "optimizer": "adam"}, "run", 2, "said"),
    # Gradients of batches that ranks share otherwise were added up before they were averaged.
    (
        {"samples": "37", "accumulate": "3", "optimizer": "adagrad", "gradient": "autograd.grad"},
        "distribute",
        3,
        "same",
    ),
    ({"samples": "37", "accumulate": "3", "gradient": "autograd.grad"}, "slices", 2, "same"),
    # As many time steps as rank 0's first part has samples: ranks saw other terms.
    ({"layout": "time first", "batch": "8", "habit": "hardest", "samples": "64"}, "run", 2, "said"),
    # A part of the samples has the shape of a weight.
    ({"samples": "49", "batch": "16", "gradient": "penalty"}, "run", 2, "same"),
    # Assigned gradients of means over tokens were called one process's.
    ({"loss": "tokens", "several": "gan", "gradient": "autograd.grad"}, "run", 2, "said"),
    ({"several": "gan", "gradient": "autograd.grad"}, "run", 2, "same"),
    # Whole first batches counted as often as there are ranks in means that were about right.
    (
        {"batch": "8", "optimizer": "adam", "prints": "train loss", "skip": "every third"}
        | {"read": "after", "drop_last": "yes"},
        "run",
        3,
        "said",
    ),
    # Rounding to 16 bits decides for small gradients, and the float32 twin is one process's.
    (
        {"samples": "50", "task": "classes", "frozen": "yes", "optimizer": "rmsprop"}
        | {"accumulate": "3", "precision": "autocast"},
        "distribute",
        3,
        "chaotic",
    ),
    # The clipped norm had gradients of parameters that no optimizer has yet.
    ({"clip": "norm", "stage": "optimizer", "habit": "endless"}, "run", 2, "same"),
    # Ranks other than 0 had drawn less from the generator when all batches are read whole.
    (
        {"order": "generator", "precision": "bfloat16", "inner": "train set", "batch": "16"},
        "run",
        2,
        "same",
    ),
    # Batches of lists counted by the boxes of their first sample, and pairs of boxes were not seen.
    ({"samples": "49", "layout": "ragged", "loss": "loop"}, "distribute", 3, "same"),
    ({"samples": "49", "layout": "ragged joined", "loss": "pairs"}, "run", 3, "said"),
    ({"samples": "49", "layout": "ragged"}, "run", 2, "same"),
    # A loop over as many time steps as a part has samples seemed to add up samples.
    ({"samples": "37", "layout": "time first", "loss": "loop"}, "run", 2, "same"),
    # A network that is compiled in name only was not looked at.
    ({"compiled": "disabled", "habit": "mixup"}, "run", 2, "said"),
)


@pytest.mark.mpi
@pytest.mark.nightly
def test_scripts_in_which_faults_were_found(tmp_path: Path, mpirun: MpiRun) -> None:
    cases = [
        Case(f"found-{number}", choices, way, ranks)
        for number, (choices, way, ranks, _) in enumerate(_FOUND)
    ]
    verdicts = judge(cases, tmp_path, mpirun)
    assert [each.kind for each in verdicts] == [kind for *_, kind in _FOUND]


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_finds_what_breaks_dlio(fault: str, tmp_path: Path, mpirun: MpiRun) -> None:
    for first in range(0, 48, 6):
        cases = [each for seed in range(first, first + 6) for each in all_ways(seed, draw(seed))]
        verdicts = judge(cases, tmp_path / str(first), mpirun, fault)
        if any(verdict.kind not in GOOD for verdict in verdicts):
            return
    pytest.fail("no script shows it")


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("first", [*range(0, _SEEDS, _CHUNK), *range(70000, 70060, _CHUNK)])
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
        # With less rounding it would not be there, or it would: rounding's, or a fault.
        ("w = np.full(3, 1.0 + (size > 1) * (0.01 if precision is None else 1e-12))", "chaotic"),
        ("w = np.full(3, 1.0 + (size > 1) * (1.0 if precision is None else 1e-12))", "silent"),
        ("w = np.ones(3)\nif size > 1: raise ValueError('odd')", "untrue"),
        ("w = np.ones(3)\nraise ValueError('of its own')", "invalid"),
        ("w = np.ones(3)", "same"),
    ],
)
@pytest.mark.daily("w = np.full(3, 1.0 + int(rank) / 100)-silent", "w = np.ones(3)-same")
def test_the_judge_sees_faults(text: str, kind: str, tmp_path: Path, mpirun: MpiRun) -> None:
    verdict = _doctored({"optimizer": "by hand"}, text, tmp_path, mpirun)
    assert verdict.kind == kind, verdict


@pytest.mark.mpi
@pytest.mark.parametrize(("way", "kind"), [(0.07, "same"), (0.5, "chaotic")])
def test_far_weights_are_not_the_same_where_random_numbers_lead_far(
    way: float, kind: str, tmp_path: Path, mpirun: MpiRun
) -> None:
    # Other numbers lead one process so far, and ranks are nearly four times as far from it.
    far = "3 * ('DLIO_TIMEOUT' in os.environ) + ('FUZZ_SHAKE' in os.environ)"
    text = f"w = np.full(3, 1.0 + {way} * ({far}))"
    verdict = _doctored({"optimizer": "by hand", "dropout": "half"}, text, tmp_path, mpirun)
    assert verdict.kind == kind, verdict


def _doctored(choices: Choices, text: str, folder: Path, mpi: MpiRun) -> Verdict:
    """Return the verdict on a script that saves the array `w` of a text.

    `size` is 2 in a job of ranks, and 1 in one process; a script itself is not told (see
    `hidden_launch`).
    """
    _Doctored.text = f"""
import os
import numpy as np
rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
size = 1 + ("DLIO_TIMEOUT" in os.environ)
{text}
np.savez(os.environ["FUZZ_OUT"] + f"/rank{{rank}}.npz", w=w)
"""
    return judge([_Doctored("doctored", choices, "run", 2)], folder, mpi)[0]


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
    assert run_alone(cases, tmp_path).keys() == {case.script for case in cases}
