"""ONNX files answer as the model does, on any batch, or are not written."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlio.errors import DlioError, UsageError
from dlio.features.export.export_options import ExportOptions
from dlio.features.export.model_export import export_model
from dlio.features.export.onnx_file import OnnxModel, to_onnx
from dlio.features.export.trained_model import TrainedModel
from dlio.train.model import make_model, normalised
from tests.features.export.conftest import CLASSES, SIZE, Trained


@pytest.fixture(scope="module", autouse=True)
def onnxruntime() -> Any:
    """ONNX runtime: it and the exporter are imported by the worker alone that runs these tests."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def _export(trained: Trained, output: Path, **more: object) -> list[str]:
    lines: list[str] = []
    export_model(ExportOptions(**trained.options(output, **more)), lines.append)  # type: ignore[arg-type]
    return lines


Exported = Callable[[str], tuple[Path, list[str]]]
"""From a kind of input to a folder with model.onnx and report.json, and the lines printed."""


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Exports, each made once: they take seconds."""

    @cache
    def export(kind: str) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp(kind)
        report = str(folder / "report.json")
        return folder, _export(trained, folder / "model.onnx", input=kind, report=report)

    return export


@pytest.mark.parametrize("kind", ["uint8", "float32"])
@pytest.mark.daily("uint8")
def test_a_file_answers_as_the_model_on_any_batch(
    trained: Trained, exported: Exported, kind: str, onnxruntime: Any
) -> None:
    folder, lines = exported(kind)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    (described,) = session.get_inputs()
    assert described.name == "images"
    assert described.type == {"uint8": "tensor(uint8)", "float32": "tensor(float)"}[kind]
    assert described.shape[1:] == [3, SIZE, SIZE]
    for count in (1, 2, 5):
        images = trained.held_out.images[:count]
        numbers = normalised(images, torch.device("cpu"))
        given = images if kind == "uint8" else numbers
        (logits,) = session.run(["logits"], {"images": given.numpy()})
        assert logits.shape == (count, CLASSES)
        with torch.no_grad():
            assert np.allclose(logits, trained.module(numbers).numpy(), atol=1e-4)
    accuracy = trained.held_out.accuracy(
        trained.module(normalised(trained.held_out.images, torch.device("cpu")))
    )
    assert any(f"ONNX file {accuracy:.2%}" in line for line in lines)


def test_the_file_keeps_the_names_of_the_classes(
    trained: Trained, exported: Exported, onnxruntime: Any
) -> None:
    folder, _ = exported("uint8")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    assert names == sorted(path.name for path in trained.val.iterdir())


def test_a_file_that_answers_differently_is_an_error_and_not_written(
    trained: Trained, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio.features.export import model_export, onnx_file

    packed = (exported("uint8")[0] / "model.onnx").read_bytes()
    monkeypatch.setattr(model_export, "to_onnx", lambda *_: packed)
    right = onnx_file.OnnxModel.logits
    monkeypatch.setattr(
        onnx_file.OnnxModel, "logits", lambda self, images: 1.01 * right(self, images)
    )
    with pytest.raises(DlioError, match=r"--tolerance 0\.001"):
        _export(trained, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    _export(trained, tmp_path / "model.onnx", tolerance=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == packed


class _FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(1, 3).expand(len(x), -1)
        logits: torch.Tensor = self.head(x.mean((2, 3)) + ones)
        return logits


def test_a_model_that_fixes_the_batch_is_refused() -> None:
    fixed = TrainedModel(_FixedBatch().eval(), "mine:fixed", 2, SIZE, "w.pt")
    with pytest.raises(UsageError, match=r"mine:fixed: .* write x\.shape\[0\]"):
        to_onnx(fixed, "uint8")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("lenet", 32),
        pytest.param("vit(width=48,depth=2)", 32, marks=pytest.mark.nightly),
        pytest.param("alexnet", 64, marks=pytest.mark.nightly),
        pytest.param("googlenet", 64, marks=pytest.mark.nightly),
        pytest.param("resnet50", 64, marks=pytest.mark.nightly),
        pytest.param("resnet", 224, marks=pytest.mark.nightly),
    ],
)
def test_networks_by_name_are_exported(name: str, size: int) -> None:
    torch.manual_seed(0)
    module = make_model(name, 5, size).eval()
    packed = to_onnx(TrainedModel(module, name, 5, size, "w.pt"), "uint8")
    images = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8)
    with torch.no_grad():
        expected = module(normalised(images, torch.device("cpu")))
    scale = float(expected.abs().max())
    assert torch.allclose(OnnxModel(packed).logits(images), expected, atol=1e-3 * scale)


def test_figures_are_written_as_json(trained: Trained, exported: Exported) -> None:
    folder, _ = exported("uint8")
    report = json.loads((folder / "report.json").read_text())
    assert report["format"] == "onnx"
    assert report["bytes"] == (folder / "model.onnx").stat().st_size
    assert report["samples"] == len(trained.held_out)
    assert report["accuracy_onnx"] == report["accuracy_model"]
