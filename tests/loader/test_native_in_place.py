"""Small samples of a RAM tier are read where they lie, and none dies of a file that is cut off."""

import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import dlio
from dlio.image.native import pool_library

pytestmark = [
    pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name()),
    pytest.mark.skipif(sys.platform != "linux", reason="files are read in place on Linux alone"),
]

_PROGRAM = '''
import faulthandler, os, sys
from ctypes import c_int64
import numpy as np
import xxhash
from dlio.data.schema import Schema
from dlio.loader.planned_engine.native_pool import (
    NativeArrays, NativeInput, NativeJob, NativePool, NativeRecipe
)
from dlio.storage.sample_locations import IN_PLACE, SampleLocations

BLOCK, COUNT = "00000007.blk", 300
os.chdir(sys.argv[1])
columns = int(sys.argv[2])
rows = np.arange(COUNT * columns, dtype=np.int64).reshape(COUNT, columns)
rows.tofile(BLOCK)
size = 8 * columns
recipe = NativeRecipe(Schema((("x", f"int64[{columns}]"),)), ["x"])
folder = os.open(".", os.O_RDONLY)


def made(pool, kept=IN_PLACE):
    """Return (rows that are made, whether the file is mapped)."""
    array = np.zeros_like(rows)
    digests = np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], np.uint64)
    located = SampleLocations.of(
        np.ones(COUNT, np.bool_), [], descriptor=folder, block=7, kept=kept,
        offset=np.arange(COUNT) * size, stored=size, raw=size, checked=1,
        digest=digests.view(np.int64),
    )
    given = NativeInput(np.arange(COUNT), located, np.full(COUNT, 7), None)
    job = NativeJob(recipe, 0, given, NativeArrays({"x": array}), pool.threads)
    pool.submit(job)
    ended = c_int64()
    while not pool.wait(job, 60, ended):
        pass
    slots = job.made()
    assert (array[slots] == rows[slots]).all()
    with open("/proc/self/maps") as maps:
        return len(slots), BLOCK in maps.read()
'''


def _run(tmp_path: Path, what: str, columns: int = 9) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", _PROGRAM + what, str(tmp_path), str(columns)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("columns", "kept", "is_mapped"),
    [(9, "IN_PLACE", True), (2048, "IN_PLACE", True), (2049, "IN_PLACE", False), (9, "1", False)],
)
def test_small_samples_of_memory_are_read_in_place(
    columns: int, kept: str, is_mapped: bool, tmp_path: Path
) -> None:
    done = _run(tmp_path, f"print(*made(NativePool(2), {kept}))", columns)
    assert done.stdout.split() == ["300", str(is_mapped)], done.stderr


