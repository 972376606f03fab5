"""Two jobs of one node that train on the same data read it once, and keep one copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlio.data.reader import open_reader
from tests.conftest import in_time, shared_folders_of

BODY = """
import json, os, sys, time
import dlio
from dlio.util.shared_folders import user_folder
with (
    dlio.open(sys.argv[1], tiers=sys.argv[2], image_size=32) as data,
    dlio.DataLoader(data, 4, shuffle=True, seed=int(sys.argv[3])) as loader,
):
    print("ready", flush=True)
    sys.stdin.readline()
    read = 0
    for _ in range(3):
        assert sum(len(images) for images, _ in loader) == len(data)
        read += loader.stats()["bytes"]["source"]
    print(json.dumps(read), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.daily("ram")
def test_two_jobs_read_once_and_share_one_copy(pictures: Path, tmp_path: Path, place: str) -> None:
    tiers = "ram:64MiB" if place == "ram" else f"{tmp_path}:64MiB"
    reader = open_reader(str(pictures))
    before = shared_folders_of(reader.fingerprint)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", BODY, str(pictures), tiers, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(2)
    ]
    try:
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
        for job in jobs:
            assert job.stdin is not None
            print(file=job.stdin, flush=True)
        read = [json.loads(job.stdout.readline()) for job in jobs if job.stdout]
        # Samples that were read on their own while their block came: half a percent each.
        assert sum(read) <= 1.02 * reader.sizes.sum()
        if place == "ram":
            (kept,) = shared_folders_of(reader.fingerprint) - before
        else:
            kept = tmp_path
        assert len(list(kept.rglob("*.blk"))) == reader.layout.blocks
        for job in jobs:
            assert job.stdin is not None
            print(file=job.stdin, flush=True)
            assert job.wait(120) == 0
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert in_time(lambda: shared_folders_of(reader.fingerprint) <= before)
