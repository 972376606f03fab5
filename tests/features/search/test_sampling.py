"""Choices of parameters depend on the seed, the number and the results that they may know."""

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from dlio.errors import UsageError
from dlio.features.search.objectives import Objective
from dlio.features.search.parameter_sampler import ParameterSampler, quiet_optuna
from dlio.features.search.search_space import Point
from dlio.features.search.study import Study, TrialEpoch

quiet_optuna()
RANGE = FloatDistribution(0, 1)
LIST = CategoricalDistribution(("allreduce", "gossip"))
AXES = {"lr": FloatDistribution(1e-4, 1e-1, log=True), "momentum": RANGE, "exchange": LIST}
GOALS = (Objective("val_accuracy", is_minimised=False),)
FIRST = {"lag": 3}


def _points(folder: Path, sampler: str, trials: int, reopen: bool, sign: int = 1) -> list[Point]:
    """Run a search whose results are a function of the parameters; return all parameters."""
    sampling = ParameterSampler(sampler, AXES, 7, 3, ["maximize"])
    study = Study(str(folder), GOALS, {}, FIRST)
    for number in range(trials):
        if reopen:
            study.close()
            study = Study(str(folder), GOALS, {}, FIRST)
        known = study.frozen(sampling.known(number))
        record = study.add(sampling.choose(number, known))
        value = sign * float(record.point["momentum"])
        study.report(record, 0, TrialEpoch((value,)))
        study.end(record, "complete")
    points = [record.point for record in study.records]
    study.close()
    return points


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "random"])
def test_a_search_that_is_reopened_before_each_trial_chooses_the_same(
    tmp_path: Path, sampler: str
) -> None:
    points = _points(tmp_path / "a", sampler, 16, reopen=False)
    assert _points(tmp_path / "b", sampler, 16, reopen=True) == points
    assert len({tuple(point.values()) for point in points}) == 16


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_results_are_used(tmp_path: Path, sampler: str) -> None:
    points = _points(tmp_path / "a", sampler, 16, reopen=False)
    assert _points(tmp_path / "b", sampler, 16, reopen=False, sign=-1) != points


def test_a_choice_needs_only_trials_that_precede_it_by_the_lag() -> None:
    tpe = ParameterSampler("tpe", AXES, 0, 4, ["maximize"])
    # Until ten are known, choices are random.
    assert [tpe.known(number) for number in (0, 12, 13, 14)] == [0, 0, 10, 11]
    assert ParameterSampler("random", AXES, 0, 4, ["maximize"]).known(99) == 0


def test_a_grid_is_tried_in_its_order() -> None:
    axes = {"a": CategoricalDistribution((1, 2)), "b": CategoricalDistribution(("x", "y"))}
    grid = ParameterSampler("grid", axes, 0, 1, ["maximize"])
    assert grid.most == 4
    assert [grid.choose(k, []).params for k in (0, 3)] == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_cmaes_needs_two_ranges() -> None:
    with pytest.raises(UsageError, match="two ranges"):
        ParameterSampler("cmaes", {"momentum": RANGE, "exchange": LIST}, 0, 1, ["maximize"])


def test_two_searches_on_one_folder_are_refused_and_so_are_other_options(tmp_path: Path) -> None:
    fixed = {"--epochs": 3}
    study = Study(str(tmp_path), GOALS, fixed, FIRST)
    with pytest.raises(UsageError, match="another dlio search"):
        Study(str(tmp_path), GOALS, fixed, FIRST)
    study.close()
    with pytest.raises(UsageError, match="--epochs 3, not 4"):
        Study(str(tmp_path), GOALS, {"--epochs": 4}, FIRST)
    with Study(str(tmp_path), GOALS, fixed, {"lag": 9}) as study:
        assert study.first == FIRST


def test_a_journal_whose_last_line_is_torn_goes_on(tmp_path: Path) -> None:
    begun = ParameterSampler("random", AXES, 0, 1, ["maximize"]).choose(0, [])
    with Study(str(tmp_path), GOALS, {}, FIRST) as study:
        record = study.add(begun)
        study.report(record, 0, TrialEpoch((0.25,), 7))
        study.report(record, 0, TrialEpoch((0.5,), 9))  # Told again: the first one stays.
    with open(tmp_path / "journal.log", "ab") as file:
        file.write(b'{"op_code": 8, "wor')
    with Study(str(tmp_path), GOALS, {}, FIRST) as study:
        (record,) = study.records
        assert (record.point, record.state) == (begun.params, "running")
        assert record.epochs == [TrialEpoch((0.25,), 7)]
        study.end(record, "complete")
    with Study(str(tmp_path), GOALS, {}, FIRST) as study:
        assert [each.state for each in study.records] == ["complete"]
        assert study.best() == study.records


def test_the_best_of_several_objectives_are_those_that_none_dominates(tmp_path: Path) -> None:
    goals = (*GOALS, Objective("seconds", is_minimised=True))
    rows = [(0.5, 2.0), (0.6, 2.0), (0.4, 1.0), (0.6, 3.0)]
    sampler = ParameterSampler("random", AXES, 0, 1, ["maximize"])
    with Study(str(tmp_path), goals, {}, FIRST) as study:
        for row in rows:
            record = study.add(sampler.choose(len(study.records), []))
            study.report(record, 0, TrialEpoch(row))
            study.end(record, "complete")
        assert [record.number for record in study.best()] == [1, 2]
