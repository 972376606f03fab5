"""Which objects of a user's are copied for another thread, and which are shared."""

import array
import collections
import enum
import functools
import gc
import io
import sqlite3
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from dlio.util.thread_copies import mine, own_copy


class Helper:
    def __init__(self) -> None:
        self.value = 1


class Mark:
    """Without a state: a value that others compare by identity."""


class Colour(enum.Enum):
    RED = 1


class Unwilling:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self) -> None:
        self.value, self.__hidden = 1, [Helper()]

    def hidden(self) -> list[Helper]:
        return self.__hidden


class Closing:
    def __del__(self) -> None:
        pass


class Listing(list[int]):
    pass


class Only:
    made: "Only | None" = None

    def __new__(cls) -> "Only":
        if cls.made is None:
            cls.made = super().__new__(cls)
            cls.made.value = 1
        return cls.made

    value: int


class Later:
    value = 0


class Pair(NamedTuple):
    helper: Helper
    value: int


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(1))


class Held(Dataset[int]):
    """Has an attribute `held`, itself, and two for whatever else."""

    rest: Any = None
    tensor: Any = None

    def __init__(self, held: Any) -> None:
        self.held, self.me = held, self


def _shared_memory() -> Any:
    tensor: Any = torch.zeros(3)
    return tensor.share_memory_()


def _large() -> Any:
    return np.zeros(1 << 20)


COPIED: dict[str, Callable[[], Any]] = {
    "object of the user's": Helper,
    "with slots": Slotted,
    "data set": lambda: Held(1),
    "list of objects": lambda: [1, Helper()],
    "tuple of objects": lambda: ("a", Helper()),
    "dictionary of objects": lambda: {"a": Helper()},
    "buffer": lambda: np.zeros(8),
    "tensor": lambda: torch.zeros(8),
    "bytes to be overwritten": lambda: bytearray(8),
    "numbers": lambda: array.array("i", [1]),
    "list": lambda: [1, 2, 3],
    "dictionary": dict,
    "set": lambda: {1},
    "ordered dictionary": collections.OrderedDict,
    "dictionary with defaults": lambda: collections.defaultdict(list),
    "queue": lambda: collections.deque([1], maxlen=2),
    "list of a kind of its own": lambda: Listing([1]),
    "list of buffers": lambda: [np.zeros(3)],
    "named tuple": lambda: Pair(Helper(), 1),
    "namespace": lambda: types.SimpleNamespace(value=1),
    "file in memory": lambda: io.BytesIO(b"12"),
    "text in memory": lambda: io.StringIO("12"),
    "view of a buffer": lambda: np.zeros(8).reshape(2, 4),
    "array of objects": lambda: np.empty(2, object),
    "transform that is a module": Module,
    "object without a value yet": Later,
}
SHARED: dict[str, Callable[[], Any]] = {
    "large array": _large,
    "long list": lambda: [1] * 1001,
    "view": lambda: _large()[:3],
    "array that is only read": lambda: np.frombuffer(b"12345678"),
    "shared tensor": _shared_memory,
    "parameters": lambda: torch.nn.Linear(2, 2),
    "lock": threading.Lock,
    "random numbers": np.random.default_rng,
    "function": lambda: lambda x: x,
    "module": lambda: types,
    "only one of its class": Only,
    "with an end of its own": Closing,
    "text": lambda: "text",
    "mark": Mark,
    "member of an enumeration": lambda: Colour.RED,
    "class": lambda: Helper,
}


@pytest.mark.parametrize("name", COPIED)
def test_state_is_copied(name: str) -> None:
    data = Held(COPIED[name]())
    made = own_copy(data)
    assert type(made) is Held
    assert made.me is made
    assert made.held is not data.held
    assert type(made.held) is type(data.held)


class Counter:
    value = 0

    def __call__(self, step: int = 1, *, times: int = 1) -> int:
        self.value += step * times
        return self.value


def _closure(counter: Counter) -> Callable[..., int]:
    def call(step: int = 1, *, times: int = 1) -> int:
        return counter(step, times=times)

    return call


@pytest.mark.parametrize(
    "bind",
    [
        lambda counter: counter,
        lambda counter: counter.__call__,
        lambda counter: functools.partial(counter, times=1),
        lambda counter: functools.partial(_closure(counter), times=1),
        _closure,
    ],
    ids=["object", "method", "partial", "partial of a closure", "closure"],
)
def test_functions_have_the_state_of_their_thread(bind: Callable[[Counter], Any]) -> None:
    counter = Counter()
    data = Held(bind(counter))
    made = own_copy(data)
    assert [made.held(), made.held(step=3), data.held()] == [1, 4, 1]
    assert counter.value == 1


