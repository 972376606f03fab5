"""Several ranks: one order, one set of pixels, few bytes between nodes."""

import json
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.loader.planned_traffic import job_over, traffic
from dlio.plan.block_order import BlockOrder
from dlio.plan.order import Order
from dlio.plan.placement import HomeNode
from dlio_staging.pack_folder import pack
from tests.conftest import shared_folders_of

pytestmark = pytest.mark.mpi
BODY = str(Path(__file__).with_name("ranks_checks.py"))
N = 203
BATCH = 4


class Job(NamedTuple):
    """Ranks that go through two epochs as `ranks_checks.py` has it."""

    ranks: int
    nodes: int = 1
    mode: str = "batch"
    batch: int = BATCH
    tiers: str = "ram:64MiB"
    """`ram:half` holds a quarter of the data on each node."""
    source_order: str = "sample"
    leave: int = 0


Run = Callable[..., list[dict[str, Any]]]
ALONE = Job(1, batch=8)
DAILY = (
    ALONE,
    Job(2, 2, tiers="none"),
    Job(2, 2, tiers="ram:half"),
    Job(2, 2, "global", batch=2, leave=3),
    Job(4, 2),
    Job(4, 2, "global", batch=2),
    Job(4, 2, "partial(0.3)"),
    Job(4, 2, "ring"),
    Job(4, 1, "global"),
    Job(4, 2, batch=2, tiers="ram:half", source_order="block(8)"),
)
"""Those of the same number of ranks run one after the other: starts take most of the time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import small_pictures

    root = tmp_path_factory.mktemp("ranks") / "pictures"
    small_pictures(root, images=N)
    return root


@pytest.fixture(scope="module")
def run(
    mpirun: Callable[..., subprocess.CompletedProcess[str]],
    folder: Path,
    soon: Callable[[Callable[[], bool]], bool],
) -> Run:
    reader = open_reader(str(folder))
    half = f"ram:{int(reader.sizes.sum()) // 4}B"
    finished: dict[Job, list[dict[str, Any]]] = {}

    def arguments(job: Job) -> list[str | int]:
        tiers = job.tiers.replace("ram:half", half)
        return [tiers, job.mode, job.source_order, job.nodes, job.batch, job.leave]

    def run(job: Job, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        if env is None and job in finished:
            return finished[job]
        jobs = [each for each in DAILY if each.ranks == job.ranks] if job in DAILY else [job]
        listed = json.dumps([arguments(each) for each in jobs])
        done = mpirun(job.ranks, "-W", "error", BODY, str(folder), listed, env=env)
        assert done.returncode == 0, done.stderr
        by_rank: dict[int, list[dict[str, Any]]] = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                report = json.loads(line)
                by_rank.setdefault(report["rank"], []).append(report)
        assert soon(lambda: not shared_folders_of(reader.fingerprint))
        reports = zip(*(by_rank[rank] for rank in range(job.ranks)), strict=True)
        results = dict(zip(jobs, map(list, reports), strict=True))
        if env is None:
            finished.update(results)
        return results[job]

    return run


def _global_batches(reports: list[dict[str, Any]], epoch: int) -> list[list[int]]:
    """Each step's samples over all ranks, sorted."""
    steps = [rank["epochs"][epoch]["steps"] for rank in reports]
    assert len({len(each) for each in steps}) == 1
    return [sorted(chain(*parts)) for parts in zip(*steps, strict=True)]


def _pixels(reports: list[dict[str, Any]], epoch: int) -> dict[str, str]:
    merged: dict[str, str] = {}
    for rank in reports:
        assert not merged.keys() & rank["epochs"][epoch]["digests"].keys()
        merged.update(rank["epochs"][epoch]["digests"])
    return merged


def _bytes(reports: list[dict[str, Any]], epoch: int, place: str) -> int:
    return sum(int(rank["epochs"][epoch]["stats"]["bytes"][place]) for rank in reports)


