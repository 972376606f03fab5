"""Forms of folders and files that people have, next to those of the guides: read, or told."""

import decimal
import io
import json
import logging
import lzma
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.util import printable
from dlio.util.settings import REHEARSAL
from dlio_staging.pack_folder import pack
from tests.readers.tar_members import write_tar_of


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # Each new file is read by a child process otherwise.
    monkeypatch.setattr(printable, "_told", set())


def picture(path: Path, level: int = 9) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (level, level, level)).save(path)


def labels_of(path: object, **options: Any) -> tuple[list[str], list[int]]:
    reader = open_reader(path, **options)
    try:
        return list(reader.classes), np.asarray(reader.labels).tolist()
    finally:
        reader.close()


# What a folder is


@pytest.mark.parametrize(
    ("train", "test", "others"),
    [
        ("training_set", "test_set", ()),
        ("seg_train/seg_train", "seg_test/seg_test", ("seg_pred/seg_pred",)),
        ("train", "test", ("ground_truth/b",)),
        ("Train", "Validation", ("extra/a", "extra/b")),
    ],
)
def test_splits_are_found_by_what_their_names_share(
    train: str,
    test: str,
    others: Sequence[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for split, count in ((train, 3), (test, 2)):
        for kind in "ab":
            for k in range(count):
                picture(tmp_path / split / kind / f"{k}.png")
    for other in others:
        picture(tmp_path / other / "0.png")
    with pytest.raises(UsageError, match="holds the splits"):
        open_reader(str(tmp_path))
    assert labels_of(str(tmp_path), split="train") == (["a", "b"], [0] * 3 + [1] * 3)
    held_out = "val" if "Val" in test else "test"
    assert labels_of(str(tmp_path), split=held_out) == (["a", "b"], [0, 0, 1, 1])
    assert "classes are not those" not in caplog.text


@pytest.mark.parametrize("classes", [("train", "plane"), ("bullet_train", "test_tube")])
def test_classes_that_are_called_like_a_split_stay_classes(
    classes: Sequence[str], tmp_path: Path
) -> None:
    for name in classes:
        picture(tmp_path / name / "0.png")
    assert labels_of(str(tmp_path)) == (sorted(classes), [0, 1])


@pytest.mark.parametrize("form", ["folder", "npz", "csv", "tar", "parquet"])
def test_names_with_characters_of_patterns_are_themselves(form: str, tmp_path: Path) -> None:
    root = tmp_path / "a [1] {x,y}*"
    root.mkdir()
    path = root if form == "folder" else root / f"x[2].{form}"
    if form == "folder":
        for name in ("a", "b"):
            picture(path / name / "0.png")
    elif form == "npz":
        np.savez(path, x=np.zeros((2, 3)), y=np.arange(2))
    elif form == "csv":
        path.write_text("x,label\n1,0\n2,1\n")
    elif form == "parquet":
        pq.write_table(pa.table({"x": [1, 2], "label": [0, 1]}), path)
    else:
        write_tar_of(path, {"0.txt": b"x", "0.cls": b"0", "1.txt": b"x", "1.cls": b"1"})
    assert labels_of(str(path))[1] == [0, 1]


def test_a_folder_of_tables_has_the_splits_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,label\n1,x\n2,y\n")
    (tmp_path / "test.csv").write_text("a\n3\n")
    (tmp_path / "sample_submission.csv").write_text("id,label\n0,x\n")
    with pytest.raises(UsageError, match="holds the splits train"):
        open_reader(str(tmp_path))
    assert labels_of(str(tmp_path), split="train") == (["x", "y"], [0, 1])
    assert labels_of(str(tmp_path), split="test") == ([], [0])


def test_a_table_beside_arrays_labels_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(2):
        np.save(tmp_path / f"{k}.npy", np.ones((k + 2, 3, 3), np.float32))
    (tmp_path / "labels.csv").write_text("file,label\n0.npy,1\n1.npy,0\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert labels_of(str(tmp_path)) == (["0", "1"], [1, 0])
    assert not caplog.text


# Labels


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", "filename\tlabel\na.png\tx\nb.png\ty\n"),
        ("labels.csv", 'filename, label\na.png, "x"\nb.png, y\n'),
        ("labels.csv", "filename|label\na.png|x\nb.png|y\n"),
        ("labels.csv", "id,breed\na,x\nb,y\n"),
        ("labels.csv", ",id,breed\n0,a,x\n1,b,y\n"),
        ("labels.csv", "img_name,class_id,label\na,5,x\nb,6,y\n"),
        ("labels.jsonl", '{"id": "a", "breed": "x"}\n{"id": "b", "breed": "y"}\n'),
        ("list.csv", "id\tlabel\na\tx\nb\ty\n"),
        ("list.csv", "id, label\na, x\nb, y\n"),
    ],
)
def test_tables_beside_pictures_as_programs_write_them(
    name: str, text: str, tmp_path: Path
) -> None:
    for file in ("a.png", "b.png"):
        picture(tmp_path / file)
    (tmp_path / name).write_bytes(text.encode())
    assert labels_of(str(tmp_path)) == (["x", "y"], [0, 1])


@pytest.mark.parametrize(
    "rows",
    [[["a.png", "x"]], [["file_name", "label"], ["a.png", "x"]], [{"id": "a"}, 3], ["a.png"]],
)
def test_rows_of_json_that_are_no_objects_are_refused(rows: Any, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "labels.json").write_text(json.dumps(rows))
    with pytest.raises(SourceError, match="label table: its rows are not objects"):
        open_reader(str(tmp_path))


def test_a_table_of_parquet_may_have_a_label_of_any_name(tmp_path: Path) -> None:
    for file in ("a.png", "b.png"):
        picture(tmp_path / file)
    pq.write_table(pa.table({"id": ["a", "b"], "breed": ["x", "y"]}), tmp_path / "labels.parquet")
    assert labels_of(str(tmp_path)) == (["x", "y"], [0, 1])


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_texts_of_other_encodings_are_refused_with_the_remedy(
    encoding: str, tmp_path: Path
) -> None:
    text = "file,label\na.png,k\xe4\n".encode(encoding)
    picture(tmp_path / "a" / "a.png")
    (tmp_path / "a" / "labels.csv").write_bytes(text)
    (tmp_path / "x.csv").write_bytes(text)
    for path in (tmp_path / "a", tmp_path / "x.csv"):
        with pytest.raises(SourceError, match=r"is (UTF-16|not UTF-8).*: save it as UTF-8"):
            open_reader(str(path))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gz", "compressed by gzip: give it a name that says so, ending in .gz"),
        ("bz2", "compressed by bzip2"),
        ("xz", "compressed by xz"),
        ("zst", "compressed by Zstandard"),
        ("xlsx", r"a spreadsheet \(\.xlsx\): .*save it as CSV"),
        ("parquet", r"is Parquet: give it a name that ends in \.parquet"),
    ],
)
def test_what_is_called_as_a_text_and_is_none_is_said(
    kind: str, words: str, tmp_path: Path
) -> None:
    text, made = b"file,label\na.png,k\n" * 40, tmp_path / f"x.{kind}"
    if kind == "xlsx":
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("xl/workbook.xml", text)
    elif kind == "parquet":
        pq.write_table(pa.table({"file": ["a.png"], "label": ["k\xe4"], "x": [0.1]}), made)
    else:
        codec = {"gz": "gzip", "xz": None, "zst": "zstd"}.get(kind, kind)
        if codec is None:
            made.write_bytes(lzma.compress(text))
        else:
            with pa.output_stream(str(made), compression=codec) as stream:
                stream.write(text)
    picture(tmp_path / "a" / "a.png")
    for place in (tmp_path / "x.csv", tmp_path / "a" / "labels.csv"):
        place.write_bytes(made.read_bytes())
        with pytest.raises(SourceError, match=words):
            open_reader(str(place if place.name == "x.csv" else place.parent))


