"""Profiles say when requests are answered, and are parsed from text."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dlio.errors import UsageError
from dlio_bench.emulated.emulated_folder import EmulatedFolder, RequestPace, Share
from dlio_bench.emulated.emulated_mount import Emulation
from dlio_bench.emulated.profile import NAMED, Profile, parse_profile
from dlio_bench.slowfs import SlowMount


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda s: seconds.append(round(s, 6)))
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    return seconds


def test_a_request_waits_for_its_latency_and_its_share(slept: list[float]) -> None:
    pace = RequestPace(0.005, Share(1000.0))
    for _ in range(3):
        pace.wait(100)
    assert slept == [0.1, 0.2, 0.3]
    RequestPace(0.005, Share(None)).wait(10**9, times=4)
    assert slept[-1] == 0.02


@pytest.mark.parametrize("name", NAMED)
def test_profiles_have_names(name: str) -> None:
    assert parse_profile(name) == NAMED[name]
    odd = replace(NAMED[name], seed=7, error_share=0.001, hang_share=1e-7)
    assert parse_profile(f"{name}+seed(7)+errors(0.1%)+hangs(1e-7)") == odd


def test_parts_are_mixed() -> None:
    profile = parse_profile("latency(20ms,open=5ms)+bandwidth(150MiB, each=50MiB/s)+tail(1%,10)")
    assert profile == Profile(
        latency_s=0.02,
        open_latency_s=0.005,
        bandwidth=150 * 2**20,
        each_bandwidth=50 * 2**20,
        tail_share=0.01,
        tail_times=10,
    )
    assert parse_profile("s3+bandwidth(1GiB)+latency(write=3ms)") == replace(
        NAMED["s3"], bandwidth=2**30, write_latency_s=0.003
    )
    assert parse_profile("latency(2ms)") == Profile(
        latency_s=0.002, open_latency_s=0.002, metadata_latency_s=0.002
    )
    assert not parse_profile("none+seed(2)").emulates


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("lustr-busy", "did you mean lustre-busy"),
        ("latency(20)", "write a number and s, ms or us"),
        ("latency(20ms,opne=5ms)", "did you mean open"),
        ("latency", "write latency\\(all="),
        ("s3(3)", "write s3"),
        ("bandwidth(fast)", "is not a size"),
        ("tail(2)", "between 0 and 1"),
        ("metadata(0)", "more than 0"),
        ("errors(x%)", "write 0.01 or 1%"),
        ("", "join some of"),
    ],
)
def test_wrong_profiles_name_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        Emulation(text)


def test_several_nodes_are_refused() -> None:
    Emulation("none").check_possible(nodes=4)
    with pytest.raises(UsageError, match="has 4 nodes"):
        Emulation("nfs").check_possible(nodes=4)


def test_the_tool_takes_parts_as_options_too() -> None:
    usual = SlowMount("a", "b").profile()
    assert usual == Profile(latency_s=0.005, open_latency_s=0.005, metadata_latency_s=0.005)
    mixed = SlowMount("a", "b", emulate="nfs", bandwidth="1MiB", eio_rate=0.5, seed=3).profile()
    assert mixed == replace(NAMED["nfs"], bandwidth=2.0**20, error_share=0.5, seed=3)


def test_each_kind_of_request_takes_its_own_time(slept: list[float], tmp_path: Path) -> None:
    profile = parse_profile(
        "latency(20ms,open=5ms,metadata=2ms,write=3ms,sync=8ms)+bandwidth(write=1MiB)"
    )
    folder = EmulatedFolder(str(tmp_path), profile, writable=True)
    handle = folder.create("/a", 0o644, os.O_RDWR)
    folder.write("/a", memoryview(bytes(1024)), 0, handle)
    folder.write("/a", memoryview(bytes(2**20)), 1024, handle)
    folder.fsync("/a", 0, handle)
    memory = bytearray(b"x" * 100)
    assert folder.read("/a", memoryview(memory), 0, handle) == 100
    assert memory == bytes(100)
    folder.getattr("/a")
    folder.getattr("/a", handle)
    folder.readdir("/", 0)
    folder.release("/a", handle)
    assert slept == [0.005, 0.003, 1.000977, 0.008, 0.02, 0.002, 0.002]


def test_the_metadata_rate_is_shared_by_all_kinds(slept: list[float], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    folder = EmulatedFolder(str(tmp_path), Profile(metadata_rate=10.0), writable=True)
    folder.getattr("/a")
    folder.release("/a", folder.open("/a", os.O_RDONLY))
    folder.mkdir("/b", 0o700)
    assert slept == [0.1, 0.2, 0.3]


def test_a_file_has_a_bandwidth_of_its_own(slept: list[float], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    folder = EmulatedFolder(str(tmp_path), Profile(each_bandwidth=1000.0))
    handles = [folder.open("/a", os.O_RDONLY) for _ in range(2)]
    for handle in (*handles, *handles):
        folder.read("/a", memoryview(bytearray(500)), 0, handle)
    for handle in handles:
        folder.release("/a", handle)
    assert slept == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


def test_the_tail_is_drawn_anew_when_a_file_is_opened_again(
    slept: list[float], tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))

    def reads(seed: int) -> list[float]:
        profile = Profile(latency_s=1.0, tail_share=0.3, tail_times=5.0, seed=seed)
        folder = EmulatedFolder(str(tmp_path), profile)
        del slept[:]
        for _ in range(2):
            handle = folder.open("/a", os.O_RDONLY)
            for offset in range(100):
                folder.read("/a", memoryview(bytearray(1)), offset, handle)
            folder.release("/a", handle)
        return [seconds for seconds in slept if seconds]

    first = reads(1)
    assert set(first) == {1.0, 5.0}
    assert 30 < first.count(5.0) < 90
    assert first[:100] != first[100:]
    assert reads(1) == first
    assert reads(2) != first
