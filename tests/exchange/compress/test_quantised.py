"""Sums of compressed gradients: the checks of `quantised_checks` on real ranks."""

import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.exchange.compress import NAMES
from dlio.exchange.quantised_allreduce import QuantisedAllreduce
from dlio.testing import run_ranks
from tests.exchange.compress import quantised_checks

MpiRun = Callable[..., subprocess.CompletedProcess[str]]
TorchRun = Callable[..., list[str]]
BODY = Path(__file__).with_name("quantised_checks.py")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ("sums", "counts", "interleaved", "given_up")),
        (2, ("feedback",)),
        (2, ("training",)),
        (3, ("sums", "counts", "interleaved", "deadline")),
        (4, ("sums", "counts", "interleaved")),
    ],
)
@pytest.mark.daily("2-checks0")
def test_ranks_keep_the_promises(mpirun: MpiRun, ranks: int, checks: tuple[str, ...]) -> None:
    done = mpirun(ranks, "-W", "error", str(BODY), *checks)
    assert done.returncode == 0, done.stderr
    for check in checks:
        assert done.stdout.splitlines().count(f"kept {check}") == ranks


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [6, 8, 16])
def test_many_ranks_keep_the_promises(mpirun: MpiRun, ranks: int) -> None:
    checks = ("sums", "counts", "interleaved", "deadline", "training")
    done = mpirun(ranks, "-W", "error", str(BODY), *checks[: 5 if ranks == 6 else 3])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (4, ("bounded",)),
        (5, ("shrunk",)),
        (6, ("bounded",)),
        (8, ("counts",)),
        pytest.param(2, ("bounded", "restored", "shrunk"), marks=pytest.mark.nightly),
        pytest.param(6, ("sums", "counts", "restored"), marks=pytest.mark.nightly),
        pytest.param(16, ("sums", "counts", "bounded", "shrunk"), marks=pytest.mark.nightly),
        pytest.param(32, ("sums", "counts"), marks=pytest.mark.nightly),
        pytest.param(6, ("training", "feedback"), marks=pytest.mark.nightly),
    ],
)
def test_threads_keep_the_promises(ranks: int, checks: tuple[str, ...]) -> None:
    for check in checks:
        run_ranks(ranks, quantised_checks.CHECKS[check])


@pytest.mark.nightly
def test_six_ranks_of_torchrun_keep_the_promises(torchrun: TorchRun) -> None:
    for said in torchrun(6, str(BODY), "sums", "counts"):
        assert said.split("\n")[:2] == ["kept sums", "kept counts"]


@pytest.mark.nightly  # By day, ranks of MPI do.
def test_ranks_of_torchrun_keep_the_promises(torchrun: TorchRun) -> None:
    for said in torchrun(2, str(BODY), "sums", "interleaved"):
        assert said.split("\n")[:2] == ["kept sums", "kept interleaved"]


@pytest.mark.parametrize("check", ["sums", "interleaved"])
def test_one_process_keeps_the_promises(check: str) -> None:
    runpy.run_path(str(BODY))["CHECKS"][check](SingleCommunicator())


@pytest.mark.parametrize("name", NAMES)
def test_one_process_neither_compresses_nor_copies(name: str) -> None:
    reduction = QuantisedAllreduce(SingleCommunicator(), [("w", (50, 50))], name, tag=0)
    region = np.random.default_rng(0).normal(size=2500).astype(np.float32)
    before = region.copy()
    reduction.start(torch.from_numpy(region))
    assert reduction.done()
    reduction.wait()
    assert np.array_equal(region, before)
    assert reduction.residual.size == 0
    assert reduction.statistics()["messages"] == reduction.statistics()["bytes"] == 0


def test_a_region_of_another_length_is_refused() -> None:
    reduction = QuantisedAllreduce(SingleCommunicator(), [("w", (50, 50))], "int8", tag=0)
    with pytest.raises(UsageError, match="2,499 entries: the region has 2500"):
        reduction.start(torch.zeros(2499))


def test_an_unknown_compressor_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="onebit, ternary, threshold, adaptive"):
        QuantisedAllreduce(SingleCommunicator(), [("w", (50, 50))], "zip", tag=0)
