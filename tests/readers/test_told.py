"""Files that a reader leaves out, or takes in one of two ways, are said once, with their count."""

import bz2
import contextlib
import gzip
import io
import logging
import lzma
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

from dlio.data.labels import label_candidates, most_likely_label
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.image.decoder import decode_whole
from tests.readers.test_tar_members import rows


def _open(path: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[int, list[str]]:
    """Return the samples of a data set, and the warnings of reading them all."""
    caplog.clear()
    caplog.set_level(logging.WARNING, "dlio")
    with contextlib.closing(open_reader(str(path), **options)) as reader:
        reader.read(np.arange(len(reader)))
        return len(reader), [record.getMessage() for record in caplog.records]


def _pictures(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        kind = "GIF" if name.endswith(".gif") else "PNG"
        Image.new("L", (8, 6), 5).save(folder / name, kind)


@pytest.mark.parametrize("kind", ["classes", "flat", "masks", "table", "yolo"])
def test_pictures_with_other_suffixes_are_counted(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    names = ["0.png", "1.PNG", "2.gif", "3.gif"]
    folders = {
        "classes": ["a", "b"],
        "flat": [""],
        "table": ["images"],
        "masks": ["images", "masks"],
        "yolo": ["images"],
    }
    for folder in folders[kind]:
        _pictures(data / folder, names)
    if kind == "table":
        (data / "labels.csv").write_text("file,label\nimages/0.png,a\nimages/1.PNG,b\n")
    if kind == "yolo":
        (data / "labels").mkdir()
        for k in range(4):
            (data / "labels" / f"{k}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    lost = 2 * len(folders[kind])
    for _ in range(2):  # Also when the listing comes from the cache, in another process.
        monkeypatch.setattr("dlio.util.printable._told", set())
        count, logged = _open(data, caplog)
        assert count == (4 if kind == "classes" else 2)
        assert (
            sum(f"leaves out {lost} picture{'s' * (lost > 1)}, such as" in each for each in logged)
            == 1
        )


@pytest.mark.parametrize("turn", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["coco", "masks"])
def test_annotations_of_turned_photos_are_told(
    kind: str, turn: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exif = Image.Exif()
    exif[274] = turn
    (tmp_path / "images").mkdir()
    for k in range(2):
        Image.new("RGB", (10, 8)).save(tmp_path / "images" / f"{k}.jpg", exif=exif.tobytes())
    path = tmp_path
    if kind == "masks":
        _pictures(tmp_path / "masks", ["0.png", "1.png"])
    else:
        path = tmp_path / "a.json"
        images = [{"id": k, "file_name": f"{k}.jpg", "width": 10, "height": 8} for k in range(2)]
        box = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 2, 2], "iscrowd": 0}
        path.write_text(
            f'{{"images": {images}, "annotations": [{box}], '
            '"categories": [{"id": 1, "name": "a"}]}'.replace("'", '"')
        )
    _, logged = _open(path, caplog)
    said = [each for each in logged if "is turned by EXIF: dlio returns the stored pixels" in each]
    assert len(said) == (turn > 1)


# Compressed as a whole

PACK: dict[str, Any] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", PACK)
def test_tars_and_tables_are_decompressed(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, packed = io.BytesIO(), PACK[suffix]
    with tarfile.open(fileobj=memory, mode="w") as archive:
        for k in range(4):
            info = tarfile.TarInfo(f"{k}.bin")
            info.size = 900 * k
            archive.addfile(info, io.BytesIO(bytes([k]) * info.size))
    tar = memory.getvalue()
    table = b"a,label\n" + b"".join(b"%d,c%d\n" % (k, k % 2) for k in range(9))
    for name, data in (("t.csv", table), ("x.tar", tar)):
        half = len(data) // 2
        path = tmp_path / (name + suffix)
        path.write_bytes(packed(data[:half]) + packed(data[half:]))  # As pigz and bgzip write.
        with contextlib.closing(open_reader(str(path))) as reader:
            if name == "x.tar":
                assert rows(reader, "bin") == [bytes([k]) * 900 * k for k in range(4)]
            else:
                assert (list(reader.classes), len(reader)) == (["c0", "c1"], 9)
                assert reader.labels.tolist() == [k % 2 for k in range(9)]
        if suffix != ".zst":
            path.write_bytes(packed(data) + b"surplus")
            _, logged = _open(path, caplog)
            assert sum("its last 7 bytes are not of" in each for each in logged) == 1
        path.write_bytes(packed(data)[:-9])
        with pytest.raises(SourceError, match=r"cut off|damaged"):
            open_reader(str(path))
    (tmp_path / "y.tar").write_bytes(packed(tar))
    with pytest.raises(SourceError, match=r"y\.tar is compressed by .*: give it a name that says"):
        open_reader(str(tmp_path / "y.tar"))
    (tmp_path / "x.tar").write_bytes(tar)
    plain = tmp_path / ("plain.tar" + suffix)
    plain.write_bytes(tar)  # Some are only named so.
    assert len(open_reader(str(plain))) == 4
    monkeypatch.setattr("dlio.util.limits.usable_memory", lambda: 0)
    monkeypatch.setattr("dlio.util.limits._FREE_BYTES", 1000)
    (tmp_path / ("z.tar" + suffix)).write_bytes(packed(tar))
    with pytest.raises(SourceError, match=r"kept in memory.*decompress them"):
        open_reader(str(tmp_path / ("z.tar" + suffix)))


# Columns


def test_links_of_hdf5_are_told_and_single_values_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3)
        file["y"] = h5py.SoftLink("/x")
        file["z"] = h5py.ExternalLink("other.h5", "x")
        file["scale"] = 2.5
    count, logged = _open(tmp_path / "a.h5", caplog)
    assert count == 3
    assert [each.partition(": ")[2] for each in logged] == [
        "1 link to groups, nothing or other files left out, such as z: name their targets "
        "to read them"
    ]
    root: Any = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    root.create_array("scale", data=np.float32(2.5))
    root.create_array("x", data=np.arange(3))
    for path in (f"{tmp_path}/a.h5::scale", f"{tmp_path}/a.zarr::scale"):
        with pytest.raises(UsageError, match="scale is a single value: name arrays with a row"):
            open_reader(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tensors_of_arrow_have_their_shape(suffix: str, tmp_path: Path) -> None:
    data = np.arange(36, dtype=np.float32).reshape(3, 2, 3, 2)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(data)
    table, path = pa.table({"x": column}), str(tmp_path / f"a.{suffix}")
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    reader = open_reader(path)
    values = [reader.schema.split(each)["x"] for each in reader.read(np.arange(3))]
    assert np.array_equal(values, column.to_numpy_ndarray())


def test_a_chunk_of_blosc_is_not_read_beyond_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    root: Any = zarr.open_group(str(path), mode="w", zarr_format=2)
    root.create_array("x", data=np.arange(8, dtype="i4"), chunks=(8,))
    chunk = path / "x" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-12])
    reader = open_reader(str(path))
    with pytest.raises(SourceError, match=r"x/0 is cut off after \d+ bytes: restore it"):
        reader.read(np.arange(8))


# Pictures


@pytest.mark.parametrize("form", ["AVIF", "JPEG2000", "ICO", "DDS"])
def test_a_format_that_is_not_decoded_is_named(form: str) -> None:
    memory = io.BytesIO()
    Image.new("RGB", (16, 16)).save(memory, form)
    named = {"JPEG2000": "JPEG 2000"}.get(form, form)
    with pytest.raises(SourceError, match=f"^x is {named}, which dlio does not decode: convert it"):
        decode_whole(memory.getvalue(), "x")


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_labels_that_nibabel_has_scaled_are_told(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import nibabel

    labels = np.arange(118, dtype=np.uint8).repeat(2).reshape(118, 2, 1)
    paths = []
    for kind in ("exact", "again"):
        for side in ("images", "labels"):
            (tmp_path / kind / side).mkdir(parents=True)
            path = tmp_path / kind / side / f"a.{suffix}"
            nibabel.save(nibabel.Nifti1Image(labels, np.eye(4)), path)
            paths.append(path)
    # As is usual: the values as floats, with the header of the file that they came from.
    before: Any = nibabel.load(paths[-1])
    nibabel.save(nibabel.Nifti1Image(before.get_fdata(), before.affine, before.header), paths[-1])
    after: Any = nibabel.load(paths[-1])
    assert (after.get_fdata().astype(np.uint8) != labels).any()
    assert (np.rint(after.get_fdata()) == labels).all()

    assert _open(tmp_path / "exact", caplog) == (1, [])
    count, (said,) = _open(tmp_path / "again", caplog)
    assert count == 1
    assert f"labels/a.{suffix}: a label is " in said
    assert "round such labels" in said


def test_unfinished_downloads_and_sounds_are_counted_next_to_pictures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    _pictures(tmp_path / "data" / "a", ["0.png", "1.gif"])
    for name in ("2.png.part", "3.JPG.crdownload", "4.wav"):
        (tmp_path / "data" / "a" / name).write_bytes(b"x")
    count, logged = _open(tmp_path / "data", caplog)
    assert count == 1
    text = "\n".join(logged)
    assert "leaves out 1 picture, such as a/1.gif" in text
    assert "leaves out 3 files next to its pictures, such as a/2.png.part" in text
    assert _open(tmp_path / "data", caplog) == (1, [])


@pytest.mark.parametrize(
    ("name", "table", "told"),
    [
        (
            "labels.csv",
            "file,label\n/home/jo/0.png,a\n",
            "whose names match no picture here (it has",
        ),
        ("labels.json", "{", "which gives no labels ("),
    ],
)
def test_a_table_whose_labels_are_not_read_is_told_why(
    name: str,
    table: str,
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    _pictures(tmp_path / "data" / "images", ["0.png", "1.png"])
    (tmp_path / "data" / name).write_text(table)
    count, logged = _open(tmp_path / "data", caplog)
    assert count == 2
    assert sum(told in each for each in logged) == 1
    assert not any("has no labels of the pictures" in each for each in logged)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["0002_c1s1_000451_03", "0002_c2s1_000301_01", "0007_c1_f1", "0007_c3_f9"], True),
        (["0001_a_1", "0002_a_2", "0003_a_3"], False),  # Numbers of pictures.
        (["20210105_1", "20210106_2"], False),
    ],
)
def test_identities_in_names_are_told(
    names: list[str], told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "data", [f"{name}.png" for name in names])
    count, logged = _open(tmp_path / "data", caplog)
    assert count == len(names)
    words = "numbers that names begin with and that repeat (0002, 0007)"
    assert any(words in each for each in logged) == told


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_without_a_column_of_labels_names_those_that_may_be(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {
        "PassengerId": [1, 2, 3],
        "Survived": [0, 1, 1],
        "Pclass": [3, 1, 2],
        "Sex": ["m", "f", "m"],
        "valid": [1, 1, 0],
        "Fare": [7.25, 71.5, 8.0],
    }
    _write_table(tmp_path / f"a.{suffix}", columns)
    (warning,) = _open(tmp_path / f"a.{suffix}", caplog)[1]
    assert "if one of Survived, Pclass, Sex, valid is it, choose it" in warning
    assert "label='Survived' (`--reader-option label=Survived`)" in warning


def test_the_last_column_is_the_example_of_a_label_where_no_name_says_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns: dict[str, list[Any]] = {f"flag {k}": [0, 1, 1] for k in range(12)}
    _write_table(tmp_path / "a.csv", columns | {"tenure": [0.5, 2.5, 3.5], "Gone": ["n", "y", "n"]})
    (warning,) = _open(tmp_path / "a.csv", caplog)[1]
    assert "flag 6, Gone is it, choose it, such as label='Gone' (" in warning


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["Survived", "Pclass", "Name", "Sex", "Embarked"], "Survived"),
        (["Pclass", "Sex", "Embarked", "Survived"], "Survived"),
        (["default payment next month", "sex", "education"], "default payment next month"),
        (["target_class", "Pclass", "sex"], "target_class"),
        (["subclass", "targetLabel", "city"], "targetLabel"),
        (["is_new", "is_fraudulent", "city"], "is_fraudulent"),
        (["island", "has", "species"], "species"),
        (["island", "sex", "kind"], "kind"),
        (["superclass", "sex"], "superclass"),
    ],
)
def test_the_example_of_a_label_has_a_name_that_people_give_to_labels(
    names: list[str], best: str
) -> None:
    assert most_likely_label(names) == best


