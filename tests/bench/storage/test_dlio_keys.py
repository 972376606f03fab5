"""DLIO's workload files are read as they are, and no key is ignored in silence."""

import re
from pathlib import Path

import pytest
import yaml

import dlio
from dlio_bench.storage_cases import dlio_keys
from dlio_bench.storage_cases.dlio_keys import read_job, shape_names, with_format
from dlio_bench.storage_cases.rules import VERSIONS

UNET3D = """
model:
  name: unet3d
  type: cnn
framework: pytorch
workflow: {generate_data: True, train: True, checkpoint: False}
dataset:
  data_folder: data/unet3d/
  format: npz
  num_files_train: 168
  num_samples_per_file: 1
  record_length_bytes: 146600628
  record_length_bytes_stdev: 68341808
  record_length_bytes_resize: 2097152
reader:
  data_loader: pytorch
  batch_size: 7
  read_threads: 4
  file_shuffle: seed
  sample_shuffle: off
train:
  epochs: 5
  computation_time: 0.323
metric: {au: 0.90}
"""


@pytest.fixture
def unet3d(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(UNET3D)
    return path


def test_a_workload_file_is_read(unet3d: Path) -> None:
    job = read_job(str(unet3d))
    workload = job.workload
    assert (workload.name, workload.format, workload.files) == ("mine", "npz", 168)
    assert (workload.sample_bytes, workload.sample_bytes_stdev) == (146600628, 68341808)
    assert (workload.batch_size, workload.workers, workload.epochs) == (7, 4, 5)
    assert (workload.step_s, workload.step_s_stdev, workload.least_au) == (0.323, 0, 0.9)
    assert workload.shuffle
    assert job.settings["model.type"] == "cnn"
    assert job.overridden == ()


def test_keys_without_effect_are_named_with_the_reason(unet3d: Path) -> None:
    notes = "\n".join(read_job(str(unet3d)).notes)
    used = ("dataset.format", "reader.batch_size", "train.epochs", "metric.au", "model.type")
    assert not [key for key in used if key in notes]
    rest = set(read_job(str(unet3d)).settings) - set(dlio_keys._WORKLOAD) - {"model.type"}
    assert rest
    for key in rest:
        assert re.search(rf"{re.escape(key)}\b.*: no effect \(.+\)", notes), key


def test_overrides_are_taken_as_hydra_writes_them(unet3d: Path) -> None:
    job = read_job(
        str(unet3d),
        ["++workload.reader.batch_size=3", "train.computation_time={mean: 0.5, stdev: 0.1}"],
    )
    assert job.workload.batch_size == 3
    assert (job.workload.step_s, job.workload.step_s_stdev) == (0.5, 0.1)
    assert job.overridden == ("reader.batch_size", "train.computation_time")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "reader.batchsize=3",
            r"reader\.batchsize is not a key of DLIO; did you mean .*batch_size",
        ),
        ("dataset.num_file_train=3", "did you mean dataset.num_files_train"),
        ("reader.batch_size=many", r"reader\.batch_size: many: give a number from 1"),
        ("reader.batch_size=2.5", "give a whole number"),
        ("train.epochs=0", "give a number from 1"),
        ("dataset.format=npzz", "choose one of .*did you mean npz"),
        ("dataset.size_distribution=flat", "give normal or lognormal"),
        ("train.computation_time=-1", "give seconds from 0"),
        ("train.computation_time={type: cauchy}", "choose one of normal, uniform"),
        ("train.computation_time={type: gamma, shape: 2}", "scale: None: give seconds"),
        ("metric.au=90", "give a share from 0 to 1"),
        ("reader.batch_size", "write a key of DLIO and a value"),
        ("reader.batch_size={", "not YAML"),
    ],
)
def test_an_error_names_the_key_and_the_remedy(unet3d: Path, override: str, reason: str) -> None:
    with pytest.raises(dlio.UsageError, match=reason):
        read_job(str(unet3d), [override])


@pytest.mark.parametrize(
    ("text", "mean", "stdev"),
    [
        ("0.25", 0.25, 0),
        ("{mean: 0.25}", 0.25, 0),
        ("{type: normal, mean: 0.25, stdev: 0.5}", 0.25, 0.5),
        ("{type: uniform, min: 1, max: 3}", 2, 2 / 12**0.5),
        ("{type: gamma, shape: 4, scale: 0.5}", 2, 1),
        ("{type: exponential, scale: 2}", 2, 2),
        ("{type: poisson, lam: 4}", 4, 2),
    ],
)
def test_times_keep_their_mean_and_deviation(
    unet3d: Path, text: str, mean: float, stdev: float
) -> None:
    job = read_job(str(unet3d), [f"train.computation_time={text}"])
    assert job.workload.step_s == pytest.approx(mean)
    assert job.workload.step_s_stdev == pytest.approx(stdev)
    noted = any("drawn as normal" in note for note in job.notes)
    assert noted == ("type" in text and "normal" not in text)


def test_the_first_versions_and_whole_configurations_are_read(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(
        "model: unet3d\ndataset: {format: jpeg, record_length: 5000, record_length_stdev: 10,"
        " num_files_train: 4, num_samples_per_file: 3}\ndata_reader: {batch_size: 2}\n"
    )
    workload = read_job(str(old)).workload
    assert (workload.sample_bytes, workload.sample_bytes_stdev) == (5000, 10)
    assert workload.batch_size == 2
    # A file of class folders is one sample.
    assert (workload.format, workload.files, workload.samples_per_file) == ("folder", 12, 1)
    whole = tmp_path / "whole.yaml"
    whole.write_text(yaml.safe_dump({"workload": yaml.safe_load(UNET3D), "hydra": {"a": 1}}))
    assert read_job(str(whole)).workload.batch_size == 7


def test_a_missing_or_broken_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(dlio.UsageError, match="did you mean unet3d_h100"):
        read_job("unet3d_h10")
    broken = tmp_path / "broken.yaml"
    for text, reason in (("a: [", "is not YAML"), ("- 1", "holds no keys")):
        broken.write_text(text)
        with pytest.raises(dlio.UsageError, match=reason):
            read_job(str(broken))


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_says_its_source_and_passes_its_own_rules(name: str) -> None:
    text = (Path(dlio_keys.__file__).parent / "workloads" / f"{name}.yaml").read_text()
    assert text.startswith("# Numbers: ")
    job = read_job(name)
    family, _, accelerator = name.partition("_")
    rounds = [
        each
        for each in VERSIONS.values()
        if family in each.least_au and accelerator in each.accelerators
    ]
    assert all(each.least_au[family] == job.workload.least_au for each in rounds)
    for other in ("folder", "tar"):
        assert with_format(job.workload, other).samples == job.workload.samples


def test_the_shapes_of_the_field_are_there() -> None:
    families = {name.partition("_")[0] for name in shape_names()}
    assert families == {"unet3d", "resnet50", "cosmoflow", "bert", "retinanet", "dlrm", "flux"}
