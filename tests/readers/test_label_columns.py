"""One column of labels, written by each format's own library, is the same labels and classes."""

import contextlib
import csv
import io
import json
import logging
import pickle
import struct
import tarfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlio
from dlio.cli.ls import describe
from dlio.data.reader import open_reader
from dlio.data.splits import reading_options
from dlio.errors import SourceError, UsageError
from dlio.util import printable
from dlio.util.settings import REHEARSAL
from dlio_staging.pack_folder import pack

from .tfrecords import example
from .tfrecords import write as write_records


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # Each new file is read by a child process otherwise.
    monkeypatch.setattr(printable, "_told", set())


Column = Sequence[Any]
Labels = tuple[list[str], list[int]]


def expected_of(column: Column) -> Labels | None:
    """Return (classes, labels) of a column, None if one of its texts is empty."""
    if not isinstance(column[0], str):
        return [], [int(value) for value in column]
    texts = [value.strip() for value in column]
    if "" in texts:
        return None
    if set(texts) <= {"True", "False"}:
        return [], [int(text == "True") for text in texts]
    plain = [text.lstrip("-").replace(".0", "") for text in texts]
    if all(text.isascii() and text.isdecimal() for text in plain) and are_alike(texts):
        return [], [int(float(text)) for text in texts]
    classes = sorted(set(texts))
    return classes, [classes.index(text) for text in texts]


def are_alike(texts: Sequence[str]) -> bool:
    """True if one format, such as `{:03}`, writes all of some numbers with leading zeros."""
    padded = [text for text in texts if text.isdecimal() and str(int(text)) != text]
    widths = [len(text) for text in padded] + [0]
    return not padded or texts == [f"{int(text):0{widths[0]}}" for text in texts]


def open_labels(path: object, **options: Any) -> Labels | None:
    """Return dlio's labels, None for an error; the samples must have the same labels."""
    try:
        reader = open_reader(path, **options)
    except SourceError as error:
        if "is empty" not in str(error) and "is missing" not in str(error):
            raise
        return None
    labels = np.asarray(reader.labels).tolist()
    name = next((name for name in ("label", "cls") if name in reader.schema.kinds), "label")
    payloads = reader.read(np.arange(len(reader)))
    values = [reader.schema.split(payload)[name] for payload in payloads]
    if reader.format != "torch":  # Whose samples stay as the data set returns them.
        assert [int(np.asarray(value).reshape(-1)[0]) for value in values] == labels
    classes = list(reader.classes)
    reader.close()
    return classes, labels


def _array(column: Column, form: str) -> np.ndarray[Any, Any]:
    """Return a column as numpy holds it, texts as bytes or not."""
    if isinstance(column[0], str) and form == "bytes":
        return np.array([value.encode() for value in column])
    return np.array(column)


def _parts(column: Column, files: int) -> list[Column]:
    return [column] if files == 1 or len(column) < 2 else [column[:1], column[1:]]


def _csv(path: Path, column: Column, form: str, name: str = "label") -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x", name])
        writer.writerows([0.5, value] for value in column)


def _arrow(column: Column, form: str, name: str) -> pa.Table:
    label = pa.array([v.encode() if form == "bytes" and isinstance(v, str) else v for v in column])
    if form == "category" and isinstance(column[0], str):
        label = label.dictionary_encode()
    return pa.table({"x": np.full(len(column), 0.5), name: label})


def _parquet(path: Path, column: Column, form: str, name: str = "label") -> None:
    pq.write_table(_arrow(column, form, name), path, row_group_size=2)


def _feather(path: Path, column: Column, form: str, name: str = "label") -> None:
    feather.write_feather(_arrow(column, form, name), str(path))


def _npz(path: Path, column: Column, form: str, name: str = "label") -> None:
    save = np.savez_compressed if form == "category" else np.savez
    arrays: Any = {name: _array(column, form), "x": np.full(len(column), 0.5)}
    save(path, **arrays)


