"""torchdata's StatefulDataLoader, the same cases on its class and on ours."""

import copy
import importlib
import json
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import RandomSampler

import dlio
from dlio.errors import UsageError
from dlio.util import printable
from tests.loader import stateful_datasets as sets
from tests.loader.leftovers import nothing_is_left

SIZES = [0, 13, 7]
Case = tuple[Any, dict[str, Any]]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it.
]


def theirs(data: Any, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(data, collate_fn=list, **options)


def processes(data: Any, **options: Any) -> Any:
    return dlio.StatefulDataLoader(data, collate_fn=list, workers="process", **options)


def threads(data: Any, **options: Any) -> Any:
    return dlio.StatefulDataLoader(data, collate_fn=list, workers="thread", **options)


def asked_for(data: Any, **options: Any) -> Any:
    """dlio's ordinary loader, told to take snapshots."""
    options = {"snapshot_every_n_steps": 1, **options}
    return dlio.DataLoader(data, collate_fn=list, workers="process", **options)


KINDS = [theirs, processes, threads]
OURS = [processes, threads]
OURS_BY_NAME = ["processes", "threads"]
MISMATCHED = ["0-2", "2-0", "2-3"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_is_left():
        yield


def plain(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, state)


def numbers(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASES: dict[str, Callable[[], Case]] = {
    "an iterator with a state": lambda: (sets.ByIterator(SIZES), {}),
    "random numbers as state": lambda: (sets.ByIterator(SIZES, random=True), {}),
    "a generator's data set": lambda: (sets.ByGenerator(SIZES), {}),
    "its own iterator": lambda: (sets.Itself(SIZES), {}),
    "an iterable without a state": lambda: (sets.Stateless(SIZES), {}),
    "map-style": lambda: (sets.Samples(), {}),
    "map-style, shuffled": lambda: (sets.Samples(), {"shuffle": True, "generator": numbers()}),
    "map-style, random": lambda: (sets.Random(), {"shuffle": True, "generator": numbers()}),
    "map-style with a state": lambda: (sets.Asked(), {}),
    "a sampler's iterator": lambda: (sets.Samples(), {"sampler": sets.BySampler(40)}),
    "a sampler with a state": lambda: (sets.Samples(), {"sampler": sets.SamplerOfEpochs(40)}),
    "single samples": lambda: (sets.ByGenerator(SIZES), {"batch_size": None}),
}
WORKERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "workers": {"num_workers": 3},
    "persistent": {"num_workers": 3, "persistent_workers": True, "snapshot_every_n_steps": 4},
}
# Cases that start processes take a second each.
IN_PROCESSES = [
    "an iterator with a state-workers",
    "a generator's data set-persistent",
    "map-style, shuffled-persistent",
]
DAILY = [
    *(f"{case}-inline" for case in CASES),
    *IN_PROCESSES,
]


def loader(kind: Any, case: str, workers: str) -> Any:
    data, own = CASES[case]()
    torch.manual_seed(17)
    return kind(data, **{"batch_size": 2, **own, **WORKERS[workers]})


def in_the_middle(kind: Any, case: str, workers: str) -> None:
    before = loader(kind, case, workers)
    iterator = iter(before)
    for _ in islice(iterator, 5):
        pass
    state = before.state_dict()
    rest = list(iterator)
    after = loader(kind, case, workers)
    after.load_state_dict(state)
    assert list(after) == rest
    assert len(rest) > 4


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("case", CASES)
def test_a_pass_goes_on_in_the_middle_as_torchdatas(case: str, workers: str) -> None:
    """The same batches follow from the same numbers, and each class reads the other's states."""
    results, states = [], []
    for kind in (theirs, processes):
        made = loader(kind, case, workers)
        iterator = iter(made)
        head = list(islice(iterator, 5))
        states.append(made.state_dict())
        results.append([head, list(iterator)])
    assert results[0] == results[1]
    assert len(results[0][1]) > 4
    if case != "single samples":  # torchdata does not note that a worker has ended.
        assert plain(states[0]) == plain(states[1])
    for kind, state in ((processes, states[0]), (processes, states[1]), (theirs, states[1])):
        made = loader(kind, case, workers)
        made.load_state_dict(state)
        assert list(made) == results[0][1]


@pytest.mark.parametrize("workers", ["workers", "persistent"])
@pytest.mark.parametrize("case", [case for case in CASES if "random" not in case])
def test_a_pass_goes_on_in_the_middle_in_threads(case: str, workers: str) -> None:
    """All but data sets whose state is the random numbers of a process."""
    in_the_middle(threads, case, workers)


@pytest.mark.parametrize("case", CASES)
def test_the_ordinary_loader_takes_snapshots_if_told(case: str) -> None:
    in_the_middle(asked_for, case, "inline")


@pytest.mark.parametrize("kind", [processes, threads])
@pytest.mark.parametrize("case", ["a generator's data set", "single samples"])
def test_a_worker_that_has_ended_does_not_begin_again(kind: Any, case: str) -> None:
    """torchdata's begins its next epoch."""
    before = loader(kind, case, "workers")
    iterator = iter(before)
    taken = 9 if case == "a generator's data set" else 16
    for _ in islice(iterator, taken):
        pass
    state = before.state_dict()
    after = loader(kind, case, "workers")
    after.load_state_dict(state)
    rest = list(after)
    assert rest == list(iterator)
    assert rest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "shuffle"), [(0, False), (0, True), (2, True)])
