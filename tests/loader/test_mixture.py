"""`dlio.mix`: counts, resumption on any ranks, changing weights, sources' bytes, refusals."""

import json
import pickle
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler

import dlio
from dlio.data.concatenation import MixtureReader
from dlio.data.reader import Reader, open_reader
from dlio.data.selection import SelectionReader
from dlio.errors import UsageError
from dlio.loader.mixture_dataset import Mixture
from dlio.loader.passes import FormulaOrder, PlannedPass
from dlio.plan.order import Order
from dlio.plan.rank_shares import RankShares
from dlio.testing import ReaderTests
from dlio.testing.loader_state import LoaderStateTests
from tests.loader.datasets import Numbers

BODY = str(Path(__file__).with_name("mixture_checks.py"))
_TEXT: Any = "x"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("mixture")
    draw_once(root / "a", images=60, validation=2, classes=3)
    draw_once(root / "b", images=40, validation=2, classes=2)
    return str(root / "a" / "train"), str(root / "b" / "train")


def _numbers(first: int = 50, second: int = 80, **options: Any) -> Mixture:
    sources = {
        "a": (dlio.open(_Squares(first), image_size=None), 0.7),
        "b": (dlio.open(_Squares(second), image_size=None), 0.3),
    }
    return dlio.mix(sources, image_size=None, tiers="ram:4MiB", **options)


class _Squares(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"index": index, "size": self.count}


def _batches(loader: dlio.DataLoader) -> list[list[int]]:
    return [loader.last_samples.tolist() for _ in loader]


class TestState(LoaderStateTests):
    """The suite of all loaders."""

    def make(self) -> dlio.DataLoader:
        return dlio.DataLoader(
            _numbers(seed=3, samples_per_epoch=90, schedule={3: {"a": 0.2, "b": 0.8}}), 8, True
        )


class TestReader(ReaderTests):
    """The reader of a mixture's sources keeps the contract of readers."""

    def make(self, folder: Path) -> Reader:
        parts = [open_reader(_Squares(20)), open_reader(_Squares(30))]
        return MixtureReader(parts, ("a", "b"), (0.1, 0.9))

    def expected(self) -> list[dict[str, int]]:
        return [{"index": k, "size": size} for size in (20, 30) for k in range(size)]

    def test_it_recognises_its_own_format_only(self, tmp_path: Path) -> None:
        """It has no format of its own."""


class TestChosen(ReaderTests):
    """So does the reader of a view."""

    def make(self, folder: Path) -> Reader:
        return SelectionReader([open_reader(_Squares(30))], np.zeros(20, int), np.arange(25, 5, -1))

    def expected(self) -> list[dict[str, int]]:
        return [{"index": k, "size": 30} for k in range(25, 5, -1)]

    def test_it_recognises_its_own_format_only(self, tmp_path: Path) -> None:
        """It has no format of its own."""


def test_paths_and_weights_are_all_that_is_needed(folders: tuple[str, str]) -> None:
    a, b = folders
    with (
        dlio.mix({a: 0.7, b: 0.3}, image_size=16) as data,
        dlio.DataLoader(data, batch_size=10, shuffle=True) as loader,
    ):
        assert data.sources == (a, b)
        assert data.weights == {a: 0.7, b: 0.3}
        whole = 0
        for images, labels in loader:
            owners = data.source_of(loader.last_samples)
            assert images.shape[1:] == (3, 16, 16)
            assert labels.tolist() == [data.targets[k] for k in loader.last_samples]
            if len(owners) == 10:
                assert np.bincount(owners).tolist() == [7, 3]
                whole += 1
        assert whole == len(loader) - 1 == 8  # 60 samples of `a`, of which the last batch has 4.


def test_classes_are_merged_by_name_or_kept(folders: tuple[str, str]) -> None:
    a, b = folders
    with dlio.mix([(a, 1), (b, 1)], image_size=None) as data:
        parts = [dlio.open(path, image_size=None) for path in folders]
        names = [part.classes[label] for part in parts for label in part.targets]
        assert [data.classes[label] for label in data.targets] == names
        assert [data.classes[int(data[k]["label"])] for k in (0, 70, 99)] == [
            names[k] for k in (0, 70, 99)
        ]
    with dlio.mix([(a, 1), (b, 1)], image_size=None, labels="keep") as data:
        assert data.targets == [label for part in parts for label in part.targets]
        assert list(data.classes) == []
    for part in parts:
        part.close()


