"""Ways to break dlio, each of which the judge has to see within some scripts."""

import os
from collections.abc import Callable
from typing import Any, Final

_RANK: Final = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def _terms_unweighed() -> None:
    """Sums and means over tokens count as means over samples."""
    from dlio.integrations.script.loss_weights import ScriptLossWeights

    original = ScriptLossWeights._together

    def together(*args: Any) -> Any:
        factors, value = original(*args)
        return [1.0] * len(factors), value

    _put(ScriptLossWeights, "_together", together)


def _late_parameters_missed() -> None:
    """Parameters that are unfrozen or added later are not exchanged."""
    from dlio.exchange.distribute import ExchangeHandle

    _put(ExchangeHandle, "_any_steps", lambda *_: None)
    _put(ExchangeHandle, "_step_begins", lambda *_: None)


def _all_ranks_write() -> None:
    """Every rank writes into the script's folder."""
    from dlio.integrations.script.file_calls import FileCalls

    _put(FileCalls, "replace_all", lambda self: None)


def _rates_differ() -> None:
    """The last rank has another learning rate."""
    from dlio.integrations.script import runner

    original = runner._ScriptTakeover._adopt

    def adopt(self: Any, optimizer: Any) -> None:
        original(self, optimizer)
        if _RANK:
            optimizer.param_groups[0]["lr"] *= 1.001

    _put(runner._ScriptTakeover, "_adopt", adopt)


def _a_sample_twice() -> None:
    """The part of every rank but the first begins one sample early."""
    from dlio.plan.rank_shares import RankShares

    original = RankShares.part

    def part(self: Any, samples: int, rank: int) -> range:
        whole = original(self, samples, rank)
        return range(max(0, whole.start - 1), whole.stop) if len(whole) else whole

    _put(RankShares, "part", part)


def _notice_always() -> None:
    """Every script is said to compare its samples."""
    from dlio.integrations.script import runner

    original = runner._ScriptTakeover.notes

    def notes(self: Any) -> list[str]:
        text = (
            "train.py:1: the loss compares samples of a batch (all pairs), and each rank sees part "
            "of a batch: it is another loss than that of one process"
        )
        return [*original(self), text]

    _put(runner._ScriptTakeover, "notes", notes)


def _readings_untold() -> None:
    """Numbers of a rank's part are not told."""
    from dlio.integrations.script.readings import Readings

    _put(Readings, "tell", lambda self: None)


def _losses_own() -> None:
    """The loss stays that of a rank's part after backward, and is taken for the whole batch's."""
    from dlio.integrations.script.guard import ScriptGuard
    from dlio.integrations.script.loss_weights import ScriptLossWeights

    _put(ScriptGuard, "arrive", lambda *_: None)
    _put(ScriptLossWeights, "_put", lambda *_: None)


def _evaluation_divided() -> None:
    """Passes under `no_grad` give each rank a part of the data."""
    from dlio.integrations.script.share import SharingLoader

    original = SharingLoader.__iter__

    def iterate(self: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            return original(self)
        return (batch for k, batch in enumerate(list(original(self))) if k % 2 == 0)

    _put(SharingLoader, "__iter__", iterate)


def _weigh_ignored() -> None:
    """Loops of their own are not weighed by their samples."""
    from dlio.exchange.distribute import ExchangeHandle

    _put(ExchangeHandle, "weigh", lambda *_: None)
    _put(ExchangeHandle, "weigh_by_batches", lambda *_: None)


def _put(owner: Any, name: str, value: object) -> None:
    assert hasattr(owner, name), f"{owner}: no {name}"
    setattr(owner, name, value)


FAULTS: Final[dict[str, Callable[[], None]]] = {
    "terms-unweighed": _terms_unweighed,
    "late-parameters-missed": _late_parameters_missed,
    "all-ranks-write": _all_ranks_write,
    "rates-differ": _rates_differ,
    "a-sample-twice": _a_sample_twice,
    "notice-always": _notice_always,
    "readings-untold": _readings_untold,
    "losses-own": _losses_own,
    "evaluation-divided": _evaluation_divided,
    "weigh-ignored": _weigh_ignored,
}
"""Functions that break dlio in this process, by name."""
