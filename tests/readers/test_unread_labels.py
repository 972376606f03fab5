"""A folder of pictures whose labels lie next to it is read with them, or says that it is not."""

import gzip
import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlio.data.reader import open_reader
from dlio.errors import DlioError
from dlio.util import printable

NAMES = [f"img_{k}.png" for k in range(6)]
LABELS = [0, 1, 2, 0, 1, 2]
ROWS = list(zip(NAMES, LABELS, strict=True))
CSV = "file_name,label\n" + "".join(f"{name},{label}\n" for name, label in ROWS)
PLAIN = "".join(f"{name} {label}\n" for name, label in ROWS)
OBJECTS = [{"file_name": name, "label": label} for name, label in ROWS]


def _folder(root: Path) -> None:
    for name in NAMES:
        (root / name).write_bytes(b"\x89PNG")


def _labels(root: Path) -> list[int] | None:
    """Return the labels; None without any."""
    reader = open_reader(str(root))
    assert len(reader) == len(NAMES)
    has = "label" in dict(reader.schema.fields)
    reader.close()
    return np.asarray(reader.labels).tolist() if has else None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train_labels.csv", CSV),
        ("annotations.csv", CSV),
        ("LABELS.CSV", CSV),
        ("metadata.tsv", CSV.replace(",", "\t")),
        ("labels.csv", CSV.replace(",", ";")),
        ("train.csv", CSV.replace(",", ";")),
        ("a.csv", CSV.partition("\n")[2]),
        ("a.csv", "".join(f"{label},{name}\n" for name, label in ROWS)),
        ("ids.csv", CSV.replace(".png", "").replace("file_name", "id")),
        ("train.txt", PLAIN),
    ],
)
def test_tables_of_any_name_give_the_labels(name: str, text: str, tmp_path: Path) -> None:
    _folder(tmp_path)
    (tmp_path / name).write_text(text)
    assert _labels(tmp_path) == LABELS


UNREAD: dict[str, str | bytes] = {
    "list.txt": PLAIN,
    "labels.txt": CSV,
    "classes.txt": "cat\ndog\n",
    "annotations.json": json.dumps(dict(ROWS)),
    "train.json": json.dumps(OBJECTS),
    "annotations.jsonl": "".join(json.dumps(row) + "\n" for row in OBJECTS),
    "train.xlsx": b"PK\3\4",
    "labels.pkl": b"\x80\4.",
    "labels.mat": b"MATLAB 5.0 MAT-file" + bytes(200),
    "labels.sqlite": b"SQLite format 3\0",
    "labels.csv.gz": gzip.compress(CSV.encode()),
    "annotations.xml": "<annotations><image name='img_0.png'/></annotations>",
    "half.csv": "".join(CSV.splitlines(keepends=True)[:3]),
    "paths.csv": CSV.replace("img", "/kaggle/input/img"),
    "img_3.txt": "a dog",
    "img_3.xml": "<annotation/>",
}


@pytest.mark.parametrize("name", UNREAD)
def test_files_that_may_hold_labels_are_told_once_each(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printable, "_told", set())
    _folder(tmp_path)
    body = UNREAD[name]
    (tmp_path / name).write_bytes(body if isinstance(body, bytes) else body.encode())
    with caplog.at_level(logging.WARNING, "dlio"):
        assert _labels(tmp_path) is None
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.count(name) in (1, 2)  # Also in the remedy.
    assert "which format=" not in message


def test_a_parquet_file_is_told_with_the_name_that_has_it_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _folder(tmp_path)
    pq.write_table(pa.Table.from_pylist(OBJECTS), tmp_path / "train_labels.parquet")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert _labels(tmp_path) is None
    assert "call it labels.parquet" in caplog.text
    (tmp_path / "train_labels.parquet").rename(tmp_path / "labels.parquet")
    assert _labels(tmp_path) == LABELS


def test_the_remedy_of_a_list_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _folder(tmp_path)
    (tmp_path / "list.txt").write_text(PLAIN)
    with caplog.at_level(logging.WARNING, "dlio"):
        assert _labels(tmp_path) is None
    assert "choose it with table='list.txt'" in caplog.text
    assert np.asarray(open_reader(str(tmp_path), table="list.txt").labels).tolist() == LABELS


@pytest.mark.parametrize("text", [CSV + "img_0.png,2\n", "image,age,dx\nimg_0.png,3,1\n"])
def test_a_table_that_leaves_a_choice_is_an_error(text: str, tmp_path: Path) -> None:
    _folder(tmp_path)
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DlioError, match=r"a\.csv"):
        open_reader(str(tmp_path))


def test_notes_next_to_pictures_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _folder(tmp_path)
    (tmp_path / "LICENSE.txt").write_text("MIT")
    (tmp_path / "README.md").write_text("img_0.png is a cat")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert _labels(tmp_path) is None
    assert not caplog.records
