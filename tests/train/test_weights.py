"""Files of weights and layouts that another user may have made: read as data, or refused."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlio.errors import DlioError, UsageError
from dlio.train.weights import read_weights


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.save(net().state_dict(), tmp_path / "w.pt")
    return tmp_path / "w.pt"


# SECURITY.md: S5
def test_damaged_files_are_refused_and_not_passed_on(weights: Path) -> None:
    whole, random = weights.read_bytes(), np.random.default_rng(0)
    said: list[str] = []
    for number in range(120):
        damaged = bytearray(whole)
        if number % 2:
            damaged = damaged[: random.integers(len(whole))]
        else:
            for place in random.integers(0, 700, 4):
                damaged[place] = random.integers(256)
        weights.write_bytes(damaged)
        try:
            read_weights(str(weights))
        except DlioError as error:
            said.append(str(error))
    assert len(said) > 60
    assert max(map(len, said)) < 600


def test_a_changed_bit_of_a_tensor_is_refused(weights: Path) -> None:
    whole = weights.read_bytes()
    (bias,) = (each for each in torch.load(weights).values() if each.shape == (2,))
    place = whole.index(bias.numpy().tobytes())
    for bit in range(64):
        damaged = bytearray(whole)
        damaged[place + bit // 8] ^= 1 << bit % 8
        weights.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"it is damaged: the checksum of .* differs"):
            read_weights(str(weights))


@pytest.mark.parametrize("text", [b"", b"(lp0\n", b"c" * 99, b"a,b\n1,2\n", b"\x80\x02}q\x00."])
def test_other_files_are_refused(weights: Path, text: bytes) -> None:
    weights.write_bytes(text)
    with pytest.raises(UsageError, match="not a file of weights"):
        read_weights(str(weights))


@pytest.mark.parametrize(
    "claim",
    [
        torch.zeros(1).expand(10**12),
        torch.empty(10, device="meta"),
        torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.tensor([1.0]), (10**12,), check_invariants=True
        ),
    ],
)
def test_tensors_that_are_not_stored_are_refused(weights: Path, claim: torch.Tensor) -> None:
    torch.save({"fc.bias": claim}, weights)
    with pytest.raises(UsageError, match=r"fc\.bias claims more than is stored"):
        read_weights(str(weights))


def test_compressed_files_are_refused_before_they_are_unpacked(weights: Path) -> None:
    packed = weights.with_name("packed.pt")
    with zipfile.ZipFile(weights) as source, zipfile.ZipFile(packed, "w") as made:
        for entry in source.infolist():
            made.writestr(entry.filename, source.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        read_weights(str(packed))
