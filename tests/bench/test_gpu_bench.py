"""`dlio bench gpu` runs the cases that need no GPU, and names those that it skips."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlio.cli import main
from dlio_bench.gpu.gpu_cases import covered, traced
from dlio_bench.gpu.gpu_command import CASES
from dlio_bench.results import envelope

jsonschema = pytest.importorskip("jsonschema")


def _report(path: Path, *options: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "gpu", "--report", str(path), "--repeats", "1", *options])
    assert ended.value.code == 0
    report = json.loads(path.read_text())
    schema = Path(envelope.__file__).with_name("schema.json")
    jsonschema.validate(report, json.loads(schema.read_text()))
    return report


def _cases(report: Any, name: str) -> set[str]:
    return {each["labels"]["case"] for each in report["figures"] if each["name"] == name}


def test_cases_run_in_a_small_form_without_a_gpu(tmp_path: Path) -> None:
    cases = [text for name in ("decode", "tier", "handover") for text in ("--case", name)]
    report = _report(tmp_path / "gpu.json", "--device", "cpu", *cases)
    assert {"threads, files", "threads, restart rows"} <= _cases(report, "decode")
    assert _cases(report, "decoded tier") == {
        "gpu:SIZE:decoded",
        "ram:SIZE:decoded",
        "kernel alone",
    }
    assert (
        "tier, gpu:SIZE:decoded: 24 of 24 samples of the last pass came decoded"
        in (report["notes"])
    )
    assert all(each["median"] >= 0 for each in report["figures"])
    assert "needs a CUDA device" in report["skipped"]["handover: trace"]
    assert not [why for why in report["skipped"].values() if why.startswith("failed")]


@pytest.mark.nightly
def test_steps_run_in_a_small_form_without_a_gpu(tmp_path: Path) -> None:
    report = _report(tmp_path / "gpu.json", "--device", "cpu", "--case", "step")
    assert _cases(report, "ResNet-50 step, threads") == {"fed", "resident"}
    assert report["skipped"]["step: tier"] == "needs a CUDA device"


@pytest.mark.mpi
def test_two_ranks_exchange_on_one_device(tmp_path: Path) -> None:
    report = _report(tmp_path / "gpu.json", "--device", "cpu", "--case", "exchange")
    paths = {each["labels"]["exchange"]: each["labels"]["path"] for each in report["figures"]}
    assert paths == {
        "none": "none",
        "allreduce": "host",
        "allreduce+onebit": "host",
        "gossip": "host",
        "diloco(2)": "host",
    }
    assert "NCCL refuses two ranks on one" in report["skipped"]["exchange: NCCL"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_every_case_is_skipped_by_name_and_that_is_no_failure(
    tmp_path: Path,
) -> None:
    report = _report(tmp_path / "gpu.json")
    assert report["skipped"] == dict.fromkeys(CASES, "torch finds no CUDA device")
    assert report["figures"] == []


@pytest.mark.nightly
def test_a_case_that_fails_leaves_the_others_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setitem(CASES, "decode", fails)
    options = ("--device", "cpu", "--case", "decode", "--case", "tier")
    report = _report(tmp_path / "gpu.json", *options)
    assert report["skipped"]["decode"] == "failed: RuntimeError: CUDA error: out of memory"
    assert _cases(report, "decoded tier")
    late = _report(tmp_path / "late.json", *options, "--minutes", "1e-9")
    assert set(late["skipped"]) == {"decode", "tier"}


def test_copies_that_kernels_cover_are_summed_once() -> None:
    def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=device)

    assert traced(
        [
            event("Memcpy HtoD (Pinned -> Device)", 0, 10),
            event("Memcpy HtoD (Pinned -> Device)", 20, 30),
            event("gemm", 2, 6),
            event("gemm2", 4, 8),
            event("Memcpy DtoD", 20, 30),
            event("cudaStreamSynchronize", 0, 5, "DeviceType.CPU"),
            event("aten::mm", 0, 100, "DeviceType.CPU"),
        ]
    ) == (20, 6, 1)
    assert covered([(0, 4)], []) == 0
