"""Batches of native threads are those of Python's, to the last bit, and nothing is lost by them."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import c_int64
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.data.schema import Schema
from dlio.errors import DecodeError, UsageError
from dlio.image.crop import DRAWS, Crop
from dlio.image.decoder import decode_whole
from dlio.image.native import pool_library
from dlio.image.png_library import pixels_of, use_png
from dlio.loader.planned_engine.batch_builders import PixelNumbers
from dlio.loader.planned_engine.native_pool import (
    NativeArrays,
    NativeInput,
    NativeJob,
    NativePool,
    NativeRecipe,
    boxes_of_crops,
)
from dlio.storage import decoded_tier
from dlio.storage.decoded_tier import DecodedTier
from dlio.storage.sample_locations import SampleLocations
from tests.conftest import in_time
from tests.image.jpegs import drawn
from tests.loader.native_checks import Spy, check_same

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())

CROPS = {
    "training": Crop(32, True),
    "squeezed": Crop(20, True, scale=(0.5, 0.6), ratio=(2.0, 3.0), upend=0.5),
    "wide": Crop(24, True, across=50),
    "middle": Crop(32, False),
    "resized": Crop(32, False, resize=33, across=40),
}


@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_native_crops_take_the_same_parts(crop: Crop) -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 700, (20_000, 2))
    sizes[:100] = generator.integers(1, 3, (100, 2))
    sizes[100:200, 0] = 1
    uniforms = generator.random((len(sizes), DRAWS))
    uniforms[:50] = 0.0
    uniforms[50:100] = np.nextafter(1.0, 0.0)
    made = boxes_of_crops(crop, sizes, uniforms)
    for (height, width), numbers, box in zip(sizes.tolist(), uniforms.tolist(), made, strict=True):
        wanted = crop.box(height, width, numbers)
        parts = wanted.top, wanted.left, wanted.height, wanted.width, wanted.flip, wanted.upend
        assert tuple(box) == parts, (height, width)


# Whole batches


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of JPEGs of all kinds, most of them baseline, and of other pictures."""
    folder = tmp_path_factory.mktemp("mixed")
    generator = np.random.default_rng(1)
    for number in range(60):
        height, width = generator.integers(30, 90, 2)
        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        options: dict[str, Any] = {"quality": 80, "subsampling": number % 3}
        kind = "jpg"
        if number % 15 == 3:
            options["progressive"] = True
        elif number % 15 == 7:
            image = image.convert("L")
        elif number % 15 == 11:
            kind, options = "png", {}
        path = folder / "abc"[number % 3] / f"{number}.{kind}"
        path.parent.mkdir(exist_ok=True)
        image.save(path, **options)
    return folder


@pytest.mark.parametrize(
    "opened",
    [
        {"image_size": 24},
        {"image_size": 40, "train": False},
        {"transform": T.RandomResizedCrop((20, 30), scale=(0.3, 0.9))},
    ],
    ids=["training", "evaluation", "rectangles"],
)
def test_pictures_are_the_same(
    mixed: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, opened: dict[str, Any]
) -> None:
    check_same(mixed, monkeypatch, opened)
    # All of the second epoch; those that native threads do not know are made by Python's.
    # Those that Python's threads were to read when a batch was begun are not among them.
    assert spy.given >= 40
    assert 4 <= spy.refused <= spy.given // 2


STEPS = {
    "float32": [T.ToFloat()],
    "normalized": [T.ToTensor(), T.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])],
    "bfloat16": [T.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4], dtype=torch.bfloat16)],
    "float16, erased": [T.ToFloat(torch.float16), T.RandomErasing(0.8)],
    "float64": [T.ToDtype(torch.float64), T.Normalize([100], [50], dtype=torch.float64)],
    "twice": [T.Normalize([0.5] * 3, [0.5] * 3), T.Normalize([0.1] * 3, [0.3] * 3)],
    "mixed": [T.Normalize([0.5] * 3, [0.5] * 3), T.MixUp(alpha=1.0)],
    "mixed with all": [T.ToFloat(), T.CutMix(alpha=1.0, partners="step")],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("tiers", ["ram:64MiB", "ram:64MiB:decoded"])