def test_any_number_of_ranks_sees_the_same_batches_and_pixels(run: Run) -> None:
    """Equal global batches on 1, 2 and 4 ranks, in both modes."""
    runs = [run(ALONE), run(Job(2, 2, tiers="none")), run(Job(4, 2, "global", batch=2))]
    for epoch in (0, 1):
        expected = Order(N, 3, epoch).samples(np.arange(N)).tolist()
        batches = [sorted(expected[k : k + 8]) for k in range(0, N, 8)]
        for reports in runs:
            assert _global_batches(reports, epoch) == batches
            assert len(_pixels(reports, epoch)) == N
            assert _pixels(reports, epoch) == _pixels(runs[0], epoch)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("mode", ["batch", "global"])
@pytest.mark.daily("batch-4-2")
def test_the_job_reads_the_source_once_and_peers_move_what_the_mode_says(
    run: Run, folder: Path, ranks: int, nodes: int, mode: str
) -> None:
    size = int(open_reader(str(folder)).sizes.sum())
    reports = run(Job(ranks, nodes, mode))
    assert _pixels(reports, 1) == _pixels(run(ALONE), 1)
    assert size <= _bytes(reports, 0, "source") <= 1.02 * size
    assert _bytes(reports, 1, "source") == 0
    peer = _bytes(reports, 1, "peer")
    assert peer + _bytes(reports, 1, "ram") == size
    assert sum(rank["epochs"][1]["stats"]["sent"] for rank in reports) == peer
    assert sum(rank["epochs"][1]["stats"]["late"] for rank in reports) == 0
    share = 1 - 1 / nodes
    if mode == "global":
        # Homes are drawn anew with the files' times: four standard deviations of 203 samples.
        assert peer / size == pytest.approx(share, abs=0.16)
    else:
        assert 0 < peer / size < 0.6 * share


@pytest.mark.parametrize(("mode", "moved"), [("local", 0.0), ("partial(0.3)", 0.3)])
@pytest.mark.daily("partial(0.3)-0.3")
def test_inexact_modes_give_each_sample_once_and_move_their_fraction(
    run: Run, folder: Path, mode: str, moved: float
) -> None:
    size = int(open_reader(str(folder)).sizes.sum())
    reports = run(Job(4, 2, mode))
    for epoch in (0, 1):
        assert sorted(chain(*_global_batches(reports, epoch))) == list(range(N))
        assert len({len(rank["epochs"][epoch]["steps"]) for rank in reports}) == 1
    assert _bytes(reports, 1, "source") == 0
    peer = _bytes(reports, 1, "peer")
    assert sum(rank["epochs"][1]["stats"]["sent"] for rank in reports) == peer
    assert sum(rank["epochs"][1]["stats"]["late"] for rank in reports) == 0
    # Of two nodes' exchanges half are with their own; homes are even to about a block.
    assert peer / size == pytest.approx(moved / 2, abs=0.06)


