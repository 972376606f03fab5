"""Communicators over torch.distributed: the contract, and messages over sockets of their own."""

from pathlib import Path

import pytest

from tests.conftest import TorchRun

BODY = Path(__file__).with_name("torchdist_checks.py")


def _kept(torchrun: TorchRun, ranks: int, *checks: str) -> None:
    assert all("kept the promise" in text for text in torchrun(ranks, str(BODY), *checks))


def test_four_ranks_keep_the_contract(torchrun: TorchRun) -> None:
    _kept(torchrun, 4, "contract")


def test_messages_keep_lengths_order_and_threads(torchrun: TorchRun) -> None:
    _kept(torchrun, 3, "lengths", "order", "cancelled", "threads", "types")


def test_a_closed_duplicate_leaves_no_thread_and_no_socket(torchrun: TorchRun) -> None:
    _kept(torchrun, 2, "closed")


@pytest.mark.parametrize("check", ["deadline", "bereaved"])
def test_waiting_for_absent_ranks_ends_at_the_deadline(
    torchrun: TorchRun, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    monkeypatch.setenv("DLIO_TIMEOUT", "1.5")
    _kept(torchrun, 2, check)
