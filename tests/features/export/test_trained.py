"""Weights are loaded with the options of their training; an error names one that differs."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlio.cli import main
from dlio.errors import DlioError, SourceError, UsageError
from dlio.features.export.check_pictures import read_pictures
from dlio.features.export.export_options import ExportOptions
from dlio.features.export.trained_model import load_trained
from dlio.train.checkpoint.checkpoint_store import StoredCheckpoint
from dlio.train.model import make_model
from tests.conftest import has_feature
from tests.features.export.conftest import CLASSES, MODEL, SIZE, Trained

SMALL = "convnet(width=4)"


def test_the_number_of_classes_is_that_of_the_weights(trained: Trained) -> None:
    loaded = load_trained(str(trained.weights), MODEL, None, SIZE)
    assert loaded.classes == CLASSES
    assert not loaded.module.training


@pytest.mark.parametrize(
    ("model", "classes", "said"),
    [
        ("resnet(width=16)", None, "size mismatch"),
        (MODEL, 7, "--classes 7"),
        ("vgg", None, "resnet"),
    ],
)
def test_options_that_do_not_fit_the_weights_are_named(
    trained: Trained, model: str, classes: int | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load_trained(str(trained.weights), model, classes, SIZE)


@pytest.mark.needs("pruning")
def test_pruned_models_get_their_layout(tmp_path: Path) -> None:
    """Five of 16 channels are left: the others of the whole model are 0."""
    whole = make_model(MODEL, CLASSES, SIZE).eval()
    norm = whole.get_submodule("stages.0.norm1")
    assert isinstance(norm, torch.nn.BatchNorm2d)
    with torch.no_grad():
        norm.weight[5:], norm.bias[5:] = 0.0, 0.0
    small = whole.state_dict()
    for name in small:
        if name.startswith(("stages.0.conv1.", "stages.0.norm1.")) and small[name].ndim:
            small[name] = small[name][:5].clone()
    small["stages.0.conv2.weight"] = small["stages.0.conv2.weight"][:, :5].clone()
    path = str(tmp_path / "small.pt")
    torch.save(small, path)
    with pytest.raises(UsageError, match="layout"):
        load_trained(path, MODEL, None, SIZE)
    left = list(range(5))
    layers = {f"stages.0.{each}": (16, left) for each in ("conv1:out", "norm1:through", "conv2:in")}
    layout = {"version": 1, "groups": {"stages.0.conv1": left}, "layers": layers, "counts": {}}
    (tmp_path / "small.pt.layout.json").write_text(json.dumps(layout))
    loaded = load_trained(path, MODEL, None, SIZE).module
    x = torch.rand(2, 3, SIZE, SIZE)
    assert torch.allclose(loaded(x), whole(x), atol=1e-5)
    assert loaded.get_parameter("stages.0.conv1.weight").shape[0] == 5


def test_other_files_are_not_taken_for_weights(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no weights")
    for path in (tmp_path / "text.pt", tmp_path / "gone.pt", tmp_path):
        with pytest.raises((SourceError, UsageError), match=str(path)):
            load_trained(str(path), MODEL, None, SIZE)


def test_data_of_other_classes_is_refused(trained: Trained, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(next(trained.val.rglob("*.jpg")), tmp_path / name)
    with pytest.raises(UsageError, match="it has 2 classes, the model has 4"):
        read_pictures("--check", str(tmp_path), CLASSES, SIZE, 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output": "model.pb"}, "model.onnx or model.nir"),
        ({"output": "model.nir"}, "--calibrate"),
        ({"output": "model.onnx", "ternary": True}, "--ternary"),
        ({"output": "model.onnx", "calibrate": "d"}, "--calibrate is for NIR"),
        ({"output": "m.nir", "calibrate": "d", "tune_epochs": 2}, "--ternary"),
        ({"output": "model.onnx", "image_size": 8}, "at least 32"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ExportOptions(weights="w.pt", **options)  # type: ignore[arg-type]


def test_weights_are_not_overwritten(trained: Trained) -> None:
    options = ExportOptions(str(trained.weights), str(trained.weights), format="onnx")
    with pytest.raises(UsageError, match="these are the weights"):
        options.check_files()


def test_a_checkpoint_does_not_choose_code_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio.features.export import trained_model as module

    name = f"pathlib:Path.touch(self='{tmp_path}/ran')"
    about = {"model": name, "image_size": SIZE}
    stored = StoredCheckpoint(str(tmp_path / "step-00000001"), 1, about, frozenset())
    monkeypatch.setattr(module, "open_checkpoint", lambda path: stored)
    monkeypatch.setattr(StoredCheckpoint, "whole", lambda self: self)
    Path(stored.path).mkdir()
    with pytest.raises(UsageError, match="code of a module: add --model"):
        load_trained(stored.path, None, None, None)
    assert not (tmp_path / "ran").exists()


def test_checkpoints_export_the_model_that_they_hold(
    dlio: Callable[..., subprocess.CompletedProcess[str]],
    pictures: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    averaged = ("--ema", "0.9") if has_feature("ema") else ()
    done = dlio(
        *("train", str(pictures), "--model", SMALL, "--image-size", str(SIZE), "--epochs", "2"),
        *("--batch-size", "16", "--checkpoint", "ckpt", "--save", "w.pt", *averaged),
    )
    assert done.returncode == 0, done.stderr
    check = ("--check", str(pictures / "val"))
    # In this process, which has imported the exporter for other tests: that takes seconds.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", "ckpt", "ckpt.onnx", *check])
    assert ended.value.code in (0, None)
    said = capsys.readouterr()
    assert said.err == ""
    assert "held-out accuracy on 23 samples" in said.out
    assert (tmp_path / "ckpt.onnx").exists()
    if request.config.getoption("--nightly"):
        given = ("--model", SMALL, "--image-size", str(SIZE))
        for words in (("ckpt", "c.onnx"), ("w.pt", "w.onnx", *given)):
            done = dlio("export", *words, *check)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            assert "held-out accuracy on 23 samples" in done.stdout
    one, other = (load_trained(str(tmp_path / name), None, None, None) for name in ("ckpt",) * 2)
    assert one.image_size == other.image_size == SIZE
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, value in one.module.state_dict().items():
        assert torch.allclose(value.double(), state[name].double(), atol=1e-6), name
    with pytest.raises(SystemExit) as ended:
        main(["export", "ckpt", "x.onnx", "--image-size", "64"])
    assert ended.value.code == 2
    assert "was trained with --image-size 32" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()
    newest, older = sorted((tmp_path / "ckpt").glob("step-*"), reverse=True)
    about = json.loads((newest / "about.json").read_text())
    (newest / "about.json").write_text(json.dumps({**about, "seed": 99}))
    assert load_trained(str(tmp_path / "ckpt"), None, None, None).path == os.fspath(older)
    with pytest.raises(DlioError, match="checksum"):
        load_trained(str(newest), None, None, None)