def test_descriptions_are_no_labels_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a cat\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert labels_of(str(tmp_path)) == ([], [0])
    assert "it gives the pictures no labels" in caplog.text


@pytest.mark.parametrize("form", ["csv", "parquet", "feather", "pictures", "list"])
@pytest.mark.parametrize("column", ["split", "fold"])
def test_a_column_of_splits_is_told(
    column: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"id": ["a", "b"], "label": [0, 1], column: ["train", "test"]}
    text = f"id,label,{column}\na,0,train\nb,1,test\n"
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        pq.write_table(pa.table(columns), path)
    elif form == "feather":
        feather.write_feather(pa.table(columns), path)
    elif form == "csv":
        path.write_text(text)
    else:
        path = tmp_path
        (tmp_path / ("labels.csv" if form == "pictures" else "all.csv")).write_text(text)
        for name in ("a", "b"):
            picture(tmp_path / f"{name}.png")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert labels_of(str(path))[1] == [0, 1]
    assert f"its column {column} chooses no samples" in caplog.text
    if form in ("pictures", "list"):  # Others have another label then.
        caplog.clear()
        table = "labels.csv" if form == "pictures" else "all.csv"
        reader = open_reader(str(path), table=table, label=column)
        assert list(reader.classes) == ["test", "train"]
        assert "chooses no samples" not in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1.5,2,0\n2.5,3,1\n", "its first line, 1.5, 2, 0, names its columns"),
        ("5.1,3.5,setosa\n2.5,3,x\n", "its first line, 5.1, 3.5, setosa, names"),
        ("a;b;label\n1,5;2;x\n2,5;3;y\n", "decimal commas are read as text, in its columns a:"),
        ("a;label\n1;0,5\n2;1,5\n", "its labels are numbers with fractions"),
        ("0,1,label\n1,2,0\n", ""),
        ("a,b,label\nx,2,0\n", ""),
    ],
)
def test_what_a_table_of_text_may_mean_otherwise_is_told(
    text: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.csv").write_text(text)
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/x.csv").close()
    assert words in caplog.text
    assert bool(words) == bool(caplog.text)


def test_several_class_labels_are_told_and_one_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"fine": ["z", "a"], "coarse": ["q", "p"]}
    hub = {k: {"names": names, "_type": "ClassLabel"} for k, names in kinds.items()}
    table = pa.table({"x": [1, 2], "fine": [1, 0], "coarse": [0, 1]})
    meta = {"huggingface": json.dumps({"info": {"features": hub}})}
    pq.write_table(table.replace_schema_metadata(meta), tmp_path / "a.parquet")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert labels_of(f"{tmp_path}/a.parquet") == ([], [0, 0])
    assert "fine, coarse are all class labels" in caplog.text
    assert labels_of(f"{tmp_path}/a.parquet::x,fine") == (["z", "a"], [1, 0])


