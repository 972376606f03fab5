"""The case cores of `dlio bench loader`: as many cores as one likes, emulated by threads that sleep
as long as a decode would take.

What is left is what a loader itself does for a sample, and whether its threads are in each other's
way: a sleep needs no core. Contenders differ in who sleeps:

    PythonThreads   dlio.DataLoader's threads, in a transform= of the user, which stays Python's
    NativeThreads   its native threads, which sleep in place of decoding; all else is the loader's
    Prototype       threads of a C library, for which a loop submits and awaits whole batches: no
                    epochs, tiers or checksums
"""

import contextlib
import ctypes
import itertools
import operator
import os
import statistics
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

import dlio
from dlio.data.schema import Schema
from dlio.image.native import pool_library
from dlio.image.native.build import compiler
from dlio.loader.contract import Sample
from dlio.loader.planned_engine.native_pool import NativeRecipe
from dlio.util.units import counted
from dlio_bench.bench_processes import one_thread
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.repeats import spread, turns
from dlio_bench.results.terminal import format_figure, show_notes, steps, table

DECODE_MS: Final = 1.1
"""Milliseconds of a decode of 110 kB to 224 pixels, which the sleeps stand for."""
_AHEAD: Final = 4
"""Batches that are submitted to a pool before the first is awaited."""
_PICTURES: Final = 40_000
"""Pictures of a pass. Passes follow each other; long ones, as threads begin anew in each."""
_SIDE: Final = 224
_NUMBERS: Final = Schema((("number", "int64"),))
_DEADLINE_S: Final = 60.0
_TURNS: Final = 4
"""Measurements of the small operations, alone and next to the threads."""
_REST_S: Final = 1.0
"""Seconds in which all batches that may be made ahead are made."""
_OPERATIONS: Final = 64
"""Operations between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class EmulatedCores:
    """Number and work of emulated cores, and how long to measure."""

    cores: int
    """Threads that sleep."""
    decode_ms: float
    batch_size: int
    seconds: float
    """Seconds of a measurement."""

    @property
    def ideal_per_s(self) -> float:
        """Samples/s of threads that do nothing but sleep."""
        return 1000 * self.cores / self.decode_ms


class CoresContender(ABC):
    """Somebody who loads batches with threads that sleep."""

    title: str

    def missing(self) -> str | None:
        """Why it cannot be measured here; None if it can."""
        return None

    @abstractmethod
    def open(self, emulated: EmulatedCores) -> AbstractContextManager[Iterator[int]]:
        """Start its threads; give the numbers of samples of batches, as they come, without end."""


# dlio's loader


class _Pictures(CoresContender):
    """dlio.DataLoader over the smallest pictures, from the RAM tier."""

    @contextmanager
    def _loader(
        self, emulated: EmulatedCores, side: int, transform: Callable[[Sample], Sample] | None
    ) -> Iterator[dlio.DataLoader]:
        with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
            path = os.path.join(scratch, "pictures.parquet")
            _write_pictures(path, _PICTURES)
            with (
                dlio.open(
                    f"{path}::image,label", tiers="ram:1GiB", image_size=side, transform=transform
                ) as data,
                dlio.DataLoader(
                    data, emulated.batch_size, shuffle=True, num_workers=emulated.cores
                ) as loader,
            ):
                yield loader


class PythonThreads(_Pictures):
    """Decode threads of Python, which sleep in a function of the user."""

    title = "dlio.DataLoader, Python threads (transform=)"

    @contextmanager
    def open(self, emulated: EmulatedCores) -> Iterator[Iterator[int]]:
        seconds = emulated.decode_ms / 1000

        def sleep(picture: Sample) -> Sample:
            time.sleep(seconds)
            return picture

        with self._loader(emulated, 8, sleep) as loader:
            yield _sizes(loader)


class NativeThreads(_Pictures):
    """Native threads, which sleep in place of decoding; the rest of the loader is as it is."""

    title = "dlio.DataLoader, native threads"

    def missing(self) -> str | None:
        return None if pool_library.find() is not None else pool_library.name()

    @contextmanager
    def open(self, emulated: EmulatedCores) -> Iterator[Iterator[int]]:
        with (
            _sleeping_recipes(emulated.decode_ms / 1000),
            self._loader(emulated, _SIDE, None) as loader,
        ):
            for _ in loader:  # The first pass fills the tier, and is made by Python's threads.
                pass
            yield _sizes(loader)


def _sizes(loader: dlio.DataLoader) -> Iterator[int]:
    return (len(labels) for _ in itertools.count() for _, labels in loader)


@contextmanager
def _sleeping_recipes(seconds: float) -> Iterator[None]:
    """Have native threads sleep for each sample of the loaders that begin meanwhile."""
    made = NativeRecipe.__init__

    def sleeping(self: NativeRecipe, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "sleep_s": seconds})

    with mock.patch.object(NativeRecipe, "__init__", sleeping):
        yield


def _write_pictures(path: str, count: int) -> None:
    """Write a table of the same picture of 8 x 8 pixels, so many times."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import simplejpeg

    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    encoded = simplejpeg.encode_jpeg(pixels, quality=90)
    pq.write_table(pa.table({"image": [encoded] * count, "label": np.arange(count) % 10}), path)