def test_the_bytes_of_each_source_are_counted_and_read_once(folders: tuple[str, str]) -> None:
    a, b = folders
    mixed = dlio.mix({"a": (a, 0.6), "b": (b, 0.4)}, image_size=16, exhaustion="until_all")
    with mixed as data, dlio.DataLoader(data, batch_size=10, shuffle=True) as loader:
        drawn = np.bincount(list(chain(*_batches(loader))), minlength=100)
        stats = loader.stats()
        assert stats["source_samples"] == {"a": int(drawn[:60].sum()), "b": int(drawn[60:].sum())}
        assert data.mounted is not None
        filler = data.mounted.fill(Order(100, 0))
        assert filler is None or filler.join(60)
        sizes = np.asarray(data.reader.sizes)
        # Also the samples that come several times are read from their source once.
        read = data.reader.bytes_by_source()
        assert read == {"a": int(sizes[:60].sum()), "b": int(sizes[60:].sum())}
        assert sum(stats["source_bytes"].values()) == stats["bytes"]["source"]
        _batches(loader)
        assert loader.stats()["source_bytes"] == {"a": 0, "b": 0}


def test_the_source_that_is_used_most_has_the_fastest_tier(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    a, b = folders
    sizes = [int(dlio.open(path).reader.sizes.sum()) for path in folders]
    tiers = f"ram:{int(sizes[1] * 1.3)}B,{tmp_path}:{2 * sum(sizes)}B"
    with (
        dlio.mix({"a": (a, 0.1), "b": (b, 0.9)}, image_size=16, tiers=tiers) as data,
        dlio.DataLoader(data, batch_size=10, shuffle=True) as loader,
    ):
        _batches(loader)
        assert data.mounted is not None
        blocks = data.reader.layout.block_of(np.arange(100))
        owner = data.mounted.placement.tier[blocks]
        assert (owner[60:] == 0).all()
        assert (owner[:60] == 1).mean() > 0.5


def test_weights_set_between_epochs_hold_from_the_next_one_and_are_in_the_state() -> None:
    data = _numbers(seed=1)
    with dlio.DataLoader(data, batch_size=10, shuffle=True) as loader:
        _batches(loader)
        data.set_weights({"a": 0.2, "b": 0.8})
        rows = [np.bincount(data.source_of(row), minlength=2) for row in _batches(loader)[:-1]]
        assert {tuple(row.tolist()) for row in rows} == {(2, 8)}
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [loader.last_samples.tolist() for _ in iterator]
        following = _batches(loader)
    again = _numbers(seed=1)  # As a script that is started again, with the weights of its text.
    with dlio.DataLoader(again, batch_size=10, shuffle=True) as loader:
        loader.load_state_dict(state)
        assert again.weights == {"a": 0.2, "b": 0.8}
        assert _batches(loader) == rest
        assert _batches(loader) == following


def test_weights_change_at_a_step_of_the_run() -> None:
    data = _numbers(samples_per_epoch=60, schedule={4: {"b": 1}})
    data.set_weights({"a": 1}, step=9)
    assert list(data.schedule) == [0, 4, 9]
    with dlio.DataLoader(data, batch_size=10, shuffle=True) as loader:
        rows = [data.source_of(row).sum() for _ in range(2) for row in _batches(loader)]
        assert rows == [3] * 4 + [10] * 5 + [0] * 3


def test_epochs_chosen_by_set_epoch_go_on_like_epochs_in_turn() -> None:
    with dlio.DataLoader(_numbers(seed=2), 8, True) as loader:
        epochs = [_batches(loader) for _ in range(3)]
    with dlio.DataLoader(_numbers(seed=2), 8, True, persistent_workers=True, num_workers=2) as one:
        for epoch in (0, 1, 1, 2):
            one.set_epoch(epoch)
            assert _batches(one) == epochs[epoch]
    with dlio.DataLoader(_numbers(seed=2), 8, True) as loader:
        loader.set_epoch(2)
        assert _batches(loader) == epochs[2]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("exhaustion", ["stop", "until_all"])
def test_the_length_is_known(drop_last: bool, exhaustion: str) -> None:
    data = _numbers(exhaustion=exhaustion)
    with dlio.DataLoader(data, batch_size=7, shuffle=True, drop_last=drop_last) as loader:
        before = len(loader)
        rows = _batches(loader)
        assert before == len(rows) == len(loader)
        assert all(len(row) == 7 for row in rows[: None if drop_last else -1])


def _pass(mixing: Any, state: dict[str, Any], ranks: int, rank: int, batch: int) -> PlannedPass:
    order = FormulaOrder(4, 130, True, RankShares.even(batch, ranks), False, rank, mixing=mixing)
    return PlannedPass(state, order)


@pytest.mark.parametrize("then", [1, 2, 4])
@pytest.mark.parametrize("now", [1, 2, 4])
def test_any_step_is_resumed_on_any_ranks(then: int, now: int) -> None:
    mixing = _numbers(samples_per_epoch=61, schedule={4: {"a": 0.1, "b": 0.9}}).mixing
    start = {"format": 1, "seed": 4, "epoch": 0, "position": 0, "samples": 130}
    whole = [list(chain(*_rows(mixing, start, 1, 8)[k])) for k in range(8)]
    for step in range(9):
        running = _pass(mixing, start, then, 0, 8 // then)
        for _ in range(step):
            running.consumed()
        state = json.loads(json.dumps(running.state() if step < 8 else running.next_state()))
        rows = _rows(mixing, state, now, 8 // now)
        if step < 8:
            assert [list(chain(*row)) for row in rows] == whole[step:]
        else:
            assert rows != _rows(mixing, start, now, 8 // now)
        # Ranks that bring their own batch size have larger batches, and lose or repeat nothing.
        larger = list(chain(*chain(*_rows(mixing, state, now, 8))))
        if step < 8:
            assert len(larger) == 61 - 8 * step


def test_samples_of_a_lost_rank_come_again_at_the_end() -> None:
    mixing = _numbers(samples_per_epoch=61).mixing
    start = {"format": 1, "seed": 4, "epoch": 0, "position": 0, "samples": 130}
    began = _pass(mixing, start, 4, 0, 4)
    lost = began.part(0, 3)
    state = json.loads(json.dumps(began.state_at(16, lost)))
    rest = list(chain(*chain(*_rows(mixing, state, 3, 4))))
    whole = began.order.samples(np.arange(61)).tolist()
    assert rest[-4:] == lost
    assert len(rest) == 61 - 16 + 4
    # Other global batches: other samples, and as many of each source as without the loss.
    assert sum(k >= 50 for k in whole[:16] + rest[:-4]) == sum(k >= 50 for k in whole)


def _rows(mixing: Any, state: dict[str, Any], ranks: int, batch: int) -> list[list[list[int]]]:
    """The samples of each rank at each step."""
    passes = [_pass(mixing, state, ranks, rank, batch) for rank in range(ranks)]
    return [[each.part(k, each.formula.rank) for each in passes] for k in range(passes[0].steps)]


@pytest.mark.mpi
def test_ranks_share_a_mixture_and_others_go_on_with_it(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], folders: tuple[str, str]
) -> None:
    def run(ranks: int, state: Any, stop: int, nodes: int = 1) -> list[dict[str, Any]]:
        given = [*folders, str(16 // ranks), json.dumps(state) if state else "", str(stop)]
        done = mpirun(ranks, "-W", "error", BODY, *given, str(nodes))
        assert done.returncode == 0, done.stderr
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return sorted(reports, key=lambda each: int(each["rank"]))

    def together(reports: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
        steps = zip(*(each["steps"] for each in reports), strict=True)
        return [(sorted(chain(*(s for s, _ in row))), sum(p for _, p in row)) for row in steps]

    whole = together(run(1, None, -1))
    first = [int(np.searchsorted(samples, 60)) for samples, _ in whole]
    assert sum(first[:5]) == 56  # 0.7 x 80
    assert set(first[:5]) <= {11, 12}
    assert first[5:] == [4]
    four = run(4, None, 3, nodes=2)
    assert together(four) == whole[:3]
    assert len({json.dumps(each["state"]) for each in four}) == 1
    two = run(2, four[0]["state"], -1, nodes=2)
    assert together(two) == whole[3:]
    counts = [each["stats"]["source_samples"] for each in (*four, *two)]
    assert sum(each[name] for each in counts for name in each) == 96


def test_a_mixture_can_be_pickled_and_asked_by_index() -> None:
    data = pickle.loads(pickle.dumps(_numbers()))
    assert len(data) == 130
    assert data[60] == {"index": 10, "size": 80}
    assert data.source_of([0, 49, 50]).tolist() == [0, 0, 1]


def test_worker_processes_read_the_same_batches() -> None:
    def read(**options: Any) -> list[Any]:
        with dlio.DataLoader(_numbers(seed=6), 8, True, **options) as loader:
            return [batch["index"].tolist() for batch in loader]

    assert read(workers="process", num_workers=2) == read()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: dlio.mix(a), "give paths or data sets with their weights"),
        (lambda a, b: dlio.mix({}), "a mixture of 0 sources"),
        (lambda a, b: dlio.mix({a: 0.5, b: -1}), "give a number of 0 or more"),
        (lambda a, b: dlio.mix({a: 0.5, b: float("nan")}), "give a number of 0 or more"),
        (lambda a, b: dlio.mix({a: _TEXT, b: 1}), "give a number, such as 0.7"),
        (lambda a, b: dlio.mix({a: 0, b: 0}), "all are 0"),
        (lambda a, b: dlio.mix([(a, 1), (a, 2)]), "two sources are called"),
        (lambda a, b: dlio.mix({a: 1, b: 1}, exhaustion="never"), "choose"),
        (lambda a, b: dlio.mix({a: 1, b: 1}, exhaustion="repeat"), "give samples_per_epoch="),
        (
            lambda a, b: dlio.mix({a: 1}, exhaustion="until_all", samples_per_epoch=3),
            "leave one of them out",
        ),
        (lambda a, b: dlio.mix({a: 1, b: 1}, samples_per_epoch=0), "samples_per_epoch"),
        (lambda a, b: dlio.mix({a: 1}, schedule={0: {a: 1}}), "step"),
        (lambda a, b: dlio.mix({a: 1}, schedule={3: {"c": 1}}), "'c' is not a source"),
        (lambda a, b: dlio.mix({a: 1, b: 1}, labels="other"), "labels"),
        (
            lambda a, b: dlio.mix({"n": (dlio.open(_Squares(5)), 1), "b": (b, 1)}),
            "mix data sets of the same fields",
        ),
        (lambda a, b: dlio.mix({"m": (_numbers(), 1)}), "a mixture cannot be a source"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_one_line(
    call: Callable[[Any, Any], object], message: str, folders: tuple[str, str]
) -> None:
    with pytest.raises(UsageError) as caught:
        call(*folders)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": RandomSampler(range(130))}, "weights choose the order"),
        ({"batch_size": None}, "weights choose the order"),
        ({"mode": "local"}, "mode batch or global"),
        ({"source_order": "block"}, "mode batch or global"),
    ],
)
def test_loaders_with_another_order_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"batch_size": 8, **options}
    with pytest.raises(UsageError, match=message), dlio.DataLoader(_numbers(), **given) as loader:
        next(iter(loader))


def test_choosing_samples_of_a_mixture_is_refused() -> None:
    with dlio.DataLoader(_numbers(), 8, True) as loader:
        loader.set_epoch(0, keep=np.arange(130) % 2 == 0)
        with pytest.raises(UsageError, match="weights choose the samples"):
            next(iter(loader))


def test_the_state_of_another_mixture_is_refused() -> None:
    with dlio.DataLoader(_numbers(), 8, True) as loader:
        state = loader.state_dict()
    with (
        dlio.DataLoader(_numbers(80, 50), 8, True) as loader,
        pytest.raises(UsageError, match="loader state of a mixture of a"),
    ):
        loader.load_state_dict(state)


def test_images_are_decoded_into_the_decoded_tier_once(folders: tuple[str, str]) -> None:
    a, b = folders
    tiers = "ram:32MiB,ram:64MiB:decoded"
    mixed = dlio.mix({a: 0.5, b: 0.5}, image_size=16, tiers=tiers, exhaustion="until_all")
    with mixed as data, dlio.DataLoader(data, 10, True) as loader:
        pixels = [torch.stack(list(images)).sum().item() for images, _ in loader]
        assert len(pixels) == len(loader)