@pytest.mark.parametrize("form", ["parquet", "feather"])
def test_decimals_are_numbers_and_empty_columns_nan(form: str, tmp_path: Path) -> None:
    places = pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.25")])
    whole = pa.array([decimal.Decimal(2), decimal.Decimal(1)])
    table = pa.table({"x": places, "none": pa.nulls(2), "label": whole})
    path = f"{tmp_path}/x.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    with dlio.open(path, tiers="none") as data:
        assert [float(data[k]["x"]) for k in range(2)] == [1.5, 2.25]
        assert np.isnan(float(data[0]["none"]))
        assert list(data.targets) == [2, 1]


def test_labels_of_one_group_and_of_sets_are_found(tmp_path: Path) -> None:
    x, y = np.zeros((3, 2)), np.array([2, 0, 1])
    for names in (("data/images", "data/labels"), ("test_set_x", "test_set_y")):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file[names[0]], file[names[1]] = x, y
        assert labels_of(f"{tmp_path}/a.h5") == ([], [2, 0, 1])
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["list_classes"] = np.arange(5)
    with pytest.raises(UsageError, match=r"as in .*::test_set_x,test_set_y$"):
        open_reader(f"{tmp_path}/a.h5")


def test_an_empty_label_of_hdf5_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["labels"] = np.zeros(3), h5py.Empty("i4")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/a.h5").close()
    assert "its labels is empty, and no label" in caplog.text


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"0.txt": b"a", "0.cls.txt": b"1"}, "its cls.txt is a text: call it cls"),
        ({"cat/0.jpg": b"x", "dog/0.jpg": b"x"}, "its samples lie in folders, such as cat and"),
        ({"cat/0.jpg": b"x", "cat/1.jpg": b"x"}, ""),
    ],
)
def test_what_may_be_labels_in_a_tar_is_told(
    members: dict[str, bytes], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tar_of(tmp_path / "a.tar", members)
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/a.tar").close()
    assert words in caplog.text
    assert bool(words) == bool(caplog.text)


@pytest.mark.parametrize("place", ["classes.txt", "labels/classes.txt", "obj.names"])
def test_names_of_classes_are_found_where_programs_put_them(place: str, tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_bytes("\ufeff1 .5 .5 .2 .2\n".encode())
    (tmp_path / place).write_text("\ufeffcat\ndog\n", encoding="utf-8")
    with dlio.open(tmp_path, tiers="none", image_size=None) as data:
        assert list(data.classes) == ["cat", "dog"]
        assert data[0][1]["labels"].tolist() == [1]
    (tmp_path / "data.yaml").write_text("names: [cat, dog]\nnc: 3\n")
    with pytest.raises(SourceError, match="its nc is 3, and it has 2 names"):
        open_reader(str(tmp_path))


# Samples and values


def test_a_target_without_its_input_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, count in (("images", 2), ("labels", 3)):
        (tmp_path / folder).mkdir()
        for k in range(count):
            np.save(tmp_path / folder / f"{k}.npy", np.zeros((2, 3 + k), np.float32))
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(str(tmp_path))
    assert len(reader) == 2
    reader.close()
    assert "1 file (2.npy) of labels left out" in caplog.text


@pytest.mark.parametrize("suffix", ["npy", "npz", "h5"])
def test_rows_may_have_no_width(suffix: str, tmp_path: Path) -> None:
    path, x, y = tmp_path / f"a.{suffix}", np.zeros((3, 0), np.float32), np.arange(3)
    if suffix == "npy":
        np.save(path, x)
    elif suffix == "npz":
        np.savez(path, x=x, y=y)
    else:
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = x, y
    with dlio.open(path, tiers="none") as data:
        shapes = [tuple(next(iter(data[k].values())).shape) for k in range(3)]
    assert shapes == [(0,)] * 3
    pack(str(path), str(tmp_path / "packed"))


def _decoded(data: bytes, folder: Path, suffix: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / f"a{suffix}").write_bytes(data)
    with dlio.open(folder, tiers="none", image_size=None) as opened:
        return np.asarray(opened[0]["image"]).transpose(1, 2, 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_transparent_gif_has_the_colours_that_pillow_gives(seed: int, tmp_path: Path) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).quantize(8).save(stream, "GIF", transparency=seed, interlace=seed % 2)
    expected = np.asarray(Image.open(stream).convert("RGB"))
    assert np.array_equal(_decoded(stream.getvalue(), tmp_path / "p", ".png"), expected)


@pytest.mark.parametrize("masks", [None, (0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F)])
def test_a_bmp_of_16_bits_has_white_that_is_white(
    masks: tuple[int, int, int] | None, tmp_path: Path
) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 16, (5, 6), np.uint16)
    numbers[0, 0] = 0xFFFF
    extra = b"" if masks is None else np.array(masks, "<u4").tobytes()
    info = np.array([40, 6, 5], "<i4").tobytes() + np.array([1, 16], "<u2").tobytes()
    info += np.array([0 if masks is None else 3, 60, 0, 0, 0, 0], "<i4").tobytes()
    begin = 14 + len(info) + len(extra)
    head = b"BM" + np.array([begin + 60, 0, begin], "<u4").tobytes()
    data = head + info + extra + numbers.astype("<u2").tobytes()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert expected.max() == 255
    assert np.array_equal(_decoded(data, tmp_path / "p", ".bmp"), expected)


@pytest.mark.parametrize("text", [b"P2 2 1 255 7 9", b"P2\n2 1\n15\n7 9", b"P3 1 1 255 7 9 8"])
def test_a_text_of_pixels_may_end_with_its_last_digit(text: bytes, tmp_path: Path) -> None:
    expected = np.asarray(Image.open(io.BytesIO(text)).convert("RGB"))
    assert np.array_equal(_decoded(text, tmp_path / "p", ".ppm"), expected)


@pytest.mark.parametrize(("mode", "codec"), [("LAB", None), ("RGB", "zstd"), ("L", "lzma")])
def test_tiffs_that_opencv_does_not_know_are_read_by_pillow(
    mode: str, codec: str | None, tmp_path: Path
) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 30, 30)).convert(mode).save(stream, "TIFF", compression=codec)
    expected = np.asarray(Image.open(stream).convert("RGB"))
    made = _decoded(stream.getvalue(), tmp_path / "p", ".tif")
    assert np.array_equal(made, expected)


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".png"])
def test_masks_whose_format_changes_numbers_are_told(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio.image.image_warnings import WARNINGS

    monkeypatch.setattr(WARNINGS, "_told", set())
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "masks").mkdir()
    Image.new("L", (8, 6), 1).save(tmp_path / "masks" / f"a{suffix}")
    with (
        caplog.at_level(logging.WARNING, "dlio"),
        dlio.open(tmp_path, tiers="none", image_size=None) as data,
    ):
        assert data[0][1].shape == (6, 8)
    assert ("changes numbers: store masks as PNG" in caplog.text) == (suffix != ".png")
