"""Tables: the columns of a run, and what a network learns from them."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.train.config import train_config
from dlio.train.tasks.column_statistics import ColumnMoments
from dlio.train.tasks.table_columns import TableColumns, TableEncoder, columns_in
from dlio.train.tasks.table_task import find_columns
from dlio.train.trainer import train
from tests.train.tasks.higgs_like import bayes_auc, write_csv

Dlio = Callable[..., subprocess.CompletedProcess[str]]


def _table(path: Path, rows: int = 400, seed: int = 0) -> Path:
    """Write a table whose target is a sum of effects of its columns."""
    random = np.random.default_rng(seed)
    lines = ["id,age,size,town,y"]
    for row in range(rows):
        age, size, town = random.normal(40, 10), 5.0, random.choice(["Rome", "Oslo", "Bonn"])
        y = age + (20 if town == "Oslo" else 0)
        known = "" if row % 10 == 0 else f"{age:.3f}"
        lines.append(f"n{row},{known},{size},{town},{y:.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def _columns(path: Path, **options: object) -> tuple[TableColumns, tuple[str, ...]]:
    config = train_config(str(path), **options)
    return find_columns(config.model, open_reader(str(path)), SingleCommunicator())


def test_columns_have_the_statistics_of_the_training_data(tmp_path: Path) -> None:
    columns, notes = _columns(_table(tmp_path / "t.csv"), target="y")
    age, size = columns.numbers
    assert (age.name, age.missing, size.name, size.std) == ("age", 40, "size", 1.0)
    values = np.genfromtxt(tmp_path / "t.csv", delimiter=",", names=True)["age"]
    assert age.mean == pytest.approx(np.nanmean(values), rel=1e-12)
    assert age.std == pytest.approx(np.nanstd(values), rel=1e-12)
    assert [each.values for each in columns.categories if each.name == "town"] == [
        ("Bonn", "Oslo", "Rome")
    ]
    assert columns.target.name == "y"
    assert not columns.target.classes
    assert any("age 10.0%" in note for note in notes)
    assert TableColumns.from_json(columns.to_json()) == columns


def test_texts_that_name_rows_are_left_out_and_said_so(tmp_path: Path) -> None:
    columns, notes = _columns(_table(tmp_path / "t.csv", rows=1200), target="y")
    assert "id" not in {each.name for each in columns.features}
    assert any(note.startswith("id is left out: it has over 1,000") for note in notes)


def test_parquet_and_csv_give_the_same_columns(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = "".join(f"{k},{k % 3}.5,{k % 2}\n" for k in range(99))
    (tmp_path / "t.csv").write_text("a,b,y\n" + rows)
    table = {"a": range(99), "b": [k % 3 + 0.5 for k in range(99)], "y": [k % 2 for k in range(99)]}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    assert _columns(tmp_path / "t.csv") == _columns(tmp_path / "t.parquet")
    assert _columns(tmp_path / "t.csv")[0].target.classes == ("0", "1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "yy"}, "--target yy"),
        ({}, "give --target"),
        ({"target": "y", "category": ("x",)}, "--category x"),
        ({"target": "town", "task": "regress"}, "is text"),
        ({"target": "size"}, "different values"),
        ({"target": "age"}, "age is missing in 40 rows"),
        ({"target": "id"}, "over 1,000"),
    ],
)
def test_a_target_that_cannot_be_predicted_is_refused(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    if "target" not in options:
        (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    else:
        _table(tmp_path / "t.csv", rows=1200 if options["target"] == "id" else 400)
    if options.get("target") == "size":
        options = {**options, "task": "classify"}
    with pytest.raises(UsageError, match=said):
        _columns(tmp_path / "t.csv", **options)


def test_missing_and_unknown_values_are_encoded_as_such(tmp_path: Path) -> None:
    columns, _ = _columns(_table(tmp_path / "t.csv"), target="y", category=("size",))
    encoder = TableEncoder(columns)
    names = [each.name for each in columns.features]
    row = torch.zeros(1, columns.width, dtype=torch.float64)
    row[0, names.index("age")] = torch.nan
    out = encoder(row)[0]
    assert out.shape == (encoder.outputs,)
    assert out.isfinite().all()
    age = names.index("age")
    assert out[age] == 0
    assert out[len(columns.numbers)] == 1
    row[0, age] = columns.numbers[age].mean + columns.numbers[age].std
    again = encoder(row)[0].detach()
    assert again[age] == pytest.approx(1.0)
    assert again[len(columns.numbers)] == 0
    assert columns_in({"encoder.columns": encoder.columns}) == columns


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = np.random.default_rng(1).normal(1e6, 1e-2, 1000)
    total = ColumnMoments()
    for part in np.array_split(values, 7):
        total.merge(ColumnMoments.of(part))
    assert total.mean == pytest.approx(values.mean(), rel=1e-15)
    assert total.std == pytest.approx(values.std(), rel=1e-6)


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("numbers", {"mean": "many"}),
        ("numbers", {"std": 0.0}),
        ("numbers", {"std": float("nan")}),
        ("numbers", {"missing": float("inf")}),
        ("target", {"std": float("inf")}),
        ("target", {"mean": None}),
        ("target", {"classes": 3}),
    ],
)
def test_a_description_of_columns_that_cannot_be_is_refused(
    tmp_path: Path, part: str, changed: dict[str, object]
) -> None:
    columns, _ = _columns(_table(tmp_path / "t.csv"), target="y")
    parsed = json.loads(columns.to_json())
    (parsed[part] if part == "target" else parsed[part][0]).update(changed)
    text = np.frombuffer(json.dumps(parsed).encode(), np.uint8).copy()
    with pytest.raises(SourceError, match="description of the columns"):
        columns_in({"encoder.columns": torch.from_numpy(text)})
    with pytest.raises(SourceError, match="it is not text"):
        columns_in({"encoder.columns": torch.zeros(9, dtype=torch.bfloat16)})


@pytest.mark.parametrize("value", [0.1, 1.1, -330000.3, 1e-3])
@pytest.mark.parametrize("count", [3, 10, 1000, 4096])
def test_a_constant_column_has_a_deviation_of_one_however_its_value_is_rounded(
    value: float, count: int
) -> None:
    values, total = np.full(count, value), ColumnMoments()
    for part in np.array_split(values, 3):
        total.merge(ColumnMoments.of(part))
    for moments in (total, ColumnMoments.of(values)):
        assert (moments.mean, moments.std) == (value, 1.0)


@pytest.mark.parametrize("large", [1.7e308, -1e200, 1e150])
def test_numbers_without_a_finite_square_count_as_missing(tmp_path: Path, large: float) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a,y\n1,0\n3,1\n{large},0\n{large},1\n")
    columns, notes = _columns(path, target="y")
    (a,) = columns.numbers
    assert (a.mean, a.std, a.missing) == (2.0, 1.0, 2)
    assert any("a 50.0%" in note for note in notes)
    out = TableEncoder(columns)(torch.tensor([[large], [torch.nan], [1e40], [3.0]]).double())
    assert out.tolist() == [[0, 1], [0, 1], [0, 1], [1, 0]]


@pytest.mark.mpi
def test_statistics_and_metrics_are_the_same_on_two_ranks(dlio: Dlio, tmp_path: Path) -> None:
    _table(tmp_path / "train.csv", rows=9001)
    _table(tmp_path / "val.csv", rows=501, seed=1)
    states, reports = [], []
    for ranks, batch in (("1", "64"), ("2", "32")):
        done = dlio(
            *("train", "train.csv", "--val", "val.csv", "--target", "y", "-n", ranks),
            *("--epochs", "1", "--batch-size", batch, "--model", "mlp(width=16,depth=1)"),
            *("--save", "w.pt", "--report", "r.json", "--tiers", "ram:20MiB"),
        )
        assert done.returncode == 0, done.stderr
        assert "Missing values: age 10.0%" in done.stdout
        states.append(torch.load(tmp_path / "w.pt", weights_only=True))
        reports.append(json.loads((tmp_path / "r.json").read_text()))
    assert torch.equal(states[0]["encoder.columns"], states[1]["encoder.columns"])
    for name, value in states[0].items():
        assert torch.allclose(value.float(), states[1][name].float(), atol=1e-3), name
    first, second = (report["epochs"][0] for report in reports)
    assert first["task"] == "table"
    assert first["watch"] == "rmse"
    assert first["accuracy"] is None
    assert first["val_accuracy"] is None
    assert first["metrics"]["rmse"] == pytest.approx(second["metrics"]["rmse"], rel=1e-3)
    assert first["metrics"]["rmse"] < 12  # The target's standard deviation is 14.


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_higgs_like_table_is_learnt_to_the_best_auc(tmp_path: Path, seed: int) -> None:
    write_csv(tmp_path / "train.csv", 60_000, seed)
    best = write_csv(tmp_path / "val.csv", 20_000, seed + 1000)
    assert best == pytest.approx(bayes_auc(200_000), abs=0.015)
    config = train_config(
        str(tmp_path / "train.csv"),
        val=str(tmp_path / "val.csv"),
        target="signal",
        epochs=5,
        batch_size=256,
        seed=seed,
        tiers="ram:64MiB",
    )
    metrics = train(config).epochs[-1].metrics
    assert metrics["auc"] is not None
    assert metrics["auc"] > best - 0.01
    assert (metrics["auc_error"] or 1.0) < 0.001