# The prototype


class Prototype(CoresContender):
    """One call submits a batch to C threads, one awaits it; Python prepares arrays for whole
    batches, with addresses, sizes, random numbers and memory for the pixels."""

    title = "prototype's loop (C threads)"

    def missing(self) -> str | None:
        return None if compiler() else "no C compiler was found (install gcc or clang, or set CC)"

    @contextmanager
    def open(self, emulated: EmulatedCores) -> Iterator[Iterator[int]]:
        under_way: deque[tuple[int, Any, Any, Any]] = deque()
        size, sleep_ns = emulated.batch_size, round(emulated.decode_ms * 1e6)
        starts = np.arange(1 << 16, dtype=np.int64)
        with contextlib.closing(PrototypePool(emulated.cores)) as pool:

            def batches() -> Iterator[int]:
                for number in itertools.count():
                    random = np.random.default_rng(number)
                    chosen = random.integers(0, len(starts) - 1, size)
                    pixels = np.empty((size, _SIDE, _SIDE, 3), np.uint8)
                    uniforms = random.random((size, 5))
                    tasks = np.zeros((size, 13), np.int64)
                    tasks[:, 0] = starts[chosen]
                    tasks[:, 1] = starts[chosen + 1] - starts[chosen]
                    tasks[:, 7] = tasks[:, 8] = _SIDE
                    tasks[:, 11] = pixels.ctypes.data + np.arange(size) * pixels[0].nbytes
                    under_way.append((pool.submit(size, sleep_ns), pixels, uniforms, tasks))
                    if len(under_way) > _AHEAD:
                        handle, pixels, *_ = under_way.popleft()
                        pool.wait(handle)
                        yield len(torch.from_numpy(pixels).movedim(-1, -3))

            try:
                yield batches()
            finally:
                for handle, *_ in under_way:
                    pool.wait(handle)


class PrototypePool:
    """The prototype's pool, `sleeping_pool.c`, compiled when it is asked for."""

    def __init__(self, threads: int) -> None:
        command, here = compiler(), os.path.dirname(os.path.abspath(__file__))
        assert command is not None
        with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
            path = os.path.join(scratch, "pool.so")
            flags = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread")
            source = os.path.join(here, "sleeping_pool.c")
            subprocess.run([*command, *flags, "-o", path, source], check=True)
            self._library = ctypes.CDLL(path)
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self._library.pool_open.restype = self._library.pool_submit.restype = pointer
        self._library.pool_submit.argtypes = (pointer, whole, whole)
        self._library.pool_wait.argtypes = (pointer, pointer)
        self._library.pool_close.argtypes = (pointer,)
        self._pool = self._library.pool_open(threads)

    def submit(self, count: int, sleep_ns: int) -> int:
        """Begin a batch of so many samples, each of which sleeps; return its handle."""
        handle: int = self._library.pool_submit(self._pool, count, sleep_ns)
        return handle

    def wait(self, handle: int) -> None:
        """Wait for a batch; its handle is not used again."""
        self._library.pool_wait(self._pool, handle)

    def close(self) -> None:
        """End the threads; all batches have been waited for."""
        self._library.pool_close(self._pool)


CONTENDERS_FOR_CORES: Final[dict[str, CoresContender]] = {
    "python": PythonThreads(),
    "prototype": Prototype(),
    "native": NativeThreads(),
}
"""Who sleeps, by name."""


# The measurement


def cores(
    repeats: int,
    batch_size: int,
    count: int,
    decode_ms: float = DECODE_MS,
    seconds: float = 2.0,
) -> dict[str, object]:
    """Batches of each contender, in turn, for `seconds` after the first few, `repeats` times: with
    nothing else, and next to a thread of small operations of torch.

    Returns samples/s, the share of `count` / `decode_ms`, microseconds on processors of all Python
    threads for a sample (without that of the operations), and the percent by which the operations
    are slower than alone. `absent` has the reasons of those that cannot be measured here.
    """
    emulated = EmulatedCores(count, decode_ms, batch_size, seconds)
    absent = {
        name: why
        for name, each in CONTENDERS_FOR_CORES.items()
        if (why := each.missing()) is not None
    }
    names = [name for name in CONTENDERS_FOR_CORES if name not in absent]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    # Shared by the threads that this one starts, of whichever kind.
    with _exact_sleeps(), one_thread():
        for repeat, name in steps(list(turns(names, repeats)), "{0[1]}, repeat {0[0]}".format):
            runs[name].append(_measured(CONTENDERS_FOR_CORES[name], emulated))
            assert repeat < repeats
    return {
        "emulated": asdict(emulated),
        "ideal": emulated.ideal_per_s,
        "absent": absent,
        **{
            name: {key: spread([run[key] for run in each]) for key in each[0]}
            for name, each in runs.items()
        },
        "machine": describe_machine(("dlio", "torch", "numpy")),
    }