@pytest.mark.parametrize(
    ("ranks", "nodes", "mode"),
    [(4, 2, "batch"), (4, 2, "ring"), (4, 2, "partial(0.3)"), (4, 4, "global")],
)
@pytest.mark.daily("4-2-ring")
def test_messages_and_bytes_are_those_that_were_forecast(
    run: Run, folder: Path, ranks: int, nodes: int, mode: str
) -> None:
    reports = run(Job(ranks, nodes, mode))
    named = tuple(HomeNode(name, (64 << 20,)) for name in reports[0]["nodes"])
    reader = open_reader(str(folder))
    assert reports[0]["key"] == reader.fingerprint
    job = job_over(reader, named, ranks // nodes, BATCH, mode, seed=3)
    for epoch in (0, 1):
        expected = traffic(job, epoch)
        stats = [rank["epochs"][epoch]["stats"] for rank in reports]
        assert sum(each["messages"] for each in stats) == expected.messages
        assert sum(each["sent"] for each in stats) == expected.moved
        assert sum(each["bytes"]["peer"] for each in stats) == expected.moved
        # One for each pair of ranks and window, at the most.
        assert expected.messages <= ranks * expected.peers * expected.windows
    assert expected.source == 0
    assert _bytes(reports, 1, "ram") + _bytes(reports, 1, "peer") == sum(expected.tiers)


def test_ranks_of_a_node_share_its_tiers_and_send_nothing(run: Run, folder: Path) -> None:
    size = int(open_reader(str(folder)).sizes.sum())
    reports = run(Job(4, 1, "global"))
    assert _bytes(reports, 0, "source") <= 1.02 * size
    assert _bytes(reports, 1, "ram") == size
    assert _bytes(reports, 0, "peer") == 0


def test_half_the_capacity_leaves_half_to_the_source(run: Run, folder: Path) -> None:
    size = int(open_reader(str(folder)).sizes.sum())
    reports = run(Job(2, 2, tiers="ram:half"))
    assert _bytes(reports, 1, "source") / size == pytest.approx(0.5, abs=0.04)
    assert sum(_bytes(reports, 1, place) for place in ("source", "peer", "ram")) == size


@pytest.mark.parametrize(("tiers", "share"), [("none", 1.0), ("ram:half", 0.5)])
@pytest.mark.parametrize("mode", ["batch", "global"])
@pytest.mark.daily("batch-ram:half-0.5")
def test_blocks_that_no_tier_holds_are_read_once_by_one_rank_of_the_job(
    run: Run, folder: Path, mode: str, tiers: str, share: float
) -> None:
    reader = open_reader(str(folder))
    size = int(reader.sizes.sum())
    reports = run(Job(4, 2, mode, 2, tiers, "block(8)"))
    for epoch in (0, 1):
        assert sorted(chain(*_global_batches(reports, epoch))) == list(range(N))
        assert _pixels(reports, epoch).keys() == _pixels(reports, 0).keys()
        assert sum(rank["epochs"][epoch]["stats"]["late"] for rank in reports) == 0
    # Ranks that wait for nobody leave each other's blocks to the next pass.
    first, second = (_bytes(reports, epoch, "source") / size for epoch in (0, 1))
    assert 0.9 < first < 1.06
    assert first + second < 2.06 * share + (0 if tiers == "none" else 1 - share)
    moved = _bytes(reports, 1, "peer") / size
    assert moved == pytest.approx(0.5, abs=0.16) if mode == "global" else moved < 0.3
    order = BlockOrder(N, 3, 1, True, reader.layout, 8)
    expected = order.samples(np.arange(N)).tolist()
    assert _global_batches(reports, 1) == [sorted(expected[k : k + 8]) for k in range(0, N, 8)]


def test_what_tiers_hold_compressed_travels_compressed(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    values = np.repeat(np.arange(400 * 50, dtype=np.int64).reshape(400, 50), 40, axis=1)
    np.save(tmp_path / "values.npy", values)
    pack(str(tmp_path / "values.npy"), str(tmp_path / "packed"), compress="lz4")
    body = str(Path(__file__).with_name("compressed_checks.py"))
    done = mpirun(2, "-W", "error", body, str(tmp_path / "packed"))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(chain(*(rank["samples"] for rank in reports))) == list(range(400))
    assert all(rank["right"] and rank["late"] == 0 for rank in reports)
    sent, received = (sum(rank[key] for rank in reports) for key in ("sent", "peer"))
    assert received == pytest.approx(values.nbytes / 2, rel=0.2)
    assert 0 < sent < received / 8


@pytest.mark.parametrize("level", ["funneled", "serialized"])
@pytest.mark.nightly
def test_mpi_with_fewer_threads_brings_the_same(run: Run, level: str) -> None:
    env = {"MPI4PY_RC_THREAD_LEVEL": level}
    reports = run(Job(3, 3, "global", leave=2), env=env)
    plain = run(Job(3, 3, "global"))
    for epoch in (0, 1):
        assert _pixels(reports, epoch) == _pixels(plain, epoch)
        assert sum(rank["epochs"][epoch]["stats"]["late"] for rank in reports) == 0


@pytest.mark.parametrize("mode", ["batch", "global", "partial(0.5)"])
@pytest.mark.daily("global")
def test_leaving_early_leaves_no_message_behind(run: Run, mode: str) -> None:
    reports = run(Job(2, 2, mode, batch=2, leave=3))
    for epoch in (0, 1):
        assert sorted(chain(*_global_batches(reports, epoch))) == list(range(N))
    assert sum(rank["epochs"][0]["stats"]["late"] for rank in reports) == 0
