"""Ranks that hang, are slow, or have other weights than the others."""

import re

import pytest

from dlio.errors import UsageError
from dlio.train.config import train_config
from tests.train.loss.conftest import Ran, Run, check_exact

# The stand-in ends a little later than the program that a signal is sent to: at night, without it.
pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]
# Much slower than the others also where these share cores with other programs.
_SLOW = ("--batch-size", "1", "--callback", "ending:Slow(rank=1, seconds=1.5)")
_CHANGE = ("--callback", "ending:Flip(rank=1, step=10)")


def _check_killed(ran: Ran, rank: int, why: str) -> None:
    (said,) = re.findall(r"^rank \d \(process .*", ran.errors, re.MULTILINE)
    assert said.startswith(f"rank {rank} ")
    assert why in said
    assert [each["ranks"] for each in ran.losses] == [[rank]]


def test_a_rank_that_hangs_is_lost_and_one_that_differs_is_restored(run: Run) -> None:
    hang = ("--hang-after", "3")
    ran = run(3, {0: ["loop", 14, -1]}, *hang, "--check-weights", "4", *_CHANGE)
    check_exact(ran)
    _check_killed(ran, 0, "it runs, and does not come to the end of its step")
    assert "ending.py" in ran.errors  # Its stacks.
    (restored,) = ran.restored
    expected = {"rank": 1, "alike_at": 8, "seen_at": 12, "giver": 0}
    assert restored.items() >= expected.items()
    assert "has other weights than the others since a step after 8 (seen at step 12)" in ran.output


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_lock_is_held_is_lost(run: Run, rank: int) -> None:
    ran = run(3, {rank: ["held", 14, -1]}, "--hang-after", "2")
    check_exact(ran)
    _check_killed(ran, rank, "a call into C holds Python's lock")


@pytest.mark.nightly
def test_a_rank_may_take_any_time_if_nobody_is_to_hang(run: Run) -> None:
    slow = ("--callback", "ending:Slow(rank=1, seconds=2)")
    for seconds in ("0", "60"):
        ran = run(2, {}, "--hang-after", seconds, *slow)
        check_exact(ran)
        assert ran.losses == []


@pytest.mark.nightly
@pytest.mark.parametrize("evicts", [False, True])
def test_a_slow_rank_is_named_and_leaves_on_request(run: Run, evicts: bool) -> None:
    ran = run(3, {}, *_SLOW, *(["--evict-slow"] if evicts else []))
    check_exact(ran)
    (said,) = re.findall(r"^rank 1 .* times slower than .*", ran.errors, re.MULTILINE)
    assert said.endswith("--evict-slow kills it") is evicts
    assert [each["ranks"] for each in ran.losses] == ([[1]] if evicts else [])


@pytest.mark.nightly
def test_a_slow_rank_is_named_without_fault_tolerance_too(run: Run) -> None:
    ran = run(3, {}, *_SLOW, "--fault-tolerance", "off")
    check_exact(ran)
    said = r"^rank 1 \(node .* computed \d+ times slower than the others in epoch 1$"
    assert len(re.findall(said, ran.output, re.MULTILINE)) == 1
    assert ran.output.count("times slower") == 1


@pytest.mark.nightly
def test_two_ranks_that_differ_end_the_run_in_one_line(run: Run) -> None:
    ran = run(2, {}, "--check-weights", "4", *_CHANGE)
    assert ran.code == 2
    assert ran.errors.count("\n") == 1
    assert ran.errors.startswith("dlio: error: ranks 0 (node ")
    assert "resume from a checkpoint (--resume) of step 8 or before" in ran.errors


@pytest.mark.nightly
def test_weights_are_compared_without_fault_tolerance_too(run: Run) -> None:
    more = ("--fault-tolerance", "off", "--check-weights", "4", *_CHANGE)
    ran = run(3, {}, *more)
    check_exact(ran)
    assert [each["rank"] for each in ran.restored] == [1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hang_after": 3.0}, "--hang-after needs --fault-tolerance shrink"),
        ({"evict_slow": True}, "--evict-slow needs --fault-tolerance shrink"),
        ({"check_weights": 4, "exchange": "gossip"}, "--check-weights does not go with --exchange"),
        ({"check_weights": 4, "exchange": "local-sgd(4)"}, "choose one that sums gradients"),
        (
            {"fault_tolerance": "shrink", "exchange": "diloco(8,fragments=2)"},
            "leave the fragments out",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        train_config(source="data", **options)