def show_cores(report: Mapping[str, object]) -> None:
    """Print the table of a report of `cores`."""
    figures: Any = report
    emulated = figures["emulated"]
    title = (
        f"{counted(emulated['cores'], 'thread')} that sleep {emulated['decode_ms']:g} ms a "
        "sample: ideal "
        f"{figures['ideal']:,.0f} samples/s, median (min to max)"
    )
    keys = ("samples_per_s", "ideal_share", "python_us", "slower_percent")
    headings = ("threads of", "samples/s", "of the ideal", "Python, us a sample", "slowed, %")
    rows = [
        (each.title, *(format_figure(figures[name][key]) for key in keys))
        for name, each in CONTENDERS_FOR_CORES.items()
        if name in figures
    ]
    table(title, headings, rows)
    show_notes(
        [
            f"left out: {CONTENDERS_FOR_CORES[name].title} ({why})"
            for name, why in figures["absent"].items()
        ]
    )


def _measured(contender: CoresContender, emulated: EmulatedCores) -> dict[str, float]:
    """Figures of one repeat."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}
    with contender.open(emulated) as batches:
        for _ in range(2 * _AHEAD):  # The first fill a tier, and wait for all threads to start.
            next(batches)
        _taken(batches, 0.0, emulated)
        before: dict[threading.Thread, float] = {}
        _look(before, earlier)
        after, began = before.copy(), time.perf_counter()
        count = _taken(batches, emulated.seconds, emulated, lambda: _look(after, earlier))
        spent = sum(after.values()) - sum(before.values())
        rate = count / (time.perf_counter() - began)
        # In turns: a machine of others is slower by more from one second to the next.
        alone, beside = zip(*(_operations(batches, emulated) for _ in range(_TURNS)), strict=True)
    return {
        "samples_per_s": rate,
        "ideal_share": rate / emulated.ideal_per_s,
        "python_us": 1e6 * spent / count,
        "operations_per_s": statistics.mean(alone),
        "operations_beside_per_s": statistics.mean(beside),
        "slower_percent": 100 * (1 - statistics.median(map(operator.truediv, beside, alone))),
    }


def _operations(batches: Iterator[int], emulated: EmulatedCores) -> tuple[float, float]:
    """Small operations a second while no batch is taken, and all threads have come to rest; and
    while batches are taken as they come."""
    seconds = emulated.seconds / _TURNS
    time.sleep(_REST_S)
    with SmallOperations() as alone:
        time.sleep(seconds)
    _taken(batches, 0.0, emulated)  # Those that were ready would be taken all at once.
    with SmallOperations() as beside:
        _taken(batches, seconds, emulated)
    return alone.rate, beside.rate


def _taken(
    batches: Iterator[int],
    seconds: float,
    emulated: EmulatedCores,
    each: Callable[[], object] = lambda: None,
) -> int:
    """Samples of the batches until the first one behind `seconds` that had to be waited for; `each`
    is called with every one.

    Batches that are made together come together. Measurements begin and end where one was waited
    for: else up to all others of such a group would be missing, several percent of two seconds.
    """
    waited_s = emulated.batch_size / emulated.ideal_per_s / 2
    last = time.perf_counter()
    until, count = last + seconds, 0
    for samples in batches:
        count += samples
        each()
        now = time.perf_counter()
        if now >= until and now - last > waited_s:
            break
        last = now
    return count


def _look(at: dict[threading.Thread, float], without: set[threading.Thread]) -> None:
    """Note the seconds that Python's threads have been on processors until now; those that have
    ended keep theirs."""
    for each in set(threading.enumerate()) - without:
        if each.ident is not None:
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                at[each] = time.clock_gettime(time.pthread_getcpuclockid(each.ident))


class SmallOperations:
    """A thread that does small operations of torch, as a training loop does. Owner: the caller, by
    `with`; `rate` is that of the whole time then, in operations a second."""

    def __init__(self) -> None:
        self.done = 0
        """Operations until now."""
        self.rate = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dlio-bench-operations")

    def __enter__(self) -> "SmallOperations":
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        self.rate = self.done / (time.perf_counter() - self._began)

    def _run(self) -> None:
        values, step = torch.zeros(64), torch.ones(64)
        while not self._stopping:
            for _ in range(_OPERATIONS):
                values.add_(step)
            self.done += _OPERATIONS


_PR_SET_TIMERSLACK: Final = 29


@contextmanager
def _exact_sleeps() -> Iterator[None]:
    """Have sleeps of this thread, and of those that it starts, end when they should: Linux lets
    them take 50 us longer, a twentieth of a decode."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "prctl"):
        yield
        return
    library.prctl(_PR_SET_TIMERSLACK, 1)
    try:
        yield
    finally:
        library.prctl(_PR_SET_TIMERSLACK, 0)  # That of the process's beginning.