def test_a_state_at_the_end_leads_to_the_next_epoch(kind: Any, workers: int, shuffle: bool) -> None:
    def make() -> Any:
        torch.manual_seed(3)
        return kind(sets.Samples(12), batch_size=2, num_workers=workers, shuffle=shuffle)

    whole = make()
    epochs = [list(whole) for _ in range(4)]
    before = make()
    last: dict[str, Any] = {}
    for _ in range(2):
        for _ in before:
            last = before.state_dict()
    end = before.state_dict()
    after_last, after_end = make(), make()
    after_last.load_state_dict(last)
    assert list(after_last) == []
    after_end.load_state_dict(end)
    if workers or not shuffle:
        assert [list(after_end), list(after_end)] == epochs[2:]
    else:
        assert len(list(after_end)) == 6


@pytest.mark.parametrize(
    ("kind", "options"),
    # torchdata's workers begin the epoch twice, in prefetching.
    [
        (theirs, "inline"),
        (processes, "inline"),
        (processes, "persistent"),
        (threads, "persistent"),
    ],
)
def test_epochs_that_a_data_set_counts(kind: Any, options: str) -> None:
    made = loader(kind, "a generator's data set", options)
    first = list(made)
    end = made.state_dict()
    following = [list(made), list(made)]
    assert [[(n, e + 1) for n, e in batch] for batch in first] == following[0]
    other = loader(kind, "a generator's data set", options)
    for _ in islice(iter(other), 2):
        pass
    other.load_state_dict(end)
    assert [list(other), list(other)] == following


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ["inline", "persistent"])
def test_a_state_can_be_asked_for_before_the_pass(kind: Any, options: str) -> None:
    made = loader(kind, "map-style with a state", options)
    state = made.state_dict()
    if options == "persistent":
        names = sorted(state["_snapshot"]["_worker_snapshots"])
        assert names == ["worker_0", "worker_1", "worker_2"]
    whole = list(made)
    other = loader(kind, "map-style with a state", options)
    for _ in islice(iter(other), 3):
        pass
    other.load_state_dict(state)
    assert plain(other.state_dict()) == plain(state)
    assert list(other) == whole