def _hdf5(path: Path, column: Column, form: str, name: str = "label") -> None:
    values: Any = _array(column, form)
    with h5py.File(path, "w") as file:
        file["x"] = np.full(len(column), 0.5)
        if values.dtype.kind == "U":
            values = np.array(column, object).reshape(-1, 1 if form == "category" else len(column))
            values = values if form == "category" else values.reshape(-1)
            file.create_dataset(name, data=values, dtype=h5py.string_dtype())
        else:
            file[name] = values


def _zarr(path: Path, column: Column, form: str, name: str = "label") -> None:
    group: Any = zarr.open_group(str(path), mode="w", zarr_format=2)
    group.create_array("x", data=np.full(len(column), 0.5))
    values = _array(column, form)
    if values.dtype.kind == "U":
        texts = group.create_array(name, shape=values.shape, dtype=str)
        texts[:] = values.astype(object)
    else:
        group.create_array(name, data=values)


def _tar(path: Path, column: Column, form: str, name: str = "cls") -> None:
    with tarfile.open(path, "w") as file:
        for k, value in enumerate(column):
            text = f"{value}\n" if form == "category" else str(value)
            for own, data in ((name, text.encode()), ("txt", b"x")):
                member = tarfile.TarInfo(f"{k:04d}.{own}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def _tfrecord(path: Path, column: Column, form: str, name: str = "label") -> None:
    def value_of(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode()
        return float(value) if isinstance(value, float) else int(value)

    write_records(path, [example({"x": [0.5], name: [value_of(v)]}) for v in column])


def _mds(folder: Path, parts: Sequence[Column], form: str, name: str = "label") -> None:
    """Write shards as Streaming lays them out: sizes of texts, then all values of a sample."""
    first = parts[0][0]
    encoding = "str" if isinstance(first, str) else "float64" if isinstance(first, float) else "int"
    if encoding == "str" and form == "bytes":
        encoding = "bytes"
    folder.mkdir()
    shards = []
    for number, column in enumerate(parts):
        rows = []
        for value in column:
            if isinstance(value, str):
                data = value.encode()
                rows.append(struct.pack("<I", len(data)) + data + b"x")
            else:
                rows.append(struct.pack("<d" if encoding == "float64" else "<q", value) + b"x")
        ends = np.cumsum([4 * (len(rows) + 2), *map(len, rows)]).astype("<u4")
        raw = struct.pack("<I", len(rows)) + ends.tobytes() + b"".join(rows)
        file = f"shard.{number:05d}.mds"
        (folder / file).write_bytes(raw)
        shards.append(
            {
                "column_encodings": [encoding, "bytes"],
                "column_names": [name, "x"],
                "column_sizes": [None if isinstance(first, str) else 8, 1],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": file, "bytes": len(raw), "hashes": {}},
                "samples": len(rows),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


class MapData:
    def __init__(self, column: Column) -> None:
        self.targets = list(column)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": np.float32(0.5), "label": self.targets[k]}


WRITERS: dict[str, Callable[..., None]] = {
    "csv": _csv,
    "parquet": _parquet,
    "feather": _feather,
    "npz": _npz,
    "h5": _hdf5,
    "zarr": _zarr,
    "tar": _tar,
    "tfrecord": _tfrecord,
}
FORMS = st.sampled_from(["plain", "bytes", "category"])
CHOOSING = WRITERS | {"mds": lambda path, column, form, name: _mds(path, [column], form, name)}
"""Those of formats with `label=`."""
NAMES = st.lists(
    st.sampled_from(
        ["cat", "dög", "2", "10", "2.0", "1_0", "\u0661", "NA", "nan", "no", "None", "a,b"]
    ),
    min_size=1,
    max_size=6,
)
COLUMNS = st.one_of(
    st.lists(st.integers(-100, 2**40), min_size=1, max_size=6),
    st.lists(st.integers(-100, 100).map(float), min_size=1, max_size=6),
    st.lists(st.booleans(), min_size=1, max_size=6),
    st.lists(st.integers(-5, 30).map(str), min_size=1, max_size=6),
    st.lists(st.integers(0, 30).map("{}.0".format), min_size=1, max_size=6),
    st.lists(st.integers(0, 120).map("{:02}".format), min_size=1, max_size=6),
    st.lists(st.sampled_from(["\u0661", "\u0662"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["01", "1", "02", "007", "10", "100"]), min_size=1, max_size=6),
    NAMES.map(lambda names: [*names, "cat"]),
    NAMES.map(lambda names: [*names, ""]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    column=COLUMNS,
    form=st.sampled_from(["plain", "bytes", "category"]),
    files=st.integers(1, 2),
)
def test_a_column_has_the_same_labels_in_all_formats(
    column: Column, form: str, files: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("labels")
    expected = expected_of(column)
    for suffix, write in WRITERS.items():
        parts = [column] if suffix == "zarr" else _parts(column, files)
        paths = [folder / f"part{k}.{suffix}" for k in range(len(parts))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Zarr's, of texts in version 2.
            for path, part in zip(paths, parts, strict=True):
                write(path, part, form)
        assert open_labels([str(path) for path in paths]) == expected, (suffix, form)
    _mds(folder / "mds", _parts(column, files), form)
    assert open_labels(str(folder / "mds")) == expected, ("mds", form)
    assert open_labels(MapData(column)) == expected


COLUMN = ["cat", "dog", "cat"]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(column=COLUMNS, form=FORMS, files=st.integers(1, 2))
def test_a_column_of_any_name_has_these_labels_if_it_is_chosen(
    column: Column, form: str, files: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("labels")
    expected = expected_of(column)
    for suffix, write in CHOOSING.items():
        parts = [column] if suffix in ("zarr", "mds") else _parts(column, files)
        paths = [str(folder / f"part{k}.{suffix}") for k in range(len(parts))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Zarr's, of texts in version 2.
            for path, part in zip(paths, parts, strict=True):
                write(Path(path), part, form, "species")
        assert open_labels(paths, label="species") == expected, (suffix, form)
        named = [f"{path}::x" for path in paths]
        if suffix not in ("mds", "tar"):
            assert open_labels(named, label="species") == expected, (suffix, form)


@pytest.mark.parametrize("suffix", CHOOSING)
def test_a_label_that_is_not_there_is_refused_with_the_names_that_are(
    suffix: str, tmp_path: Path
) -> None:
    path = str(tmp_path / f"a.{suffix}")
    CHOOSING[suffix](Path(path), COLUMN, "plain", "species")
    with pytest.raises(UsageError, match=r"x.*did you mean species"):
        open_reader(path, label="specis")
    open_reader(path).close()
    reader = open_reader(path, label="species")
    assert [reader.schema.kinds["label"].text, "species" in reader.schema.kinds] == ["int64", False]
    copy = pickle.loads(pickle.dumps(reader))
    assert [each.classes for each in (reader, copy)] == [["cat", "dog"]] * 2
    with dlio.open(path, label="species", tiers="none") as data:
        assert list(data.targets) == [data[k]["label"] for k in range(3)] == [0, 1, 0]
    about = describe(path, label="species")
    assert (about["label"], about["classes"]) == ("species", {"cat": 2, "dog": 1})


@pytest.mark.parametrize("suffix", ["csv", "parquet", "feather", "npz", "h5", "zarr", "tfrecord"])
def test_the_chosen_label_takes_the_name_of_no_other_field(suffix: str, tmp_path: Path) -> None:
    """A label that is left out of the names to read gives its name up to the chosen one."""
    path = str(tmp_path / f"a.{suffix}")
    columns: dict[str, list[Any]] = {
        "x": [0.5, 0.5],
        "label": [3, 4],
        "species": [b"cat", b"dog"],
    }
    arrays: Any = {name: np.array(values) for name, values in columns.items()}
    if suffix == "csv":
        Path(path).write_text("x,label,species\n0.5,3,cat\n0.5,4,dog\n")
    elif suffix in ("parquet", "feather"):
        (pq.write_table if suffix == "parquet" else feather.write_feather)(pa.table(columns), path)
    elif suffix == "tfrecord":
        rows = [{name: values[k : k + 1] for name, values in columns.items()} for k in range(2)]
        write_records(Path(path), map(example, rows))
    elif suffix == "npz":
        np.savez(path, **arrays)
    elif suffix == "h5":
        with h5py.File(path, "w") as file:
            file.update(arrays)
    else:
        for name, values in arrays.items():
            zarr.save_array(f"{path}/{name}", values, zarr_format=2)
        zarr.open_group(path, mode="a", zarr_format=2)
    with pytest.raises(UsageError, match="has a 'label' as well"):
        open_reader(path, label="species")
    assert open_labels(f"{path}::x,species", label="species") == (["cat", "dog"], [0, 1])
    assert open_labels(f"{path}::x", label="species") == (["cat", "dog"], [0, 1])
    assert open_labels(path) == open_labels(path, label="label") == ([], [3, 4])


def test_a_tar_has_its_label_chosen_where_nothing_else_is_called_so(tmp_path: Path) -> None:
    _tar(tmp_path / "a.tar", COLUMN, "plain", "species")
    for fields in (None, ["txt"], ["species", "txt"]):
        reader = open_reader(str(tmp_path / "a.tar"), label="species", fields=fields)
        assert (reader.classes, reader.labels.tolist()) == (["cat", "dog"], [0, 1, 0])
        assert sorted(reader.schema.kinds) == ["label", "txt"]
    with dlio.open(tmp_path / "a.tar", label="species", tiers="none") as data:
        names = [data.classes[data[k]["label"]] for k in range(3)]
    assert names == COLUMN
    with tarfile.open(tmp_path / "both.tar", "w") as file:
        for name in ("0.label", "0.species", "0.txt"):
            file.addfile(tarfile.TarInfo(name))
    with pytest.raises(UsageError, match="has a 'label' as well"):
        open_reader(str(tmp_path / "both.tar"), label="species")
    pack(str(tmp_path / "a.tar"), str(tmp_path / "packed"), format="tar")
    with pytest.raises(UsageError, match="has the label with which it was packed"):
        open_reader(str(tmp_path / "packed"), label="species")


def test_choices_of_long_names_have_indexes_of_their_own(tmp_path: Path) -> None:
    names = ["a" * 70 + "1", "a" * 70 + "2", "b-c", "b", "c"]
    pq.write_table(pa.table({name: [k] for k, name in enumerate(names)}), tmp_path / "a.parquet")
    for k, name in enumerate(names):
        reader = open_reader(f"{tmp_path / 'a.parquet'}::{name}")
        assert reader.schema.split(reader.read(np.arange(1))[0]) == {name: k}
    reader = open_reader(f"{tmp_path / 'a.parquet'}::b,c")
    assert list(reader.schema.kinds) == ["b", "c"]
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in ("b-c", "b", "c"):
            member = tarfile.TarInfo(f"0.{name}")
            file.addfile(member)
    for fields in (["b-c"], ["b", "c"]):
        reader = open_reader(str(tmp_path / "a.tar"), fields=fields)
        assert list(reader.schema.kinds) == fields


@pytest.mark.parametrize("column", [[0.5, 2.0], [0.5, float("nan")]])
def test_numbers_to_predict_stay_numbers_and_are_told(
    column: Column, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = {suffix: write for suffix, write in WRITERS.items() if suffix != "tar"}
    paths: list[object] = [tmp_path / f"a.{suffix}" for suffix in writers]
    for path, write in zip(paths, writers.values(), strict=True):
        assert isinstance(path, Path)
        write(path, column, "plain")
    _mds(tmp_path / "mds", [column], "plain")
    for path in [*paths, tmp_path / "mds"]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dlio"):
            reader = open_reader(str(path))
        payloads = reader.read(np.arange(2))
        values = [reader.schema.split(payload)["label"] for payload in payloads]
        assert np.array_equal(values, column, equal_nan=True)
        assert not len(reader.classes)
        assert "its label" in caplog.text, path
        assert "with fractions" in caplog.text
        reader.close()


def test_a_missing_label_among_whole_numbers_is_an_error_that_names_the_sample(
    tmp_path: Path,
) -> None:
    for suffix, write in WRITERS.items():
        path = tmp_path / f"a.{suffix}"
        write(path, [1.0, float("nan"), 2.0], "plain")
        with pytest.raises(SourceError, match=r"is (empty|missing)") as caught:
            open_reader(str(path))
        assert "row 3" in str(caught.value) or "1" in str(caught.value).rsplit(": its", 1)[0][-8:]


def test_numbers_that_are_written_in_several_ways_are_told_to_be_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("x,label\n0.5,01\n0.5,1\n0.5,2\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert open_labels(str(tmp_path / "a.csv")) == (["01", "1", "2"], [0, 1, 2])
    assert "such as 01 and 1, are taken for names of classes" in caplog.text


def test_a_number_as_a_label_is_refused_with_the_text_to_give(tmp_path: Path) -> None:
    pq.write_table(pa.table({"3": [0.5, 1.5], "4": ["cat", "dog"]}), tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"label=4: give text, such as label='4'") as caught:
        open_reader(path, label=4)
    word = 'label="4"'
    assert f"(`--reader-option '{word}'`)" in str(caught.value)
    chosen = reading_options(None, None, [word])
    assert list(open_reader(path, label=chosen["label"]).classes) == ["cat", "dog"]
    with pytest.raises(UsageError, match=r"give text$"):
        open_reader(path, label=["4"])


# Columns that no name calls labels

REVIEWS = [f"review {k}" for k in range(40)]
MOODS = [("good", "bad", "fair")[k % 3] for k in range(40)]
SORTED = sorted(MOODS)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"review": REVIEWS, "sentiment": MOODS}, "sentiment"),
        ({"review": REVIEWS, "sentiment": SORTED}, "sentiment"),
        ({"v1": MOODS, "v2": REVIEWS}, "v1"),
        ({"headline": REVIEWS, "is_joke": [k % 2 for k in range(40)]}, "is_joke"),
        ({"title": REVIEWS, "text": REVIEWS, "mood": MOODS}, "mood"),
        ({"en": REVIEWS, "fr": REVIEWS}, ""),
        ({"text": REVIEWS, "source": ["wiki"] * 40}, ""),
        ({"text": REVIEWS, "row_id": [k % 2 for k in range(40)]}, ""),
        ({"size": MOODS, "colour": MOODS}, ""),
        ({"text": REVIEWS, "score": [0.5, 1.5] * 20}, ""),
        ({"text": REVIEWS[:6], "mood": MOODS[:6]}, ""),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow"])
def test_a_column_that_repeats_next_to_one_that_does_not_may_be_the_label(
    suffix: str,
    table: dict[str, list[Any]],
    named: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    elif suffix == "parquet":
        pq.write_table(pa.table(table), path, row_group_size=7)
    else:
        feather.write_feather(pa.table(table), path)
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(path)).close()
    assert [each.getMessage().partition("; ")[2] for each in caplog.records] == [
        f"if {named} is it, choose it, such as label={named!r} (`--reader-option label={named}`): "
        "`targets` are 0"
    ] * bool(named)
    if named:
        made = open_labels(str(path), label=named)
        assert made is not None
        classes, labels = made
        assert [classes[k] for k in labels] == table[named] if classes else labels == table[named]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz", "h5"])
def test_several_labels_are_fields_of_their_own(suffix: str, tmp_path: Path) -> None:
    table = {"x": np.arange(3.0), "toxic": np.array([0, 1, 1]), "rude": np.array([1, 0, 1])}
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("x,toxic,rude\n0.0,0,1\n1.0,1,0\n2.0,1,1\n")
    elif suffix == "parquet":
        pq.write_table(pa.table(table), path)
    elif suffix == "npz":
        np.savez(path, **table)  # type: ignore[arg-type]
    else:
        with h5py.File(path, "w") as file:
            file.update(table)
    with pytest.raises(UsageError, match=r"a label is one field: .*::toxic,rude reads them"):
        open_reader(str(path), label="toxic, rude")
    with contextlib.closing(open_reader(f"{path}::toxic,rude")) as reader:
        values = [reader.schema.split(payload) for payload in reader.read(np.arange(3))]
    assert [list(each.values()) for each in values] == [[0, 1], [1, 0], [1, 1]]
