"""Files of weights and layouts that another user may have made: read as data, or refused."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlio.errors import DlioError, SourceError, UsageError
from dlio.features.export import trained_model
from dlio.features.pruning.pruned_file import load_pruned
from dlio.train.checkpoint.checkpoint_store import StoredCheckpoint
from dlio.train.weights import read_weights


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.save(_net().state_dict(), tmp_path / "w.pt")
    return tmp_path / "w.pt"


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
        for read in (lambda: read_weights(str(weights)), lambda: load_pruned(_net(), str(weights))):
            try:
                read()
            except DlioError as error:
                said.append(str(error))
    assert len(said) > 120
    assert max(map(len, said)) < 600


@pytest.mark.parametrize("text", [b"", b"(lp0\n", b"c" * 99, b"a,b\n1,2\n", b"\x80\x02}q\x00."])
def test_other_files_are_refused(weights: Path, text: bytes) -> None:
    weights.write_bytes(text)
    with pytest.raises(UsageError, match="not a file of weights"):
        read_weights(str(weights))
    with pytest.raises(SourceError, match="not weights"):
        load_pruned(_net(), str(weights))


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


def _layout(**changed: object) -> str:
    return json.dumps({"version": 1, "groups": {}, "layers": {}, "counts": {}} | changed)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        _layout(version=1).replace("1", "1e400"),
        _layout(groups={"a": [10**30]}),
        _layout(layers={"0:out": [4, [[1]]]}),
        _layout(counts={"gone:__doc__": 3}),
        _layout(counts={":training": 3}),
        _layout(counts={":forward": 3}),
        _layout(counts={":__class__": 3}),
        _layout(counts={"0:out_features": 5}),
        _layout(counts={"0:out_features": -1}),
    ],
)
def test_layouts_change_nothing_but_widths(weights: Path, text: str) -> None:
    Path(f"{weights}.layout.json").write_text(text)
    net = _net()
    with pytest.raises(DlioError):
        load_pruned(net, str(weights))
    assert net.training is True
    assert "forward" not in vars(net)


def test_a_layout_that_is_no_file_does_not_wait_for_ever(weights: Path) -> None:
    os.mkfifo(f"{weights}.layout.json")
    with pytest.raises(SourceError, match="regular file"):
        load_pruned(_net(), str(weights))


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ("resnet(width=1000000)", 64, "if you trust it"),
        ("resnet(width=0xfffff)", 64, "if you trust it"),
        ("resnet(width=1_000_000)", 64, "if you trust it"),
        ("resnet", 1_000_000, "if you trust it"),
        ("resnet", -1, "if you trust it"),
        ("resnet(width=16384)", 64, "claims to hold"),
    ],
)
def test_a_checkpoint_does_not_choose_the_memory_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, size: int, said: str
) -> None:
    about = {"model": model, "image_size": size}
    stored = StoredCheckpoint(str(tmp_path / "step-00000001"), 1, about, frozenset())
    whole: Any = {"model/fc.weight": torch.zeros(2, 3)}
    monkeypatch.setattr(trained_model, "open_checkpoint", lambda path: stored)
    monkeypatch.setattr(StoredCheckpoint, "whole", lambda self: self)
    monkeypatch.setattr(trained_model, "_mean_weights", lambda checkpoint: whole)
    Path(stored.path).mkdir()
    with pytest.raises(DlioError, match=said):
        trained_model.load_trained(stored.path, None, 2, None)
