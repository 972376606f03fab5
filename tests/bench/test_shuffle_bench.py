"""`dlio bench shuffle` gives plausible figures on little data."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio_bench import shuffle_cases
from dlio_bench.shuffle_bench import exchange, plan
from dlio_bench.shuffle_cases import MODES, NoNamespaces, capacity, link, statistics


def test_partial_tiers_read_no_more_than_they_lack(pictures: Path) -> None:
    (measured,) = capacity(str(pictures), (0.5,))
    # Twelve pictures in as many blocks: not quite a half is held.
    assert 0.3 < measured["held"] <= 0.5
    assert measured["dlio"] == pytest.approx(1 - measured["held"])
    assert measured["dlio"] < measured["lru"] <= 1
    assert measured["page_cache"] is None or measured["page_cache"] >= 0


@pytest.mark.nightly
def test_every_mode_is_well_mixed() -> None:
    measured = statistics()
    assert list(measured) == list(MODES)
    for mode, figures in measured.items():
        assert abs(figures["chi2_sigma"]) < 4, mode
        assert abs(figures["serial_sigma"]) < 4, mode
        assert figures["unevenness_sigma"] < 1.2, mode
    assert measured["local"]["repeated"] > 0.99
    assert measured["partial(0.1)"]["repeated"] < 0.9
    assert measured["global"]["repeated"] == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("samples", [10**7, 10**8, 10**9], ids=["10M", "100M", "billion"])
@pytest.mark.nightly
def test_plans_stay_small_and_quick(samples: int) -> None:
    measured: dict[str, Any] = plan(1, samples)
    assert measured["batch"]["moved_share"] <= 0.0275
    assert measured["billion"]["peak_MiB"] <= 64
    # Generous: the machine may be busy. The benchmark has the figure.
    assert measured["billion"]["seconds_a_rank"]["median"] < 30


@pytest.mark.mpi
@pytest.mark.nightly
def test_an_exchange_is_measured_beside_alltoallv() -> None:
    measured: dict[str, Any] = exchange(1, samples=300)
    assert measured["2_nodes_memory"]["moved_bytes"] == pytest.approx(300 * 100_000 / 2, rel=0.2)
    assert measured["4_nodes_tcp"]["moved_bytes"] == pytest.approx(300 * 100_000 * 3 / 4, rel=0.2)
    for figures in measured.values():
        assert figures["late"] == 0
        assert figures["shuffle_over_alltoallv"]["median"] > 0


@pytest.mark.nightly
def test_ranks_over_shaped_links_send_what_was_forecast() -> None:
    try:
        measured: dict[str, Any] = link(
            (2,), ("batch", "global"), samples=400, batch_size=16, epochs=1
        )
    except NoNamespaces as error:
        pytest.skip(str(error))
    for mode in ("batch", "global"):
        figures = measured[f"2 nodes, {mode}"]
        assert figures["counts_equal"]
        assert figures["late"] == 0
    # A gigabit, less the overhead of TCP and of a busy machine.
    assert 5e6 < measured["2 nodes"]["link_rate"] < 125e6
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"dl{os.getpid() % 100000}n" not in done.stdout


def test_the_command_tells_and_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shuffle_cases, "_SAMPLES", 8000)
    monkeypatch.setattr(shuffle_cases, "_EPOCHS", 2)
    report = tmp_path / "r.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "shuffle", "--case", "mixing", "--report", str(report)])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr()
    assert re.search(r"ring +chi2 sigma +-?\d", shown.out)
    assert shown.err == ""
    assert "ring" in json.loads(report.read_text())["mixing"]
    for argv, said in (
        (["--case", "chaos"], "choose one of plan"),
        (["--case", "decode"], "want a data set"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "shuffle", *argv])
        assert said in capsys.readouterr().err