def test_a_function_that_closes_over_itself_is_no_error() -> None:
    def factorial(number: int) -> int:
        return number * factorial(number - 1) if number else 1

    assert own_copy(Held(factorial)).held(4) == 24


def _ring() -> Any:
    ring: list[Any] = [Counter()]
    ring += [ring] * 50
    return ring


def _ring_of_dictionaries() -> Any:
    ring: dict[Any, Any] = {0: Counter()}
    ring.update({k: (ring, [ring] * 9) for k in range(1, 50)})
    return ring


def _ring_of_functions() -> Any:
    counter = Counter()
    own: list[Callable[[int], int]] = []

    def first(depth: int) -> int:
        return own[0](depth) + second(depth) + third(depth) if depth else counter(1)

    def second(depth: int) -> int:
        return first(depth - 1) + third(depth - 1) + second(depth - 1) if depth else counter(1)

    def third(depth: int) -> int:
        return first(depth - 1) + second(depth - 1) + third(depth - 1) if depth else counter(1)

    own += [first, second, third]
    return own


def _list_of_lists_many_times() -> Any:
    rows: list[Any] = [Counter()]
    for _ in range(14):
        rows = [rows, *[[*rows]] * 99]
    return rows


@pytest.mark.parametrize(
    "make", [_ring, _ring_of_dictionaries, _ring_of_functions, _list_of_lists_many_times]
)
def test_what_holds_itself_or_another_many_times_is_looked_through_once(
    make: Callable[[], Any],
) -> None:
    data = Held(make())
    made = own_copy(data)
    assert made.held is not data.held
    assert type(made.held) is type(data.held)


def test_rings_stay_rings_with_the_state_of_their_thread() -> None:
    data = Held(_ring())
    made = own_copy(data)
    assert made.held[0] is not data.held[0]
    assert all(each is made.held for each in made.held[1:])

    counter = Counter()

    def again(times: int) -> int:
        return again(times - 1) if times else counter()

    bound = own_copy(Held(again))
    assert [bound.held(3), bound.held(2)] == [1, 2]
    assert counter.value == 0


def test_a_table_of_lists_is_not_looked_through_to_its_end() -> None:
    rows: list[list[Any]] = [[(j, k) for k in range(1000)] for j in range(1000)]
    rows[-1] = [Counter()] * 1000
    data = Held(rows)
    data.rest = [Counter()]
    made = own_copy(data)
    assert made.held[-1] is rows[-1]
    assert made.rest[0] is not data.rest[0]


@pytest.mark.parametrize("name", SHARED)
def test_what_is_only_read_is_shared(name: str) -> None:
    data = Held(SHARED[name]())
    made = own_copy(data)
    assert made is not data
    assert made.held is data.held


def test_arrays_that_share_memory_go_on_sharing_it() -> None:
    data = Held(None)
    data.held = np.zeros(8, np.float32)
    data.rest = data.held[2:]
    data.tensor = torch.from_numpy(data.held)
    made = own_copy(data)
    made.held[3] = 5
    assert made.rest[1] == made.tensor[3] == 5


def test_attributes_in_slots_are_those_of_the_original() -> None:
    one = Slotted()
    made = own_copy(one)
    assert made.value == 1
    assert made.hidden() is not one.hidden()
    assert made.hidden()[0] is not one.hidden()[0]


def test_one_object_in_two_places_stays_one() -> None:
    helper = Helper()
    made = own_copy(Held([helper, (helper,)]))
    assert made.held[0] is made.held[1][0] is not helper


@pytest.mark.parametrize("buffering", [0, -1])
def test_an_open_file_has_a_place_of_its_own(buffering: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with open(tmp_path / "file", "rb", buffering=buffering) as file:
        file.seek(7)
        data = Held(file)
        made = own_copy(data)
        assert made.held.read(1) == file.read(1) == b"\x07"
        made.held.seek(50)
        assert file.read(1) == b"\x08"
        made.held.close()
        assert file.read(1) == b"\x09"


def test_an_open_text_has_a_place_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"zeile {k} \xfc\n" for k in range(100)), "utf-16")
    with open(tmp_path / "text", encoding="utf-16") as file:
        file.readline()
        made = own_copy(Held(file)).held
        assert made is not file
        assert made.readline() == file.readline() == "zeile 1 \xfc\n"
        made.seek(0)
        assert file.readline() == "zeile 2 \xfc\n"
        made.close()


