"""Tables and options that would give a wrong result, or none, unless the run says so."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dlio.comm.single import SingleCommunicator
from dlio.data.reader import open_reader
from dlio.errors import UsageError
from dlio.train.config import train_config
from dlio.train.evaluation import evaluate
from dlio.train.tasks.table_task import find_columns
from dlio.train.trainer import train

_SMALL: Any = {"epochs": 1, "tiers": "none", "model": "mlp(width=4,depth=1)"}


def _write(path: Path, values: Iterable[object], prices: Iterable[object]) -> str:
    """Write a table with the columns `a`, `b` and `price`."""
    rows = (f'"{a}",{len(str(a))},"{price}"\n' for a, price in zip(values, prices, strict=False))
    path.write_text("a,b,price\n" + "".join(rows))
    return str(path)


def _notes(path: str) -> str:
    config = train_config(path, target="price")
    return " ".join(find_columns(config.model, open_reader(path), SingleCommunicator())[1])


@pytest.mark.parametrize(
    ("values", "because"),
    [
        ([*range(1200), "abc"], "'abc'"),
        ([*range(30), "?"], "'?'"),
        ([f"{k},000" for k in range(1, 30)], "'1,000'"),
        (["cat", "dog"] * 9, None),
        ([2**64 + k for k in range(30)], None),
    ],
)
def test_a_column_of_numbers_that_one_text_makes_a_category_is_remarked_upon(
    tmp_path: Path, values: Sequence[object], because: str | None
) -> None:
    notes = _notes(_write(tmp_path / "t.csv", values, (k + 0.5 for k in range(1201))))
    if because is None:
        assert "is text" not in notes
    else:
        assert "a is text" in notes
        assert because in notes


@pytest.mark.parametrize("target", ["price", "label"])
def test_a_target_of_numbers_that_are_text_is_remarked_upon(tmp_path: Path, target: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a,{target}\n" + "".join(f'{k},"{k},500"\n' for k in range(1, 9)))
    config = train_config(str(path), target=target)
    notes = find_columns(config.model, open_reader(str(path)), SingleCommunicator())[1]
    assert any(note.startswith(f"{target} is text") and "'1,500'" in note for note in notes)


def test_a_table_of_which_no_column_is_left_says_why(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,price\n" + "".join(f"name{k},{k}.5\n" for k in range(1200)))
    with pytest.raises(UsageError, match=r"no column but price .*a is left out: it has over 1,000"):
        _notes(str(path))


def test_numbers_whose_variance_overflows_do_not_pass_in_silence(tmp_path: Path) -> None:
    huge, plain = [1e300, -1e300] * 8, [k + 0.5 for k in range(16)]
    assert "a is left out: all values are missing" in _notes(
        _write(tmp_path / "t.csv", huge, plain)
    )
    with pytest.raises(UsageError, match="price"):
        _notes(_write(tmp_path / "t.csv", plain, huge))


@pytest.mark.parametrize("wrong", ["", "nan", "inf", "1e30"])
def test_held_out_rows_without_their_number_are_refused(tmp_path: Path, wrong: str) -> None:
    prices: list[Any] = [k + 0.5 for k in range(16)]
    path = _write(tmp_path / "t.csv", range(16), prices)
    val = _write(tmp_path / "val.csv", range(16), [*prices[:-1], wrong])
    weights = str(tmp_path / "w.pt")
    train(train_config(path, target="price", save=weights, **_SMALL))
    with pytest.raises(UsageError, match=r"val\.csv: a sample lacks its 'price'"):
        train(train_config(path, target="price", val=val, **_SMALL))
    with pytest.raises(UsageError, match=r"val\.csv: a sample lacks its 'price'"):
        evaluate(train_config(val, weights=weights, **_SMALL))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_held_out_arrays_without_their_number_are_refused(tmp_path: Path, wrong: float) -> None:
    values = np.arange(4, dtype=np.float32) + 0.5
    for name, numbers in (("t", values), ("val", np.array([*values[:-1], wrong], np.float32))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["volume"] = np.ones((4, 1, 8, 8), np.float32)
            file["label"] = numbers
    options: Any = {**_SMALL, "batch_size": 2, "model": "convnet(width=2,depth=1)"}
    path, val = str(tmp_path / "t.h5"), str(tmp_path / "val.h5")
    with pytest.raises(UsageError, match=r"val\.h5: a sample lacks its 'label'"):
        train(train_config(path, val=val, **options))


def test_options_that_the_columns_of_weights_contradict_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.csv", range(16), (k + 0.5 for k in range(16)))
    weights = str(tmp_path / "w.pt")
    train(train_config(path, target="price", save=weights, **_SMALL))
    contradicting: list[tuple[Any, str]] = [
        ({"task": "classify"}, "--task classify: the weights of .* are for --task regress"),
        ({"category": ("a",)}, "--category a: it is not a category in the weights"),
    ]
    for options, said in contradicting:
        with pytest.raises(UsageError, match=said):
            train(train_config(path, target="price", weights=weights, **options, **_SMALL))
    with pytest.raises(UsageError, match="--task classify"):
        evaluate(train_config(path, task="classify", weights=weights, **_SMALL))
