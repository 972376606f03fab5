"""Metadata operations are measured, and nothing is left behind."""

import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.util.threads import Workers
from dlio_bench.emulated import emulated_mount as slowfs
from dlio_bench.storage_cases import metadata
from dlio_bench.storage_cases.metadata import OPERATIONS, MetadataRate, measure_metadata


def test_every_operation_is_counted_and_the_folder_is_as_before(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    rates = measure_metadata(str(tmp_path), files=70, threads=3)
    assert [each.operation for each in rates] == list(OPERATIONS)
    for rate in rates:
        assert rate.count == 210
        assert len(rate.latencies_s) == (3 if rate.operation == "list" else 210)
        assert 0 < rate.percentile(0.5) <= rate.percentile(0.99) <= rate.seconds
        assert rate.per_second == 210 / rate.seconds
    assert os.listdir(tmp_path) == ["mine"]


def test_the_operations_are_really_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {name: [] for name in OPERATIONS}
    counting = threading.Lock()
    plain = dict(metadata._OPERATE)

    def counted(name: str, path: str) -> None:
        before = os.path.exists(path)
        plain[name](path)
        with counting:
            seen[name].append(path)
        assert before == (name != "create")
        assert os.path.exists(path) == (name != "remove")

    for name in OPERATIONS:
        monkeypatch.setitem(metadata._OPERATE, name, partial(counted, name))
    measure_metadata(str(tmp_path), files=5, threads=2)
    files = sorted(seen["create"])
    assert len(set(files)) == 10
    assert len({os.path.dirname(path) for path in files}) == 2
    for name in ("stat", "open", "remove"):
        assert sorted(seen[name]) == files
    assert len(seen["list"]) == 2


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error_or_ctrl_c(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: str) -> None:
        if path.endswith("f0000003"):
            raise failure

    if isinstance(failure, OSError):
        monkeypatch.setitem(metadata._OPERATE, "stat", failing)
        with pytest.raises(dlio.UsageError, match="free some space, or inodes, there"):
            measure_metadata(str(tmp_path), files=10, threads=2)
    else:
        made = threading.Event()
        plain = metadata._OPERATE["create"]

        def create(path: str) -> None:
            plain(path)
            made.set()

        monkeypatch.setitem(metadata._OPERATE, "create", create)

        def interrupted(self: object, timeout_s: float | None = None) -> bool:
            assert made.wait(60)
            raise failure

        monkeypatch.setattr(Workers, "wait", interrupted)
        monkeypatch.setattr(Workers, "_ended_within", _joined)
        with pytest.raises(KeyboardInterrupt):
            measure_metadata(str(tmp_path), files=100_000, threads=2)
    assert os.listdir(tmp_path) == []


def _joined(workers: Workers, _: float) -> list[str]:
    for thread in workers.threads:
        thread.join(60)
    return workers.alive()


def test_a_folder_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(dlio.UsageError, match="create the folder"):
        measure_metadata(str(tmp_path / "no"))
    (tmp_path / "file").write_text("")
    with pytest.raises(dlio.UsageError, match="name a folder"):
        measure_metadata(str(tmp_path / "file"))
    with pytest.raises(dlio.UsageError, match="at least one of each"):
        measure_metadata(str(tmp_path), files=0)


@pytest.mark.skipif(slowfs.why_not() is not None, reason="needs FUSE")
def test_a_read_only_file_system_is_said_to_be_so(tmp_path: Path) -> None:
    with (
        slowfs.slow_mount(str(tmp_path)) as mounted,
        pytest.raises(dlio.UsageError, match="read-only, so that only reading can be measured"),
    ):
        measure_metadata(mounted)


def test_percentiles_are_those_of_the_operations() -> None:
    rate = MetadataRate("stat", 100, 2.0, np.arange(1, 101) / 1e3)
    assert rate.per_second == 50
    assert rate.percentile(0.5) == 0.051
    assert rate.percentile(0.99) == 0.1
