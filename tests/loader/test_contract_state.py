"""Beyond torch's contract: resumed passes, tiers for any data set, devices, counts of a pass."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

import dlio
from dlio import DataLoader as Ours
from dlio.errors import UsageError
from dlio.loader.third_party import fit_loop
from tests.loader.datasets import Numbers, Stream, plain
from tests.loader.leftovers import nothing_is_left


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_is_left():
        yield


def test_tiers_keep_what_a_data_set_returns() -> None:
    class Counted(Numbers):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            type(self).asked += 1
            return {"index": index, "square": torch.tensor([index * index])}

    with Ours(Counted(), 4, tiers="ram:16MiB", shuffle=True) as loader:
        seen = [int(n) for batch in loader for n in batch["index"]]
        before = Counted.asked
        again = [int(n) for batch in loader for n in batch["index"]]
        assert sorted(seen) == sorted(again) == list(range(23))
        assert seen != again
        assert Counted.asked == before


class Unsized:
    """A sampler of a user's, that draws when it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())


class Eager(Unsized):
    def __len__(self) -> int:
        return 23


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_a_framework_has_fetched_and_not_used_are_not_consumed(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    loader = Ours(Numbers(), 4, sampler=Unsized(), num_workers=workers)
    iterator = iter(loader)
    used = [next(iterator)["index"].tolist() for _ in range(2)]
    ahead = next(iterator)["index"].tolist()
    monkeypatch.setattr(fit_loop, "fetched_ahead", lambda: 1)
    state = loader.state_dict()
    monkeypatch.undo()
    assert state["batches"] == 2
    assert state["consumed"] == 8
    rest = [ahead, *(batch["index"].tolist() for batch in iterator)]
    torch.manual_seed(99)
    other = Ours(Numbers(), 4, sampler=Unsized(), num_workers=workers)
    other.load_state_dict(state)
    assert [batch["index"].tolist() for batch in other] == rest
    assert sorted(index for batch in used + rest for index in batch) == list(range(23))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": False},
        {"shuffle": True, "generator": 7},
        {"shuffle": True, "seed": 9},
        {"sampler": "weighted"},
        {"sampler": "eager"},
        {"batch_sampler": "own"},
    ],
)
@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_a_resumed_pass_is_exactly_the_rest(
    options: dict[str, Any], workers: int, taken: int
) -> None:
    data = Numbers()

    def make(workers: int) -> Any:
        made = dict(options)
        if "generator" in made:
            made["generator"] = torch.Generator().manual_seed(made["generator"])
        if "sampler" in made:
            weighted = made["sampler"] == "weighted"
            made["sampler"] = WeightedRandomSampler([1.0] * 23, 23) if weighted else Eager()
        if "batch_sampler" in made:
            made["batch_sampler"] = BatchSampler(RandomSampler(data), 4, False)
        else:
            made["batch_size"] = 4
        return Ours(data, num_workers=workers, **made)

    torch.manual_seed(21)
    loader = make(workers)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    state = loader.state_dict()
    rest = [batch["index"].tolist() for batch in iterator]
    following = [batch["index"].tolist() for batch in loader] if "seed" in options else None
    torch.manual_seed(99)  # Random numbers drawn elsewhere must not matter.
    other = make(2 - workers)
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert len(other) == 6
    assert [batch["index"].tolist() for batch in other] == rest
    if following is not None:
        assert [batch["index"].tolist() for batch in other] == following


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4), (2, 2)])
def test_a_distributed_samplers_pass_goes_on_with_other_ranks(before: int, after: int) -> None:
    data = Numbers(41)
    done: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(before):
        sampler: Any = DistributedSampler(data, before, rank, shuffle=True, seed=4)
        loader = Ours(data, 3, sampler=sampler, num_workers=1)
        loader.set_epoch(2)
        iterator = iter(loader)
        for _ in range(2):
            done += next(iterator)["index"].tolist()
        assert not state or state == loader.state_dict()  # The same on all ranks.
        state = loader.state_dict()
    rest: list[int] = []
    for rank in range(after):
        sampler = DistributedSampler(data, after, rank, shuffle=True, seed=4)
        loader = Ours(data, 5, sampler=sampler, num_workers=1)
        loader.load_state_dict(state)
        rest += [n for batch in loader for n in batch["index"].tolist()]
    assert len(done) == len(set(done)) == 6 * before
    assert set(rest) == set(range(41)) - set(done) | (set(rest) & set(done))
    padding = len(rest) - (41 - len(done))
    assert 0 <= padding < after


def test_a_state_of_another_kind_is_refused() -> None:
    by_formula = Ours(Numbers(), 4, seed=1)
    with pytest.raises(UsageError):
        by_formula.load_state_dict(Ours(Numbers(), 4).state_dict())
    with pytest.raises(UsageError):
        Ours(Numbers(), 4).load_state_dict(by_formula.state_dict())
    with pytest.raises(UsageError):
        Ours(Numbers(), 4).load_state_dict({"kind": "sampler", "format": 2, "epoch": -1})


def test_an_iterables_state_counts_its_batches() -> None:
    loader = Ours(Stream(10), 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = Ours(Stream(10), 2)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_what_a_pass_cost_is_told(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name] = value

    writer = Writer()
    trace = tmp_path / "trace.json"
    loader = Ours(Numbers(), 4, num_workers=2, trace=str(trace), writer=writer)
    with caplog.at_level("INFO", "dlio"):
        assert len(list(loader)) == 6
    assert "bottleneck" in caplog.text or "remedy" in caplog.text
    assert writer.scalars["dlio/samples_per_s"] > 0
    import json

    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["args"].get("samples", 0) for event in events if event["ph"] == "X") == 23
    stats = loader.stats()
    assert (stats["samples"], stats["batches"], stats["threads"]) == (23, 6, 2)
    assert dlio.DataLoader is Ours


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none"])
@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_arrays_are_read_into_the_batch_itself(tmp_path: Any, tiers: str, compress: str) -> None:
    from dlio_staging.pack_folder import pack

    class Volumes(Numbers):
        def __getitem__(self, index: int) -> Any:
            volume = torch.full((40, 33, 17), float(index))
            volume[0, 0, :3] = torch.tensor([1.5, 2.5, -index])
            return {"flag": index % 2 == 0, "volume": volume, "index": index, "x": index / 2}

    pack(Volumes(), str(tmp_path / "packed"), compress=compress)
    with (
        dlio.open(str(tmp_path / "packed"), tiers=tiers) as data,
        Ours(data, 4, shuffle=True, num_workers=2, seed=2) as loader,
    ):
        for _ in range(2):
            seen = []
            for batch in loader:
                samples = batch["index"].tolist()
                wanted = torch.utils.data.default_collate([Volumes()[k] for k in samples])
                assert plain(batch) == plain(wanted)
                seen += samples
            assert sorted(seen) == list(range(23))
        assert loader.stats()["thread_s"]["decode"] == 0  # Nothing was copied a second time.


def test_batches_come_on_the_device_that_is_asked_for() -> None:
    loader = Ours(Numbers(), 4, num_workers=2, device="meta")
    assert {batch["square"].device.type for batch in loader} == {"meta"}


def test_a_path_is_no_data_set() -> None:
    with pytest.raises(UsageError, match=r"dlio\.open"):
        Ours("/data/imagenet")