@pytest.mark.daily(
    "2-0-theirs", *(f"{case}-{kind}" for case in MISMATCHED for kind in OURS_BY_NAME)
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_another_number_of_workers_is_refused(kind: Any, before: int, after: int) -> None:
    state = kind(sets.Samples(), num_workers=before).state_dict()
    other = kind(sets.Samples(), num_workers=after)
    other.load_state_dict(state)
    with pytest.raises(AssertionError) as caught:
        iter(other)
    if kind is not theirs:
        assert isinstance(caught.value, UsageError)
        assert "num_workers" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_without_tensors_is_json(kind: Any, workers: int) -> None:
    def make() -> Any:
        return kind(sets.ByIterator(SIZES), batch_size=2, num_workers=workers)

    made = make()
    list(made)
    iterator = iter(made)
    next(iterator)
    state = json.loads(json.dumps(made.state_dict()))
    other = make()
    other.load_state_dict(state)
    assert list(other) == list(iterator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_stays_as_it_is(kind: Any) -> None:
    made = kind(sets.Growing(), num_workers=2)
    iterator = iter(made)
    for _ in range(6):
        next(iterator)
    state = made.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(4):
        next(iterator)
    assert plain(state) == plain(kept) != plain(made.state_dict())
    parts = state["_snapshot"]["_worker_snapshots"]["worker_0"]["fetcher_state"]
    assert len(parts["dataset_iter_state"]) == 4
    assert state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"] is None


class Failing(sets.Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise KeyError("sample 1")
        return index


def refuse(worker: int) -> None:
    raise ValueError(f"worker {worker} will not begin")


@pytest.mark.daily(*OURS_BY_NAME)  # torchdata's workers take 5 s each to end after an error.
@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_workers(kind: Any) -> None:
    iterator = iter(kind(Failing(4), num_workers=2))
    assert next(iterator) == [0]
    with pytest.raises(KeyError, match="sample 1"):
        next(iterator)
    assert next(iterator) == [2]
    with pytest.raises(ValueError, match="will not begin"):
        iter(kind(sets.Samples(), num_workers=2, worker_init_fn=refuse))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_state_begins_anew(kind: Any) -> None:
    made = kind(sets.Samples(6), batch_size=3)
    next(iter(made))
    made.load_state_dict({})
    assert [[s["index"] for s in batch] for batch in made] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("workers", [0, 2])
def test_iter_is_called_once_for_a_pass(kind: Any, workers: int) -> None:
    class Once(sets.ByGenerator):
        begun = 0

        def __iter__(self) -> Iterator[Any]:
            self.begun += 1
            return super().__iter__()

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "begun": self.begun}

    def begun(state: dict[str, Any]) -> list[int]:
        states = state.get("_snapshot", {}).get("_worker_snapshots", {"0": state}).values()
        return [each["dataset_state"]["begun"] for each in states]

    first = kind(Once([9, 9]), num_workers=workers)
    next(iter(first))
    state = first.state_dict()
    assert begun(state) == [1] * max(1, workers)
    second = kind(Once([9, 9]), num_workers=workers)
    second.load_state_dict(state)
    next(iter(second))
    assert begun(second.state_dict()) == [1] * max(1, workers)


def test_a_data_set_with_a_state_is_noticed_by_the_ordinary_loader() -> None:
    before = dlio.DataLoader(sets.ByGenerator(SIZES), batch_size=2)
    iterator = iter(before)
    next(iterator)
    state = before.state_dict()
    assert state["dataset_state"] == {"at": 2, "epoch": 0}
    after: Any = dlio.DataLoader(sets.ByGenerator(SIZES), batch_size=2)
    after.load_state_dict(state)
    assert plain(list(after)) == plain(list(iterator))


def test_an_order_of_dlios_own_keeps_its_state() -> None:
    """With a seed the state is valid for any number of workers."""
    before: Any = dlio.StatefulDataLoader(sets.Samples(), batch_size=4, seed=1, num_workers=2)
    iterator = iter(before)
    next(iterator)
    after: Any = dlio.StatefulDataLoader(sets.Samples(), batch_size=4, seed=1, num_workers=3)
    after.load_state_dict(before.state_dict())
    assert plain(list(after)) == plain(list(iterator))


@pytest.mark.parametrize("kind", [processes, threads])
def test_out_of_order_no_batch_is_lost(kind: Any) -> None:
    made = kind(sets.Samples(9), num_workers=2, in_order=False)
    assert sorted(batch[0]["index"] for batch in made) == list(range(9))
    made = kind(sets.ByIterator([6, 3]), num_workers=2, in_order=False)
    assert sorted(batch[0] for batch in made) == list(range(9))


def test_batches_come_on_the_device_that_is_asked_for() -> None:
    made = dlio.StatefulDataLoader(sets.ByIterator([4]), batch_size=2, device="meta")
    assert {batch.device.type for batch in made} == {"meta"}
    assert made.state_dict()["_num_yielded"] == 2


def test_torchdata_is_not_needed() -> None:
    source = importlib.import_module("dlio.loader.stateful").__file__
    assert source is not None
    assert dlio.StatefulDataLoader.__mro__[1] is dlio.DataLoader


def test_a_copy_begins_where_the_next_pass_would() -> None:
    before: Any = dlio.StatefulDataLoader(sets.Samples(8), batch_size=2, shuffle=True)
    iterator = iter(before)
    next(iterator)
    state = before.state_dict()
    after: Any = dlio.StatefulDataLoader(sets.Samples(8), batch_size=2, shuffle=True)
    after.load_state_dict(state)
    copies = [copy.deepcopy(after), pickle.loads(pickle.dumps(after))]
    rest = plain(list(iterator))
    assert [plain(list(each)) for each in (*copies, after)] == [rest] * 3


@pytest.mark.parametrize("generator", [None, 5])
def test_a_state_without_a_samplers_random_numbers_says_so(
    generator: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(printable, "_told", set())
    numbers = None if generator is None else torch.Generator().manual_seed(generator)
    sampler = RandomSampler(range(8), generator=numbers)
    for options in ({"sampler": sampler}, {"sampler": sampler}, {"shuffle": True}):
        loader: Any = dlio.StatefulDataLoader(list(range(8)), 2, **options)
        next(iter(loader))
        loader.state_dict()
    said = [each.message for each in caplog.records if "random numbers" in each.message]
    assert len(said) == 1
    assert ("generator's state" in said[0]) is (generator is not None)
