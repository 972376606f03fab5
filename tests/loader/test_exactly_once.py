"""Any number of ranks and workers, any batch, stopped and resumed anywhere: each sample once."""

import random
from itertools import chain

import pytest

import dlio

LISTS = [list(range(count)) for count in range(200)]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[rank, ranks] that loaders find themselves at."""
    place = [0, 1]
    for room in ("dataloader", "loader_options"):
        monkeypatch.setattr(f"dlio.loader.{room}.place", lambda *_: (place[0], place[1]))
    return place


def _case(at: list[int], random: random.Random) -> None:
    count = random.randint(1, 199)
    seed, shuffle = random.randint(0, 99), random.random() < 0.8
    done: list[int] = []
    state: dict[str, int] | None = None
    dropped = False
    for last in (False, random.random() < 0.5, True):
        ranks, batch = random.randint(1, 7), random.randint(1, 40)
        workers, drop = random.choice([0, 0, 1, 2, 3]), last and random.random() < 0.3
        steps, states, results = set(), [], []
        stop = None
        for rank in range(ranks):
            at[:] = [rank, ranks]
            loader = dlio.DataLoader(
                LISTS[count], batch, shuffle, num_workers=workers, drop_last=drop, seed=seed
            )
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            left = len(iterator)  # type: ignore[arg-type]
            if stop is None:
                stop = left if last else random.randint(0, left)
            mine = [next(iterator).tolist() for _ in range(stop)]
            states.append(loader.state_dict())
            if last:
                assert next(iterator, None) is None
            steps.add((left, len(mine)))
            results += list(chain.from_iterable(mine))
            iterator.close()  # type: ignore[attr-defined]
        assert len(steps) == 1  # Every rank has as many steps: none waits for another.
        assert all(each == states[0] for each in states)
        state, dropped = states[0], drop
        done += results
        if last:
            break
    assert len(done) == len(set(done))
    if dropped:
        assert count - len(done) < ranks * batch
    else:
        assert sorted(done) == LISTS[count]


def test_a_hundred_cases(at: list[int]) -> None:
    generator = random.Random(7)
    for _ in range(100):
        _case(at, generator)


@pytest.mark.nightly
def test_ten_thousand_cases(at: list[int]) -> None:
    generator = random.Random(8)
    for _ in range(10_000):
        _case(at, generator)