def test_of_two_texts_the_one_that_is_called_as_labels_are_may_be_the_label() -> None:
    kinds = {"review": "text", "sentiment": "text"}
    assert label_candidates(kinds, is_wide=False) == ["sentiment"]
    assert label_candidates({"text": "text", "title": "text"}, is_wide=False) == []


def test_boxes_in_the_descriptions_of_the_hub_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "data", ["0.png", "1.png"])
    objects = '{"file_name": "%d.png", "objects": {"bbox": [[1, 1, 2, 2]], "categories": [0]}}\n'
    (tmp_path / "data" / "metadata.jsonl").write_text("".join(objects % k for k in range(2)))
    (warning,) = _open(tmp_path / "data", caplog)[1]
    assert "its boxes (objects.bbox) are left out: write them as COCO's JSON" in warning


@pytest.mark.parametrize("rows", ["s0,0\ns1,1\n", "s0.npy,0\ns1.npy,1\n", "0,0\n1,1\n"])
def test_a_table_that_names_files_of_arrays_is_told_with_the_option_that_reads_them(
    rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(3):
        np.save(tmp_path / f"s{k}.npy", np.full((5, 4), k, np.float32))
    (tmp_path / "train.csv").write_text(f"id,label\n{rows}")
    count, (warning,) = _open(tmp_path, caplog)
    assert count == 15
    named = "it names s0.npy and s1.npy: table='train.csv' reads each file as one" in warning
    assert named == rows.startswith("s")
    assert _open(tmp_path, caplog, samples="files")[0] == 3


@pytest.mark.parametrize(
    "columns",
    [
        {"text": ["a", "b"], "title": ["c", "d"]},
        {"x": [0.5, 1.5], "id": [1, 2]},
        {"emotion": [3, 4], "label": [0, 1]},
    ],
)
def test_texts_ids_and_tables_with_labels_are_told_of_nothing(
    columns: dict[str, list[object]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_table(tmp_path / "a.parquet", columns)
    assert _open(tmp_path / "a.parquet", caplog) == (2, [])


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    table = pa.table(columns)
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)


@pytest.mark.parametrize("present", [("alpha", "beta"), ("alpha",)])
def test_splits_that_a_readme_of_the_hub_names_are_told(
    present: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    for name in present:
        _write_table(tmp_path / "data" / f"{name}.parquet", {"label": [0, 1]})
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: data/alpha.parquet\n  - split: test\n    path:\n    - data/be*.parquet\n---\n"
    )
    count, warnings = _open(tmp_path, caplog)
    assert count == 2 * len(present)
    own = [text for text in warnings if "names the splits train (data/alpha.parquet), test" in text]
    assert len(own) == len(present) - 1
    for text in own:
        assert f"open the files of one, as in '{tmp_path}/data/alpha.parquet'" in text


@pytest.mark.parametrize("packed", [1, 2])
def test_a_file_that_lies_there_compressed_too_is_read_once(
    packed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.csv", "b.csv"):
        _write_table(tmp_path / name, {"label": [0, 1]})
    for name in ("a.csv", "b.csv")[:packed]:
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"label\n1\n"))
    count, warnings = _open(tmp_path, caplog)
    assert count == 5
    assert [text for text in warnings if "a.csv.gz lies there uncompressed as well" in text]


def test_folders_of_persons_are_told_to_be_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("patient00001", "patient00002"):
        _pictures(tmp_path / name / "study1", ["view1.png"])
    count, warnings = _open(tmp_path, caplog)
    assert count == 2
    assert [text for text in warnings if "patient00001, patient00002 and so on name" in text]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("Survived", [0, 1], "'Survived' is one of its features: if it is the label, choose it"),
        ("Churn", ["yes", "no"], "'Churn' is left out, as it is text: if it is the label"),
        ("centre_y", [0, 1], ""),
        ("label", [0, 1], ""),
    ],
)
def test_a_label_among_all_features_of_a_table_is_told(
    name: str, values: list[Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_table(tmp_path / "a.csv", {"age": [0.5, 1.5], name: values})
    logged = _open(tmp_path / "a.csv", caplog, columns="*")[1]
    assert any(words in each for each in logged) if words else not logged
    if words:
        assert not _open(tmp_path / "a.csv", caplog, columns="*", label=name)[1]


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_groups_of_anndata_are_called_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"cells.{kind}"
    root: Any = h5py.File(path, "w") if kind == "h5" else zarr.open_group(path, mode="w")
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    for name in ("X", "Z"):
        values = np.zeros((5, 4), np.float32)
        make = root.create_array if kind == "zarr" else root.create_dataset
        array = make(name, data=values)
        array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    if kind == "h5":
        root.close()
    (warning,) = _open(path, caplog)[1]
    assert f"cells.{kind} is AnnData, whose arrays are read as they are stored" in warning


def test_labels_of_matlab_in_a_folder_next_to_a_split_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split in ("cars_train", "cars_test"):
        _pictures(tmp_path / split, ["0.png", "1.png"])
    (tmp_path / "devkit").mkdir()
    (tmp_path / "devkit" / "cars_train_annos.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    (warning,) = _open(tmp_path, caplog, split="train")[1]
    assert "1 file (devkit/cars_train_annos.mat)" in warning
    assert "scipy.io.loadmat(...) reads them, to write to a labels.csv" in warning
