"""Weights and layouts that another user may have made: read as data, or refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlio.errors import DlioError, SourceError
from dlio.features.pruning.pruned_file import load_pruned
from tests.train.test_weights import net


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.save(net().state_dict(), tmp_path / "w.pt")
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
        try:
            load_pruned(net(), str(weights))
        except DlioError as error:
            said.append(str(error))
    assert len(said) > 60
    assert max(map(len, said)) < 600


@pytest.mark.parametrize("text", [b"", b"(lp0\n", b"c" * 99, b"a,b\n1,2\n", b"\x80\x02}q\x00."])
def test_other_files_are_refused(weights: Path, text: bytes) -> None:
    weights.write_bytes(text)
    with pytest.raises(SourceError, match="not weights"):
        load_pruned(net(), str(weights))


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
    network = net()
    with pytest.raises(DlioError):
        load_pruned(network, str(weights))
    assert network.training is True
    assert "forward" not in vars(network)


def test_a_layout_that_is_no_file_does_not_wait_for_ever(weights: Path) -> None:
    os.mkfifo(f"{weights}.layout.json")
    with pytest.raises(SourceError, match="regular file"):
        load_pruned(net(), str(weights))


def test_weights_are_read_from_a_path_of_pathlib(weights: Path) -> None:
    stored = torch.load(weights, weights_only=True)
    loaded = load_pruned(net(), weights).state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in loaded.items())
    with pytest.raises(SourceError, match="/nope"):
        load_pruned(net(), Path("/nope"))
