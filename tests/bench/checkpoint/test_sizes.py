"""Bytes of checkpoints, compared with the models' published numbers of parameters."""

from pathlib import Path

import pytest

from dlio.errors import UsageError
from dlio_bench.checkpoint_cases.checkpoint_command import (
    MODELS,
    CheckpointCase,
    checkpoint_bytes,
)
from dlio_bench.checkpoint_cases.checkpoint_workload import read_checkpoints
from dlio_bench.storage_cases.dlio_keys import checkpoint_note, shape_names
from dlio_bench.storage_cases.storage_options import StorageCase


@pytest.mark.parametrize(
    ("model", "parameters"), [("llama_8b", 8.03e9), ("llama_70b", 70.6e9), ("llama_405b", 405.9e9)]
)
def test_language_models_have_their_published_parameters(model: str, parameters: float) -> None:
    assert MODELS[model] / 14 == pytest.approx(parameters, rel=0.005)


def test_ranks_share_a_checkpoint() -> None:
    whole = checkpoint_bytes("unet3d", 1, 1.0)
    assert whole == 499_153_191
    assert checkpoint_bytes("unet3d", 4, 0.5) == pytest.approx(whole / 8, abs=1)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean resnet50"):
        checkpoint_bytes("resnet5", 1, 1.0)


LLAMA = """
model:
  name: llama_8b
  type: transformer
  num_layers: 32
  model_datatype: fp16
  optimizer_datatype: fp32
  parallelism: {pipeline: 1, tensor: 1, zero_stage: 3}
  transformer:
    vocab_size: 128256
    hidden_size: 4096
    ffn_hidden_size: 14336
    num_attention_heads: 32
    num_kv_heads: 8
framework: pytorch
workflow: {generate_data: False, train: False, checkpoint: True}
checkpoint:
  checkpoint_folder: checkpoints/llama_8b
  time_between_checkpoints: 5
  num_checkpoints_write: 10
  num_checkpoints_read: 10
  fsync: True
"""


def test_a_workload_of_checkpoints_has_the_bytes_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "llama.yaml"
    path.write_text(LLAMA)
    workload = read_checkpoints(str(path))
    assert (workload.name, workload.bytes, workload.writes) == ("llama_8b", MODELS["llama_8b"], 10)
    assert "time_between_checkpoints" in workload.notes[0]
    assert "hidden_size" not in workload.notes[0]
    case = CheckpointCase("here", workload=str(path), scale=1e-3)
    assert case.bytes_per_rank(4) == pytest.approx(MODELS["llama_8b"] / 4000, abs=1)
    assert (case.times(), CheckpointCase("x").times()) == (10, 5)
    assert CheckpointCase("here", workload=str(path), repeats=2).times() == 2
    wide = read_checkpoints(str(path), ["model.model_datatype=fp32"])
    assert wide.bytes == MODELS["llama_8b"] // 14 * 16


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("model: {model_size: 1000}", 1000),
        ("model: {model_size_bytes: 1000, optimization_groups: [10, 20]}", 1000 + 30 * 4),
        ("model: {num_layers: 3, layer_parameters: [5, 6], model_datatype: fp32}", 3 * 11 * 4),
    ],
)
def test_sizes_of_layers_and_groups_are_those_of_their_types(
    text: str, size: int, tmp_path: Path
) -> None:
    (tmp_path / "w.yaml").write_text(text)
    assert read_checkpoints(str(tmp_path / "w.yaml")).bytes == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dataset: {num_files_train: 3}", "describes no checkpoint"),
        ("model: {model_size: -3}", "whole number"),
        ("model: {optimization_groups: 3}", "list of whole numbers"),
        ("model: {transformer: {hidden_size: 4}}", "ffn_hidden_size: None"),
        ("model: {model_size: 3, model_datatype: fp9}", "choose one of int8"),
    ],
)
def test_workloads_without_a_size_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(UsageError, match=reason):
        CheckpointCase("here", workload=str(tmp_path / "w.yaml"))


def test_a_workload_of_checkpoints_alone_reads_no_data(tmp_path: Path) -> None:
    path = tmp_path / "llama.yaml"
    for text in (
        LLAMA,
        LLAMA.replace("train: False", "train: True"),
        "checkpoint: {num_checkpoints_write: 3}\nworkflow: {checkpoint: True}",
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"checkpoint PATH --workload \S+llama.yaml"):
            StorageCase("here", workload=str(path)).asked()
    path.write_text("workflow: {train: False}")
    with pytest.raises(UsageError, match="reads nothing"):
        StorageCase("here", workload=str(path)).asked()
    # With data it is measured, and the keys of checkpoints are named.
    path.write_text(f"{LLAMA}dataset: {{num_files_train: 3}}\n")
    asked = StorageCase("here", workload=str(path)).asked()
    (note,) = checkpoint_note(asked.settings)
    assert all(key in note for key in ("num_layers", "num_checkpoints_write", "checkpoint.fsync"))


@pytest.mark.parametrize("name", shape_names())
def test_shapes_that_dlio_brings_are_read(name: str) -> None:
    assert StorageCase("here", workload=name).asked().workload.files > 0
