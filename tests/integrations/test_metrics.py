"""Values made from several tensors of all ranks, when ranks are lost meanwhile."""

from types import SimpleNamespace

import pytest

from dlio.integrations import rank_metrics


class _Mean:
    """A metric of two tensors, each gathered from all ranks."""

    def __init__(self, ranks: list[int], loses: int) -> None:
        self.total, self.count, self._ranks, self._loses = 4, 2, ranks, loses

    def gather(self, recovery: SimpleNamespace) -> float:
        for name in ("total", "count"):
            setattr(self, name, getattr(self, name) * len(self._ranks))
            if self._loses:
                self._loses -= 1
                self._ranks.pop()
                recovery.number += 1
        return self.total / self.count


@pytest.mark.parametrize("losses", [0, 1, 2, 3])
def test_what_is_gathered_in_several_parts_is_gathered_from_the_same_ranks(
    losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery = SimpleNamespace(number=0)
    monkeypatch.setattr(rank_metrics, "recovery_of", lambda _: recovery)

    class Mean(_Mean):
        pass

    rank_metrics.keeps_together(Mean, "gather", lambda _: ("total", "count"))
    rank_metrics.keeps_together(Mean, "gather", lambda _: ())  # A second time, it changes nothing.
    ranks = [0, 1, 2, 3, 4]
    assert Mean(ranks, losses).gather(recovery) == 2
    assert len(ranks) == 5 - losses