def test_numbers_are_the_same(
    mixed: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, steps: list[Any], tiers: str
) -> None:
    filled: list[int] = []
    fill = PixelNumbers.fill

    def count(self: PixelNumbers, slot: int, pixels: Any) -> None:
        filled.append(slot)
        fill(self, slot, pixels)

    monkeypatch.setattr(PixelNumbers, "fill", count)
    crop: list[Any] = [T.RandomResizedCrop(24), T.RandomHorizontalFlip()]
    opened = {"transform": T.Compose([*crop, *steps]), "tiers": tiers}
    check_same(mixed, monkeypatch, opened)
    assert spy.given >= 60
    # Those that native threads do not know, and the first epoch's.
    assert 0 < len(filled) < 240


@pytest.fixture(scope="module")
def pngs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of PNGs, most of them of kinds that the native threads know."""
    folder = tmp_path_factory.mktemp("pngs")
    generator = np.random.default_rng(5)
    modes = ("RGB", "L", "P", "RGBA", "RGB", "RGB", "LA", "1")
    for number in range(60):
        height, width = generator.integers(20, 46, 2)
        pixels = generator.integers(0, 256, (height, width, 4), np.uint8)
        image = Image.fromarray(pixels)
        if (mode := modes[number % len(modes)]) != "RGBA":
            image = Image.fromarray(pixels[..., :3].copy()).convert(mode)
        path = folder / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        # A gamma and a transparent colour, which change no pixel here.
        options: dict[str, Any] = {"transparency": 3} if number % 16 == 1 else {}
        image.save(path, pnginfo=gamma(), **options)
    return folder


def gamma() -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add(b"gAMA", (45_455).to_bytes(4, "big"))
    info.add_itxt("Title", "a text" * 50, zip=True)
    return info


@pytest.mark.skipif(not use_png(), reason="needs the libpng that OpenCV's wheels bring")
@pytest.mark.parametrize("size", [24, 10], ids=["24", "10: larger parts of areas"])
def test_pngs_are_the_same(
    pngs: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    check_same(pngs, monkeypatch, {"image_size": size})
    # Those that Python's threads were to read when a batch was begun are not among them.
    assert spy.given >= 40
    assert 4 <= spy.refused <= spy.given * 2 // 3


@pytest.mark.skipif(not use_png(), reason="needs the libpng that OpenCV's wheels bring")
def test_a_png_that_is_made_natively_has_the_pixels_of_opencv(pngs: Path) -> None:
    generator = np.random.default_rng(6)
    outcomes = {"same": 0, "left": 0}
    for path in sorted(pngs.glob("*/*.png")):
        whole = path.read_bytes()
        for _ in range(40):
            data = bytearray(whole)
            kind = int(generator.integers(4))
            at = int(generator.integers(len(data)))
            if kind == 1:
                data[at] ^= 1 << int(generator.integers(8))
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                data[at:at] = generator.bytes(int(generator.integers(1, 20)))
            made = pixels_of(data, 1 << 20)
            outcomes["left" if made is None else "same"] += 1
            if made is not None:
                assert np.array_equal(made, decode_whole(bytes(data), path)), path
    assert min(outcomes.values()) > 300, outcomes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of which crops are decoded at a half, a quarter and an eighth of their size."""
    folder = tmp_path_factory.mktemp("large")
    generator = np.random.default_rng(4)
    for number in range(120):
        kind = ("baseline", "1x2", "restarts", "rows", "lengths")[number % 5]
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(drawn(generator, kind, 180))
    return folder


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("size", [9, 16, 24])
def test_pictures_that_are_decoded_at_a_fraction_are_the_same(
    large: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, size: int, train: bool
) -> None:
    check_same(large, monkeypatch, {"image_size": size, "train": train})
    # OpenCV makes those that have to shrink again.
    assert spy.given >= 120
    assert spy.refused < spy.given // 4


def _ramp(image: torch.Tensor) -> torch.Tensor:
    return image.float().mul(torch.rand(())).flip(-1)


@pytest.mark.parametrize(
    "transform",
    [
        T.Compose([T.RandomResizedCrop(24), T.ColorJitter(0.4, 0.4, 0.4), T.RandomErasing()]),
        T.Compose([T.RandomResizedCrop(24), T.RandAugment(), _ramp]),
        _ramp,
    ],
    ids=["colours", "augmented", "own"],
)
def test_transforms_follow_native_crops(
    mixed: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, transform: Any
) -> None:
    opened = {"transform": transform, "image_size": 24 if transform is _ramp else None}
    check_same(mixed, monkeypatch, {name: each for name, each in opened.items() if each})
    assert spy.given >= 60


