"""Ranks are killed from outside, and the weights say which samples each step took.

The table is (who is lost) x (when) x (feature next to it); each cell is a job, and the cells
take turns with exchanges and backends. Drawn jobs follow. See `killer`.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killer import EXCHANGES, Case, Kill, draw, draw_pictures, run_case

pytestmark = [pytest.mark.mpi]
_LOST: dict[str, Callable[[int], tuple[Kill, ...]]] = {
    "a rank": lambda step: (Kill(1, step, 0.02),),
    "the first rank": lambda step: (Kill(0, step, 0.04),),
    "two at once": lambda step: (Kill(1, step, 0.02), Kill(2, step, 0.03)),
    "two in turn": lambda step: (Kill(2, max(1, step - 2), 0.02), Kill(0, step, 0.05)),
}
_WHEN = {"the first epoch": 2, "an evaluation": 4, "a later epoch": 6, "the last step": 8}
"""Finished steps of the rank, of four in each epoch."""
_FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "held-out data": {"val": True},
    "checkpoints": {"checkpoint": True},
    "spares": {"spares": 1},
    "spares, checkpoints and held-out data": {"spares": 2, "checkpoint": True, "val": True},
    "accumulation": {"accumulate": 2},
    "accumulation and spares": {"accumulate": 2, "spares": 2},
    "a smaller batch after a loss": {"on_loss": "shrink", "val": True},
}
_DRAWN_KILLS = 300
_OUTSIDE = "ompi_comm_revoke_local"
"""Where Open MPI 5.0 crashes if a rank is lost while others make communicators."""


def _cells() -> Iterator[object]:
    exchanges = itertools.cycle(EXCHANGES)
    for lost, when, feature in itertools.product(_LOST, _WHEN, _FEATURES):
        exchange, more = next(exchanges), dict(_FEATURES[feature])
        step = _WHEN[when]
        if "accumulate" in more:
            step = max(1, step // 2)
        nodes = 2 if exchange.startswith("hierarchical") else 1
        for backend in ("mpi", "torch"):
            if backend == "torch" and "spares" in more:
                continue  # The command refuses it.
            case = Case(exchange, backend, 3, _LOST[lost](step), nodes=nodes, **more)
            yield pytest.param(case, id=f"{lost}, {when}, {feature}, {exchange}, {backend}")


@pytest.fixture(scope="module")
def named_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training and held-out pictures that tell their numbers."""
    folder = tmp_path_factory.mktemp("named")
    draw_pictures(folder)
    return folder


def _check(case: Case, data: Path, folder: Path) -> int:
    """Run a job; return the number of ranks that were killed in it."""
    verdict = run_case(case, data, folder)
    if verdict.wrong and _OUTSIDE in verdict.output:
        return 0
    assert verdict.wrong == [], f"{case.name}\n{verdict.output[-3000:]}"
    return len(verdict.killed)


@pytest.mark.nightly
@pytest.mark.parametrize("case", list(_cells()))
def test_weights_hold_each_sample_once_whoever_is_lost_when_and_next_to_what(
    case: Case, named_pictures: Path, tmp_path: Path
) -> None:
    _check(case, named_pictures, tmp_path / "job")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_the_survivors_of_a_script_say_one_metric(
    backend: str, named_pictures: Path, tmp_path: Path
) -> None:
    for number, step in enumerate((3, 8, 11)):
        kills = (Kill(1, step, 0.03), Kill(0, step + 2, 0.05))
        case = Case("allreduce", backend, 3, kills, script=True)
        _check(case, named_pictures, tmp_path / str(number))


@pytest.mark.nightly
@pytest.mark.parametrize("exchange", ["gossip", "noloco(2)", "asgd"])
def test_what_a_rank_that_joined_has_merged_alone_counts(
    exchange: str, named_pictures: Path, tmp_path: Path
) -> None:
    """All ranks of the beginning are lost: those that have joined know all that counts."""
    kills = (Kill(0, 2), Kill(1, 7, 0.02))
    assert _check(Case(exchange, "mpi", 2, kills, spares=2), named_pictures, tmp_path / "job") == 2


def test_ranks_meet_after_the_last_round_wherever_a_loss_has_found_them(
    named_pictures: Path, tmp_path: Path
) -> None:
    """A spare joins, although a rank has been in the epoch's last round already."""
    case = Case("diloco(3)", "mpi", 3, spares=1, callback="LostAtTheEnd(step=4)", lost=(1,))
    _check(case, named_pictures, tmp_path / "job")


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_ranks_save_a_checkpoint_in_one_generation(
    backend: str, named_pictures: Path, tmp_path: Path
) -> None:
    """One of them learns of a loss while it collects what to save, and has another number then."""
    more: dict[str, Any] = {"checkpoint": True, "epochs": 1}
    case = Case("gossip", backend, 3, callback="LostWhileCollected", lost=(1,), **more)
    _check(case, named_pictures, tmp_path / "job")


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_weights_of_a_lost_node_that_were_not_passed_on_do_not_count(
    backend: str, named_pictures: Path, tmp_path: Path
) -> None:
    """Those that wait for them learn of a loss, and train on the node's samples again."""
    more: dict[str, Any] = {"nodes": 2, "epochs": 1, "callback": "LostWhileForwarded(step=2)"}
    case = Case("gossip", backend, 3, lost=(2,), **more)
    _check(case, named_pictures, tmp_path / "job")


_HURT: dict[str, dict[str, Any]] = {
    "in the first step": {"step": 0, "number": 2},
    "in a sum": {"step": 2, "number": 3},
    "in the last batch of an epoch": {"step": 3, "number": 2},
    "in a checkpoint": {"step": 0, "number": 1, "kind": "checkpoint"},
    "while another joins": {"step": 5, "number": 9},
}


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["mpi", "torch"])
@pytest.mark.parametrize("how", ["killed", "stopped", "ends"])
@pytest.mark.parametrize("when", list(_HURT))
def test_a_rank_may_be_lost_at_any_call(
    when: str, how: str, backend: str, named_pictures: Path, tmp_path: Path
) -> None:
    joins = when == "while another joins"
    if joins and backend == "torch":
        pytest.skip("the command refuses spares of this backend")
    hurt = {"rank": 1, "kind": "message", **_HURT[when], "how": how}
    text = f"LostAtCall({', '.join(f'{name}={value!r}' for name, value in hurt.items())})"
    kills = (Kill(2, 5),) if joins else ()
    more: dict[str, Any] = {"val": True, "checkpoint": True, "spares": int(joins)}
    exchanges = ("allreduce", "allreduce+int8", "tree", "gossip", "local-sgd(3)")
    for exchange in exchanges:
        case = Case(exchange, backend, 3, kills, callback=text, lost=(1,), **more)
        _check(case, named_pictures, tmp_path / exchange)


@pytest.mark.nightly
def test_three_hundred_drawn_kills(named_pictures: Path, tmp_path: Path) -> None:
    killed, seed = 0, 20_000
    while killed < _DRAWN_KILLS:
        killed += _check(draw(seed), named_pictures, tmp_path / str(seed))
        seed += 1
    assert seed < 20_000 + 2 * _DRAWN_KILLS