def test_a_text_whose_ends_of_lines_may_be_kept_is_shared(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a\r\nb\r\n")
    with open(tmp_path / "text", encoding="utf-8", newline="") as file:
        assert own_copy(Held(file)).held is file


def test_an_open_picture_has_a_frame_of_its_own(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), k, np.uint8)) for k in range(20)]
    frames[0].save(tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.tif") as picture:
        picture.seek(3)
        made = own_copy(Held(picture)).held
        assert made is not picture
        assert np.asarray(made)[0, 0] == np.asarray(picture)[0, 0] == 3
        made.seek(9)
        assert np.asarray(made)[0, 0] == 9
        assert picture.tell() == 3
        made.close()
    assert own_copy(Held(frames[0])).held is frames[0]


@pytest.mark.parametrize("kind", ["written", "closed"])
def test_other_files_are_shared(kind: str, tmp_path: Path) -> None:
    file = open(tmp_path / "file", "wb")  # noqa: SIM115
    if kind == "closed":
        file.close()
    made = own_copy(Held(file))
    assert made.held is file
    file.close()


def test_a_large_list_of_paths_is_not_looked_through() -> None:
    paths = [Helper()] * 1001
    assert own_copy(Held(paths)).held is paths


def test_torch_tensors_as_a_data_set_take_no_memory() -> None:
    data = TensorDataset(torch.zeros(1 << 20, 3), torch.zeros(1 << 20, 2))
    assert own_copy(data).tensors is data.tensors


def test_a_deep_chain_of_objects_is_no_error() -> None:
    first = here = Held(None)
    for _ in range(5000):
        here.rest = Held(None)
        here = here.rest
    assert own_copy(Held(first)).held is not first


def test_what_cannot_be_copied_is_shared_and_told(caplog: pytest.LogCaptureFixture) -> None:
    data = Held(Unwilling())
    assert own_copy(data) is data
    (record,) = caplog.records
    assert "Held cannot be copied for each thread (no)" in record.getMessage()


def test_each_thread_has_one_copy_and_the_main_thread_the_original() -> None:
    helper = Helper()
    assert mine(helper) is helper
    seen: list[Helper] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.extend([mine(helper), mine(helper)]))
        thread.start()
        thread.join()
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert len({id(helper), id(seen[0]), id(seen[2])}) == 3


def test_a_thread_that_outlives_many_objects_does_not_keep_them_all() -> None:
    kept: list[int] = []

    def run() -> None:
        last = [weakref.ref(own) for own in (mine(Held(k)) for k in range(500))]
        gc.collect()
        kept.append(sum(ref() is not None for ref in last))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert 0 < kept[0] <= 64


def test_a_copy_does_not_end_what_the_original_uses() -> None:
    ended: list[object] = []

    class Ending(Held):
        def __del__(self) -> None:
            ended.append(self.held)

    data = Ending({})
    made = own_copy(data)
    assert isinstance(made, Ending)
    assert made.held is not data.held
    del made
    gc.collect()
    assert not ended
    del data
    gc.collect()
    assert ended == [{}]


def test_weak_references_and_caches_have_the_state_of_their_thread() -> None:
    counter = Counter()
    data = Held(counter)
    data.rest, data.tensor = weakref.ref(counter), functools.lru_cache(2)(counter.__call__)
    made = own_copy(data)
    assert made.rest() is made.held
    assert [made.tensor(), made.tensor(), made.held()] == [1, 1, 2]
    assert counter.value == 0


def test_a_database_has_a_connection_for_each_thread(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "data")) as first:
        first.execute("create table t (v integer)")
        first.execute("insert into t values (7)")
        first.commit()
        data = Held(first)
        data.rest = first.cursor()
        made = own_copy(data)
        assert made.rest.connection is made.held is not first
        seen: list[Any] = []
        thread = threading.Thread(
            target=lambda: seen.extend(made.held.execute("select v from t").fetchall())
        )
        thread.start()
        thread.join()
        made.held.close()
        assert seen == first.execute("select v from t").fetchall() == [(7,)]


def test_what_a_function_collects_outside_is_one_list() -> None:
    seen: list[int] = []
    own_copy(Held(lambda value: seen.append(value))).held(1)
    assert seen == [1]


def test_many_nested_objects_are_not_all_looked_at() -> None:
    """The small attributes are, wherever they stand."""
    data = Held([[[Helper()] * 3 for _ in range(900)] for _ in range(900)])
    data.rest = Counter()
    made = own_copy(data)
    assert made.rest is not data.rest