def test_an_error_of_a_transform_names_the_sample(mixed: Path) -> None:
    def fail(image: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with (
        dlio.open(str(mixed), image_size=24, tiers="ram:64MiB", transform=fail) as data,
        dlio.DataLoader(data, 8) as loader,
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match="no") as raised:
                list(loader)
            assert "sample 0" in raised.value.__notes__[0]


@pytest.mark.parametrize("train", [True, False])
def test_crops_of_images_that_a_tier_keeps_decoded_are_the_same(
    mixed: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    # Where decoding takes a few microseconds, the tier may find that keeping images does not pay.
    monkeypatch.setattr(decoded_tier, "_WORTH", 1e9)
    opened = {"image_size": 24, "train": train, "tiers": "ram:64MiB:decoded"}
    check_same(mixed, monkeypatch, opened)
    assert (spy.given > 0) == train
    assert spy.refused < spy.given // 2 or not train


def test_decoded_images_that_are_damaged_are_decoded_again(
    mixed: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded_tier, "_WORTH", 1e9)
    with (
        dlio.open(str(mixed), image_size=24, tiers="ram:64MiB:decoded") as data,
        dlio.DataLoader(data, 8) as loader,
    ):
        list(loader)
        list(loader)
        tiers = [each for each in gc.get_objects() if isinstance(each, DecodedTier)]
        for tier in tiers:
            tier._index[:, 5] += 1  # The checksums.
        before = spy.refused
        assert sum(len(labels) for _, labels in loader) == 60
        assert spy.refused > before


def test_a_resumed_pass_goes_on_with_the_same_pictures(mixed: Path, spy: Spy) -> None:
    with dlio.open(str(mixed), image_size=24, tiers="ram:64MiB") as data:
        loader = dlio.DataLoader(data, 8, shuffle=True)
        list(loader)
        passed = iter(loader)
        first = [next(passed)[0] for _ in range(3)]
        state = loader.state_dict()
        rest = [images for images, _ in passed]
        again = dlio.DataLoader(data, 8, shuffle=True)
        again.load_state_dict(state)
        for images, (same, _) in zip(rest, again, strict=True):
            assert torch.equal(images, same)
        assert len(first) + len(rest) == 8
    assert spy.given


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every kind of number."""
    path = tmp_path_factory.mktemp("rows") / "rows.h5"
    generator = np.random.default_rng(2)
    with h5py.File(path, "w") as file:
        for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
            high = min(np.iinfo(kind).max, 2**62)
            low = max(np.iinfo(kind).min, -(2**62))
            file[kind] = generator.integers(low, high, 300, np.dtype(kind).name, endpoint=True)
        for kind in ("float16", "float32", "float64"):
            values = generator.standard_normal(300).astype(kind)
            values[:4] = 0.0, -0.0, np.inf, np.finfo(kind).smallest_subnormal
            file[kind] = values
        file["bool"] = generator.random(300) < 0.5
        file["array"] = generator.standard_normal((300, 3, 5)).astype("float32")
        file["flags"] = generator.random((300, 7)) < 0.5
    return path


def test_numbers_and_arrays_are_the_same(
    rows: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(rows, monkeypatch, {})
    assert spy.given >= 300
    assert spy.refused == 0


def test_a_number_beyond_int64_is_refused_as_without_native_threads(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.full(20, 2**64 - 1, np.uint64)
    with (
        dlio.open(str(tmp_path / "rows.h5"), tiers="ram:8MiB") as data,
        dlio.DataLoader(data, 4) as loader,
    ):
        for _ in range(2):
            with pytest.raises(OverflowError):
                list(loader)


@pytest.mark.parametrize("fields", [1, 2])
def test_large_arrays_are_the_same(
    fields: int, spy: Spy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generator = np.random.default_rng(3)
    with h5py.File(tmp_path / "volumes.h5", "w") as file:
        file["x"] = generator.standard_normal((40, 30, 40, 50)).astype("float32")
        if fields > 1:
            file["y"] = generator.integers(0, 9, (40, 100), np.int16)
            file["label"] = generator.integers(0, 9, 40)
    check_same(tmp_path / "volumes.h5", monkeypatch, {}, batch_size=6)
    assert spy.given >= 40
    assert spy.refused == 0


def test_pictures_next_to_large_arrays_are_the_same(
    spy: Spy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generator = np.random.default_rng(5)
    with h5py.File(tmp_path / "both.h5", "w") as file:
        kind = h5py.special_dtype(vlen=np.dtype("uint8"))
        pictures = file.create_dataset("image", (12,), dtype=kind)
        for number in range(12):
            pictures[number] = np.frombuffer(drawn(generator, "baseline", 60), np.uint8)
        file["label"] = np.arange(12)
        file["embedding"] = generator.standard_normal((12, 17_000)).astype("float32")
    check_same(tmp_path / "both.h5", monkeypatch, {"image_size": 16}, batch_size=4)
    assert spy.given >= 12
    assert spy.refused < spy.given // 2


def test_a_data_set_that_is_closed_first_is_an_error(rows: Path) -> None:
    """The loader goes on with tables that it knows, of a tier whose folder is closed."""
    data = dlio.open(str(rows), tiers="ram:64MiB")
    with dlio.DataLoader(data, 4, num_workers=2, prefetch_factor=2) as loader:
        list(loader)
        passed = iter(loader)
        next(passed)
        data.close()
        with pytest.raises(UsageError, match=r"rows\.h5 was closed while a loader reads it"):
            list(passed)


def test_the_user_s_collate_runs_in_decode_threads(mixed: Path) -> None:
    threads: set[str] = set()

    def collate(samples: list[tuple[torch.Tensor, int]]) -> int:
        threads.add(threading.current_thread().name)
        return len(samples)

    with (
        dlio.open(str(mixed), image_size=24, tiers="ram:64MiB") as data,
        dlio.DataLoader(data, 8, collate_fn=collate) as loader,
    ):
        for _ in range(2):
            assert sum(loader) == 60
    assert all(name.startswith("dlio-decode") for name in threads)


def test_user_s_collate_gets_python_s_numbers(mixed: Path, spy: Spy) -> None:
    kinds: set[type] = set()

    def collate(samples: list[tuple[torch.Tensor, int]]) -> int:
        kinds.update(type(label) for _, label in samples)
        return len(samples)

    with (
        dlio.open(str(mixed), image_size=24, tiers="ram:64MiB") as data,
        dlio.DataLoader(data, 8, collate_fn=collate) as loader,
    ):
        assert sum(loader) == sum(loader) == 60
    assert kinds == {int}
    assert spy.given


# Damage


def _damage(folder: Path, change: Callable[[bytearray], None]) -> None:
    """Change a block's file as a disk may, behind the back of its tier."""
    (path,) = folder.rglob("*.blk")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_damage_is_healed(rows: Path, spy: Spy, tmp_path: Path) -> None:
    with (
        dlio.open(str(rows), tiers=f"{tmp_path}:8MiB") as data,
        dlio.DataLoader(data, 16, shuffle=True) as loader,
    ):
        list(loader)
        list(loader)
        assert spy.given
        _damage(tmp_path, lambda block: block.__setitem__(slice(-99, -1), bytes(98)))
        whole = list(loader)
        assert sum(len(batch["int8"]) for batch in whole) == 300
        assert loader.stats()["healed"] == 1
    assert spy.refused


def test_a_damaged_picture_is_skipped_or_named(mixed: Path, tmp_path: Path) -> None:
    for path in mixed.rglob("*.jpg"):
        copy = tmp_path / path.relative_to(mixed)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    broken = tmp_path / "a" / "30.jpg"
    broken.write_bytes(broken.read_bytes()[:-200])
    total = len(list(tmp_path.rglob("*.jpg")))
    with dlio.open(str(tmp_path), image_size=24, tiers="ram:64MiB") as data:
        with dlio.DataLoader(data, 8, on_error="skip") as loader:
            for _ in range(2):
                assert sum(len(labels) for _, labels in loader) == total - 1
        with dlio.DataLoader(data, 8) as loader, pytest.raises(DecodeError, match=r"30\.jpg"):
            list(loader)


# The pool


def _sleeping(seconds: float, count: int) -> NativeJob:
    recipe = NativeRecipe(Schema((("x", "int64"),)), (), sleep_s=seconds)
    nothing = np.zeros(count, np.int64)
    where = SampleLocations.of(np.ones(count, np.bool_), [])
    given = NativeInput(np.arange(count), where, nothing, None)
    return NativeJob(recipe, 0, given, NativeArrays({}), 1)


def test_closing_gives_up_what_no_thread_is_at() -> None:
    job = _sleeping(0.05, 1000)
    pool = NativePool(2)
    pool.submit(job)
    assert not pool.wait(job, 0.01, c_int64())
    pool.close()  # Not after 25 s, which the job would take.
    assert len(job.refused()) > 900


def test_a_job_that_has_not_begun_has_not_ended() -> None:
    with NativePool(1) as pool:
        assert not pool.has_ended(_sleeping(0.05, 10))


def test_closing_ends_a_wait_of_another_thread() -> None:
    pool, job = NativePool(2), _sleeping(0.05, 1000)
    pool.submit(job)
    ended: list[bool] = []
    other = threading.Thread(target=lambda: ended.append(pool.wait(job, 100, c_int64())))
    other.start()
    while not pool._waiting:
        time.sleep(0.001)
    pool.close()
    other.join(20)
    assert ended == [False]
    assert not pool.has_ended(job)
    pool.submit(_sleeping(0.05, 10))  # Nobody makes it.
    pool.wake()


def test_a_job_ends_with_all_its_samples() -> None:
    with NativePool(3) as pool:
        seen = c_int64()
        jobs = [_sleeping(0.0001, 50) for _ in range(20)]
        for job in jobs:
            pool.submit(job)
        for job in jobs:
            while not pool.wait(job, 5.0, seen):
                pass
            assert job.refused() == []
        assert all(map(pool.has_ended, jobs))


def test_a_loader_has_few_threads_of_python(rows: Path) -> None:
    with (
        dlio.open(str(rows), tiers="ram:64MiB") as data,
        dlio.DataLoader(data, 16, num_workers=16) as loader,
    ):
        list(loader)  # It fills the tier.
        before = {thread.ident for thread in threading.enumerate()}
        for _ in loader:
            own = [each.name for each in threading.enumerate() if each.ident not in before]
            assert len(own) <= 3, own


def _native_threads() -> set[str]:
    numbers = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # Threads of other tests may end meanwhile.
            if (task / "comm").read_text() == "dlio-native\n":
                numbers.add(task.name)
    return numbers


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read in /proc")
def test_persistent_workers_are_native_threads_that_stay(rows: Path) -> None:
    others = _native_threads()

    def own() -> set[str]:
        return _native_threads() - others

    with dlio.open(str(rows), tiers="ram:64MiB") as data:
        loader = dlio.DataLoader(data, 16, num_workers=2, persistent_workers=True)
        list(loader)
        # A thread has its name once it runs, which a busy machine delays.
        assert in_time(lambda: len(own()) == 2)
        first = own()
        for step, _ in enumerate(loader):  # A pass that is broken off leaves them nothing to do.
            if step == 2:
                break
        assert sum(len(batch["int8"]) for batch in loader) == 300
        assert own() == first
        loader.num_workers = 3
        list(loader)
        list(loader)
        assert in_time(lambda: len(own()) == 3)
        assert not own() & first
        del loader
        gc.collect()
        assert not own()


PROGRAM = """
import os, signal, sys, threading, time
import dlio
data = dlio.open(sys.argv[1], tiers="ram:64MiB")
loader = dlio.DataLoader(data, 4, num_workers=3)
list(loader)
batches = iter(loader)
next(batches)
print("under way", flush=True)
how = sys.argv[2]
time.sleep(float(sys.argv[3]))
if how == "signal":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
if how == "fork":
    if os.fork() == 0:
        assert sum(len(batch["int8"]) for batch in loader) == 300
        sys.exit(0)
    _, status = os.wait()
    assert status == 0, status
    assert sum(len(batch["int8"]) for batch in batches) == 296
    print("both", flush=True)
"""


@pytest.mark.cold
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [1, 100], ids=["once", "again and again"])
@pytest.mark.daily("end-once", "signal-once", "fork-once")
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("end", 0, ""), ("signal", -signal.SIGINT, "KeyboardInterrupt"), ("fork", 0, "")],
    ids=["end", "signal", "fork"],
)
def test_the_interpreter_ends_with_work_under_way(
    rows: Path, how: str, code: int, said: str, rounds: int
) -> None:
    for number in range(rounds):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(rows), how, str(0.0002 * number)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        assert ran.returncode == code, (number, ran.stderr)
        assert "under way" in ran.stdout
        assert said in ran.stderr
        if not said:
            assert ran.stderr == ""
