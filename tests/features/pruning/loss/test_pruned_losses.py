"""Ranks that are lost while the network is pruned."""

import pytest

from tests.train.loss.conftest import Run, check_exact

pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]

FREQUENT = "tests.features.pruning.loss.frequent_rounds"
_NODES = ("--pretend-nodes", "2")


@pytest.mark.nightly
def test_a_loss_within_a_pruning_round_leaves_all_with_one_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an epoch that is planned for the ranks that begin it."""
    monkeypatch.setenv("ALSO_IMPORT", FREQUENT)
    pruning = ("--prune", "apoptosis", "--prune-tolerance", "50", "--shuffle", "partial(0.5)")
    ran = run(3, {1: ["kill", 5, -1]}, *pruning, *_NODES)
    check_exact(ran)
    (loss,) = ran.losses
    assert loss["step"] == 4, "it was not lost within the round"
    (first, second, *_) = ran.epochs[0]["pruning"]["rounds"]
    assert (first["step"], second["step"]) == (4, 8)
    assert first["parameters"] < ran.epochs[0]["pruning"]["parameters_at_first"]


@pytest.mark.nightly
@pytest.mark.parametrize("step", [9, 10])
@pytest.mark.parametrize("exchange", ["allreduce+onebit", "tree", "local-sgd(3)", "gossip", "asgd"])
def test_pruning_goes_on_with_any_exchange(
    run: Run, monkeypatch: pytest.MonkeyPatch, exchange: str, step: int
) -> None:
    monkeypatch.setenv("ALSO_IMPORT", FREQUENT)
    pruning = ("--prune", "apoptosis", "--prune-tolerance", "50", "--exchange", exchange)
    ends: dict[int, list[object]] = {1: ["kill", step, -1], 0: ["kill", 13, 1]}
    ran = run(3, ends, *pruning)
    check_exact(ran, alike=False)
    assert len(ran.losses) == 2
