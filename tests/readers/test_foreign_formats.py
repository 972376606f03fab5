"""Formats that dlio does not read are named for what they are, with the way to one that it reads;
several data sets in a folder are shown with a pattern that reads them."""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError

NAMES = {
    "train.beton": "FFCV",
    "x.orc": "ORC",
    "x.avro": "Avro",
    "x.lance/_versions/1.manifest": "Lance",
    "train.rec": "RecordIO",
    "model.pt": "PyTorch",
    "train.pkl": "pickle",
    "data_batch_1": "pickle",
    "data.mdb": "LMDB",
    "a.sqlite": "SQLite",
    "a.xlsx": "spreadsheet",
    "a.7z": "archive",
    "a.mgz": "scan",
    "a.img": "scan",
    "a.mha": "scan",
    "a.safetensors": "safetensors",
    "a.h5ad": "AnnData",
    "a.wav": "sound",
    "a.mp4": "film",
    "iris.arff": "ARFF",
    "a9a.libsvm": "libsvm",
    "a9a.svm": "libsvm",
}


@pytest.mark.parametrize("below", ["", "train"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_format_that_is_not_read_is_named(name: str, below: str, tmp_path: Path) -> None:
    file = tmp_path / below / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x80\x02}.")
    folder = file.parent.parent if "/" in name else tmp_path
    for path in [folder] if "/" in name else [folder, file]:
        with pytest.raises(
            SourceError, match=f"{name.split('/')[0]} is an? (?:.* )?{NAMES[name]}.*: "
        ):
            open_reader(str(path))


@pytest.mark.parametrize("name", ["x.restore", "a.records", "my_data_batch_1", "ubyte"])
def test_other_names_are_not_taken_for_such_a_format(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match="is not a data set that dlio can read, of none of"):
        open_reader(str(tmp_path))


def test_an_archive_or_a_picture_in_place_of_a_folder_is_named_with_the_way_to_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 6)).save(tmp_path / "photos" / name / "0.jpg")
    shutil.make_archive("photos", "zip", ".", "photos")
    for wrong in ("photos.zip", "zip://photos.zip"):
        with pytest.raises(SourceError, match=r"zip://::photos\.zip"):
            open_reader(wrong)
    with closing(open_reader("zip://::photos.zip")) as reader:
        assert list(reader.classes) == ["cat", "dog"]
    with pytest.raises(SourceError, match="is a picture and no data set: open its folder"):
        open_reader("photos/cat/0.jpg")


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["sub-01/anat/sub-01_T1w.nii", "sub-02/anat/sub-02_T1w.nii"], "*/anat/*_T1w.nii"),
        (["en/a-00000-of-00001.parquet", "fr/b.parquet"], "*/*.parquet"),
        (["en/a.parquet", "fr/x.arrow"], ""),
    ],
)
def test_the_pattern_for_several_data_sets_reads_them(
    names: list[str], pattern: str, tmp_path: Path
) -> None:
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        if name.endswith(".arrow"):
            pyarrow.feather.write_feather(pa.table({"x": [1.0, 2.0]}), file)
        elif name.endswith(".nii"):
            nibabel = pytest.importorskip("nibabel")
            nibabel.save(nibabel.Nifti1Image(np.zeros((2, 3, 4), np.uint8), np.eye(4)), file)
        else:
            pq.write_table(pa.table({"x": [1.0, 2.0]}), file)
    (tmp_path / "participants.tsv").write_text("participant_id\tage\n")
    with pytest.raises(UsageError, match=r"participants.tsv\) next to them would not") as caught:
        open_reader(str(tmp_path))
    whole = f"{tmp_path}/{pattern}"
    assert (f"by a pattern, such as {whole!r}" in str(caught.value)) == bool(pattern)
    if pattern:
        assert len(open_reader(whole)) == len(names) * (2 if "parq" in pattern else 1)
    else:
        assert "by a pattern" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("index.json", '{"chunks": [{"chunk_bytes": 9, "filename": "chunk-0-0.bin"}]}', "litdata"),
        ("dataset_meta.json", '{"version": "3.8", "tensors": ["images"]}', "Deep Lake"),
    ],
)
def test_folders_with_the_index_of_another_format_are_called_so(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "chunk-0-0.bin").write_bytes(bytes(40))
    with pytest.raises(SourceError, match=f"is a data set of {words}: .* to write by numpy.savez"):
        open_reader(str(tmp_path))