def test_a_file_that_is_cut_off_loses_the_rows_behind_its_end_alone(tmp_path: Path) -> None:
    """Behind the end its page reads as zeros, which the checksums show."""
    what = """
faulthandler.enable()  # Has the signal first.
pool = NativePool(2)
assert made(pool) == (COUNT, True)
os.truncate(BLOCK, 4096)
count, _ = made(pool)
print(count)
rows.tofile(BLOCK)  # Written again: opened anew, as its file is not trusted any more.
print(made(pool)[0])
"""
    done = _run(tmp_path, what)
    assert done.stdout.split() == [str(4096 // 72), "300"], done.stderr


@pytest.mark.parametrize("cut", [100, 5000, 9000])
def test_parts_of_a_chunk_that_is_known_to_be_intact_are_no_zeros(cut: int, tmp_path: Path) -> None:
    """No checksum of such a chunk is compared again: zeros behind its end are not taken for it."""
    what = f"""
from dlio.image.native.pool_library import PIECE
size = columns * 8


def parts(pool):
    array = np.zeros_like(rows)
    pieces = np.zeros(COUNT, PIECE)
    pieces["at"] = np.arange(COUNT) * size
    pieces["to"] = array.ctypes.data + pieces["at"]
    pieces["count"] = 1
    pieces["count"][:, -1] = size
    located = SampleLocations.of(
        np.ones(COUNT, np.bool_), [], descriptor=folder, block=7, kept=IN_PLACE,
        offset=0, stored=rows.nbytes, raw=rows.nbytes, checked=1, digest=0,
    )
    given = NativeInput(
        np.arange(COUNT), located, np.full(COUNT, 7), None, pieces, intact=np.ones(8, np.uint8)
    )
    job = NativeJob(recipe, 0, given, NativeArrays({{"x": array}}), pool.threads)
    pool.submit(job)
    ended = c_int64()
    while not pool.wait(job, 60, ended):
        pass
    slots = job.made()
    assert (array[slots] == rows[slots]).all()
    return len(slots)


pool = NativePool(2)
assert parts(pool) == COUNT
with open("/proc/self/maps") as maps:
    assert BLOCK in maps.read()
os.truncate(BLOCK, rows.nbytes - {cut})
print(parts(pool))
"""
    done = _run(tmp_path, what)
    whole = (300 * 72 - cut) // 72
    assert done.stdout.split() == [str(whole)], done.stderr


def test_another_handler_of_the_signal_is_left_alone(tmp_path: Path) -> None:
    """Without ours a file that is cut off would kill: samples are read by calls then."""
    what = """
print(*made(NativePool(2)))
faulthandler.enable()
pool = NativePool(2)
os.truncate(BLOCK, 4096)
print(made(pool)[0])
"""
    done = _run(tmp_path, what)
    assert done.stdout.split() == ["300", "True", str(4096 // 72)], done.stderr


@pytest.mark.parametrize("before", ["", "faulthandler.enable()"])
def test_the_signal_of_others_goes_to_whoever_had_it(before: str, tmp_path: Path) -> None:
    what = f"""
{before}
assert made(NativePool(2)) == (COUNT, True)
print("made", flush=True)
os.kill(os.getpid(), {int(signal.SIGBUS)})
print("alive")
"""
    done = _run(tmp_path, what)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "made\n"
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(before)


def test_a_tier_that_is_cut_off_in_the_middle_of_a_pass_is_healed(tmp_path: Path) -> None:
    path, count = tmp_path / "rows.h5", 4000
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(count * 16).reshape(count, 16)
    with dlio.open(path, tiers="ram:64MiB", seed=0) as data:
        loader = dlio.DataLoader(data, 50, num_workers=2)
        for epoch in range(3):
            firsts = []
            for step, batch in enumerate(loader):
                rows = batch["x"] if isinstance(batch, dict) else batch
                firsts += rows[:, 0].tolist()
                if epoch and step == 5:
                    assert data.mounted is not None
                    tier = Path(data.mounted.hierarchy.tiers[0].path)
                    for block in tier.glob("*.blk"):
                        with block.open("r+b") as file:
                            file.truncate(block.stat().st_size // 3)
            assert sorted(firsts) == list(range(0, count * 16, 16))


_PASSES = """
import gc, os, sys
import dlio

os.chdir(sys.argv[1])


def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split("-")[0] for line in maps if ".blk" in line}


def opened():
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum(".blk" in os.readlink(each) for each in links if os.path.islink(each))


def rows(data):
    loader = dlio.DataLoader(data, 50, shuffle=True, num_workers=2)
    firsts = [int(each) for batch in loader for each in batch["x"][:, 0]]
    assert sorted(firsts) == list(range(0, 16 * 4000, 16))


data = dlio.open("rows.h5::x", tiers="ram:64MiB")
rows(data)
rows(data)
before = mapped()
assert before and not opened()
"""


@pytest.mark.parametrize(
    "end",
    [
        # Of all passes of a data set; with two at once, too.
        "rows(data)\nassert mapped() == before\n"
        "first, second = (iter(dlio.DataLoader(data, 50, num_workers=2)) for _ in range(2))\n"
        "for ours, theirs in zip(first, second, strict=True):\n"
        "    assert (ours['x'] == theirs['x']).all()\n"
        "assert mapped() == before and not opened()",
        "data.close()\nassert not mapped()",
        "del data\ngc.collect()\nassert not mapped()",
        # In the middle of a pass: at its end.
        "batches = iter(dlio.DataLoader(data, 50, num_workers=2))\nnext(batches)\n"
        "data.close()\nbatches.close()\nassert not mapped()",
        # A child has locks of its own.
        "child = os.fork()\nif not child:\n    rows(data)\n    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\nrows(data)\nassert mapped() == before",
    ],
    ids=["kept", "closed", "dropped", "closed-in-a-pass", "forked"],
)
def test_files_stay_mapped_as_long_as_their_data_set(tmp_path: Path, end: str) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.arange(4000 * 16).reshape(4000, 16)
    command = [sys.executable, "-c", _PASSES + end, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_each_of_many_blocks_has_a_place(tmp_path: Path) -> None:
    """Windows of a file of 400 MB had 6,250 blocks, of which 4,096 stayed mapped: each read of
    another opened its file anew."""
    what = """
from dlio.loader.planned_engine.native_pool import NativeFiles
for name in ("00000003.blk", "00004099.blk"):
    rows.tofile(name)
pool = NativePool(2, NativeFiles(5000))


def places():
    located = SampleLocations.of(
        np.ones(2, np.bool_), [], descriptor=folder, block=np.array([3, 4099]), kept=IN_PLACE,
        offset=0, stored=size, raw=size, digest=0,
    )
    array = np.zeros((2, columns), np.int64)
    given = NativeInput(np.arange(2), located, np.array([3, 4099]), None)
    job = NativeJob(recipe, 0, given, NativeArrays({"x": array}), 1)
    pool.submit(job)
    while not pool.wait(job, 60, c_int64()):
        pass
    assert (array == rows[0]).all()
    with open("/proc/self/maps") as maps:
        return sorted({line.split("/")[-1].strip() for line in maps if ".blk" in line})


places()
print(*places())
"""
    assert _run(tmp_path, what).stdout.split() == ["00000003.blk", "00004099.blk"]
