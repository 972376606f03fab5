"""Digests by which ranks watch each other travel with gradients, at no message of their own."""

import json
from pathlib import Path
from typing import Final

import pytest

from dlio.exchange.step_watch import StepWatch
from dlio.integrations.script.guard import ScriptGuard
from tests.conftest import MpiRun

COUNTED: Final = str(Path(__file__).with_name("messages") / "counted.py")
SYNCHRONOUS: Final = {"allreduce": 4, "tree": 4, "allreduce+int8": 8}
"""Exchanges of gradients, and the bytes of a number that travels with them: those of compressed
ones go with the ranks' weights, in float64."""
OWN_WAYS: Final = ("local-sgd(2)", "diloco(2)", "gossip")
"""Exchanges of weights, where ranks go their own ways in between: nothing is compared."""
_LEARNT: Final = 3
"""Steps in which `dlio run` sends the counts of a loss, with the guard and without."""
Sent = list[list[tuple[str, int]]]


def _sizes(sent: Sent) -> list[tuple[int, int]]:
    """Messages and bytes of each step."""
    return [(len(step), sum(size for _, size in step)) for step in sent]


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.daily("2")
def test_the_guard_adds_some_bytes_to_a_step_and_no_message(
    mpirun: MpiRun, tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "sent.json"
    done = mpirun(ranks, COUNTED, str(path), *SYNCHRONOUS, *OWN_WAYS)
    assert done.returncode == 0, done.stderr[-4000:]
    counts: dict[str, dict[str, Sent]] = json.loads(path.read_text())
    for exchange, ways in counts.items():
        guarded, bare, distributed = (_sizes(ways[way]) for way in ways)
        assert len(guarded) == len(bare) == len(distributed) == 11, exchange
        is_compared = exchange in SYNCHRONOUS
        most = ScriptGuard.count * SYNCHRONOUS.get(exchange, 0)
        for step in range(1, 10):
            messages, size = bare[step]
            assert guarded[step][0] == messages, (exchange, step)
            more = guarded[step][1] - size
            assert is_compared * most <= more <= most * messages, (exchange, step)
        # Where ranks meet anyway they compare their calls, in a sum: when an optimizer is
        # made, when a pass begins, and at the end.
        assert guarded[0][0] == bare[0][0] + 2 * is_compared, exchange
        assert guarded[10][0] == bare[10][0] + is_compared, exchange
        for step in range(_LEARNT, 10):
            messages, size = bare[step]
            assert distributed[step][0] == messages, (exchange, step)
            more = distributed[step][1] - size
            few = StepWatch.count * SYNCHRONOUS.get(exchange, 0)
            assert is_compared * few <= more <= few * messages, (exchange, step)
