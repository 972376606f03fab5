"""Folders whose files are one sample each: arrays and scans of any shape."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import File
from dlio.errors import SourceError, UsageError
from dlio_readers.files import FilesReader
from dlio_staging.pack_folder import pack
from tests.conftest import examples

Volume = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def _npy(path: Path, volume: Volume) -> None:
    np.save(path, volume)


def _npz(path: Path, volume: Volume) -> None:
    np.savez_compressed(path, data=volume)


def _h5(path: Path, volume: Volume) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=volume, chunks=(2, 4, 4), compression="gzip")


def _nii(path: Path, volume: Volume) -> None:
    import nibabel  # It and pydicom are slow to import, and needed here alone.

    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path)


def _dcm(path: Path, volume: Volume, **tags: object) -> None:
    import pydicom.uid
    from pydicom.dataset import FileDataset, FileMetaDataset

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.MRImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    made = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    made.NumberOfFrames, made.Rows, made.Columns = volume.shape
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 8 * volume.dtype.itemsize
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(volume.dtype.kind == "i")
    for name, value in tags.items():
        setattr(made, name, value)
    made.PixelData = volume.tobytes()
    made.save_as(path, enforce_file_format=True)


WRITERS: dict[str, tuple[Callable[[Path, Volume], None], str]] = {
    "npy": (_npy, "data"),
    "npz": (_npz, "data"),
    "h5": (_h5, "data"),
    "nii": (_nii, "image"),
    "nii.gz": (_nii, "image"),
    "dcm": (_dcm, "image"),
}


def _volumes(count: int = 6) -> list[Volume]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 900, (4 + k, 6, 9 - k), np.int16) for k in range(count)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_class_folders_of_files_of_any_shape(suffix: str, tmp_path: Path) -> None:
    write, field = WRITERS[suffix]
    volumes = _volumes()
    for k, volume in enumerate(volumes):
        folder = tmp_path / "data" / "ab"[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{k}.{suffix}", volume)
    order = [0, 2, 4, 1, 3, 5]
    with dlio.open(tmp_path / "data", tiers="ram:1MiB") as data:
        assert data.reader.format == "files"
        assert list(data.classes) == ["a", "b"]
        assert data.targets == [0, 0, 0, 1, 1, 1]
        assert data.reader.name(3) == f"b/1.{suffix}"
        for batch in dlio.DataLoader(data, batch_size=1, shuffle=True):
            number = int(batch["label"][0]) + 2 * (batch[field].shape[1] // 2 - 2)
            assert np.array_equal(batch[field][0], volumes[number])
        ragged = next(iter(dlio.DataLoader(data, batch_size=6, collate_fn=list)))
        for sample, k in zip(ragged, order, strict=True):
            assert np.array_equal(sample[field], volumes[k])
        with pytest.raises(UsageError, match=r"collate_fn=list"):
            next(iter(dlio.DataLoader(data, batch_size=2)))
    with dlio.open(
        tmp_path / "data", patch=(3, 4, 2), patches_per_volume=3, tiers="ram:1MiB", seed=0
    ) as data:
        assert data.targets == 9 * [0] + 9 * [1]
        batch = next(iter(dlio.DataLoader(data, batch_size=18)))
        assert batch[field].shape == (18, 3, 4, 2)
        assert batch["label"].tolist() == data.targets
        reader: Any = data.reader
        for k, patch in enumerate(batch[field]):
            at = reader.cuts(k, 0, 0)[2]
            part = tuple(slice(a, a + n) for a, n in zip(at, (3, 4, 2), strict=True))
            assert np.array_equal(patch, volumes[order[k // 3]][part])


def test_inputs_and_targets_of_the_same_name(tmp_path: Path) -> None:
    volumes = _volumes()
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    for k, volume in enumerate(volumes):
        suffix = "_0000.nii" if k % 2 else ".nii.gz"
        _nii(tmp_path / "images" / f"case{k}{suffix}", volume)
        _npy(tmp_path / "labels" / f"case{k}.npy", (volume > 450).astype(np.uint8))
    with dlio.open(tmp_path, tiers="none") as data:
        assert [name for name, _ in data.reader.schema.fields] == ["image", "label"]
        for k, volume in enumerate(volumes):
            assert np.array_equal(data[k]["image"], volume)
            assert np.array_equal(data[k]["label"], volume > 450)
    with dlio.open(tmp_path, patch=(3, 4, 2), tiers="none") as data:
        for sample in (data[k] for k in range(6)):
            assert np.array_equal(sample["image"] > 450, sample["label"])
    (tmp_path / "labels" / "case3.npy").unlink()
    with pytest.raises(SourceError, match=r"case3_0000\.nii has no file of its name in labels/"):
        dlio.open(tmp_path)


@pytest.mark.parametrize("suffix", ["npy", "nii", "h5"])
def test_a_patch_does_not_read_the_whole_file(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, field = WRITERS[suffix]
    volume = np.random.default_rng(0).integers(0, 900, (64, 96, 128), np.int16)
    for name in "ab":
        (tmp_path / name).mkdir()
        if suffix == "h5":
            with h5py.File(tmp_path / name / "x.h5", "w") as file:
                file["data"] = volume
        else:
            write(tmp_path / name / f"x.{suffix}", volume)
    reads: list[int] = []
    real = File.read_into

    def read(self: File, offset: int, into: memoryview) -> None:
        reads.append(len(into))
        real(self, offset, into)

    monkeypatch.setattr(File, "read_into", read)
    with dlio.open(tmp_path, patch=(4, 4, 4), tiers="none", train=False) as data:
        reads.clear()
        assert np.array_equal(data[1][field], volume[30:34, 46:50, 62:66])
        assert 0 < sum(reads) <= volume.nbytes
        whole = sum(reads)
        reads.clear()
        assert np.array_equal(data[1][field], volume[30:34, 46:50, 62:66])
        assert not reads  # Its chunks are kept.
    chunk = sum(1 << 20 for _ in range(4))
    assert whole <= chunk


def test_intensities_are_scaled_as_headers_say(tmp_path: Path) -> None:
    import nibabel

    volume = _volumes(1)[0]
    image = nibabel.Nifti1Image(volume, np.eye(4))
    image.header.set_slope_inter(0.5, -3)
    for suffix in ("nii", "nii.gz"):
        nibabel.save(image, tmp_path / f"x.{suffix}")
        stored = nibabel.load(tmp_path / f"x.{suffix}").get_fdata()
        with dlio.open(tmp_path / f"x.{suffix}", tiers="none") as data:
            assert np.array_equal(data[0]["image"], stored.astype(np.float32))
    _dcm(tmp_path / "x.dcm", volume, RescaleSlope="2", RescaleIntercept="-1024")
    with dlio.open(tmp_path / "x.dcm", tiers="none") as data:
        assert np.array_equal(data[0]["image"], volume.astype(np.float32) * 2 - 1024)


def test_files_that_differ_are_named_with_the_difference(tmp_path: Path) -> None:
    for name, array in (("a", np.zeros((2, 3), np.float32)), ("b", np.zeros((2, 3), np.int16))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", array)
    with pytest.raises(SourceError, match=r"b/x\.npy: 'data' is int16 .* in a/x\.npy float32"):
        dlio.open(tmp_path)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "x.npy", np.zeros((2, 3)))
    with dlio.open(tmp_path, tiers="none") as data:
        np.save(tmp_path / "a" / "x.npy", np.zeros((3, 3)))
        with pytest.raises(SourceError, match=r"x\.npy.*has changed"):
            data[0]


def test_headers_that_claim_much_take_no_memory(tmp_path: Path) -> None:
    volume = _volumes(1)[0]
    _nii(tmp_path / "x.nii", volume)
    claim = bytearray((tmp_path / "x.nii").read_bytes())
    claim[42:48] = np.array([30000, 30000, 3000], "<i2").tobytes()
    (tmp_path / "x.nii").write_bytes(claim)
    with pytest.raises(SourceError, match=r"x\.nii is cut off: \d+ bytes instead of"):
        FilesReader(str(tmp_path / "x.nii"))
    (tmp_path / "y.nii.gz").write_bytes(gzip.compress(bytes(claim)))
    with pytest.raises(SourceError, match=r"y\.nii\.gz claims to hold 5400000000352 bytes"):
        FilesReader(str(tmp_path / "y.nii.gz"))
    _dcm(tmp_path / "z.dcm", volume, NumberOfFrames=2**30)
    with pytest.raises(SourceError, match=r"z\.dcm claims to hold"):
        FilesReader(str(tmp_path / "z.dcm"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nii(tmp_path / "x.nii", _volumes(1)[0])
    _dcm(tmp_path / "x.dcm", _volumes(1)[0])
    monkeypatch.setitem(sys.modules, "nibabel.nifti1", None)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UsageError, match=r"x\.nii: NIfTI files need nibabel: `pip install"):
        FilesReader(str(tmp_path / "x.nii"))
    with pytest.raises(UsageError, match=r"x\.dcm: DICOM files need pydicom: `pip install"):
        FilesReader(str(tmp_path / "x.dcm"))


def test_volumes_are_packed(tmp_path: Path) -> None:
    volumes = _volumes()
    (tmp_path / "scans").mkdir()
    for k, volume in enumerate(volumes):
        _nii(tmp_path / "scans" / f"{k}.nii.gz", volume)
    pack(str(tmp_path / "scans"), str(tmp_path / "packed"), order="source")
    with dlio.open(tmp_path / "packed", tiers="none") as data:
        assert sorted(data[k]["image"].shape for k in range(6)) == sorted(
            volume.shape for volume in volumes
        )


def test_dicom_without_its_preamble_is_read_and_without_its_header_refused(tmp_path: Path) -> None:
    import pydicom

    volume = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    _dcm(tmp_path / "whole.dcm", volume)
    data = (tmp_path / "whole.dcm").read_bytes()
    path = tmp_path / "bare.dcm"
    path.write_bytes(data[132:])
    right = pydicom.dcmread(path, force=True).pixel_array
    reader = FilesReader(str(path))
    (payload,) = reader.read(np.array([0]))
    np.testing.assert_array_equal(np.asarray(reader.schema.split(payload)["image"]), right)
    # (0002,0000) holds the length of the header behind it.
    path.write_bytes(data[144 + int.from_bytes(data[140:144], "little") :])
    for text in (path.read_bytes(), b"no scan" * 40):
        path.write_bytes(text)
        with pytest.raises(SourceError, match=r"is not a DICOM file, or lacks the header.*force"):
            FilesReader(str(path))


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_channels_of_a_case_are_its_fields(split: str, tmp_path: Path) -> None:
    folder = {"train": "imagesTr", "test": "imagesTs"}[split]
    for each in ("imagesTr", "imagesTs", "labelsTr"):
        (tmp_path / each).mkdir()
    arrays = {}
    for case in range(3):
        for channel in range(2):
            arrays[case, channel] = np.full((2, 3 + case), 10 * case + channel, np.float32)
            for each in ("imagesTr", "imagesTs"):
                np.save(tmp_path / each / f"liver_{case}_{channel:04}.npy", arrays[case, channel])
        np.save(tmp_path / "labelsTr" / f"liver_{case}.npy", np.full((2, 3 + case), case))
    reader = FilesReader(str(tmp_path), split=split)
    fields = ["image_0000", "image_0001", *(["label"] if split == "train" else [])]
    assert [name for name, _ in reader.schema.fields] == fields
    for case, payload in enumerate(reader.read(np.arange(3))):
        values = reader.schema.split(payload)
        for channel in range(2):
            np.testing.assert_array_equal(values[f"image_{channel:04}"], arrays[case, channel])
        assert split == "test" or (values["label"] == case).all()
    (tmp_path / folder / "liver_1_0001.npy").unlink()
    with pytest.raises(
        SourceError, match="case liver_1 has the channels _0000, and others _0000, _0001"
    ):
        FilesReader(str(tmp_path), split=split)


@pytest.mark.parametrize("kind", ["npz", "h5"])
def test_an_array_that_files_call_their_label_is_it_also_in_class_folders(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, name in enumerate(("patient001", "patient002")):
        (tmp_path / name).mkdir()
        for k in range(2):
            arrays = {"image": np.zeros((4, 5 + k)), "label": np.full((4, 5 + k), number + k)}
            if kind == "npz":
                np.savez(tmp_path / name / f"{k}.npz", **arrays)  # type: ignore[arg-type]
                continue
            with h5py.File(tmp_path / name / f"{k}.h5", "w") as file:
                for field, array in arrays.items():
                    file[field] = array
    reader = FilesReader(str(tmp_path), layout="classes")
    values = [reader.schema.split(payload)["label"] for payload in reader.read(np.arange(4))]
    assert [int(np.asarray(value).flat[0]) for value in values] == [0, 1, 1, 2]
    assert (list(reader.classes), reader.labels.tolist()) == ([], [0, 0, 0, 0])
    assert "the label of a sample is the array of its file, and not the folder" in caplog.text
    for path in tmp_path.rglob("*.*"):
        path.unlink()
        np.savez(path.with_suffix(".npz"), image=np.zeros(3), label=np.int64(1))
    with pytest.raises(UsageError, match=r"class folders name another: open a pattern"):
        FilesReader(str(tmp_path), layout="classes")


@settings(max_examples=examples(25), deadline=None)
@given(
    labels=st.lists(st.sampled_from(["cat", "dog", "3", "-1"]), min_size=2, max_size=6),
    kind=st.sampled_from(["npy", "npz", "nii.gz"]),
    table=st.sampled_from(["labels.csv", "labels.json", "metadata.jsonl", "train.csv"]),
    has_suffix=st.booleans(),
)
def test_a_table_labels_arrays_and_scans_by_their_names(
    labels: list[str],
    kind: str,
    table: str,
    has_suffix: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("labelled")
    for k in range(len(labels)):
        array, path = np.full((2, 3, 4 + k), k, np.float32), root / f"case{k}.{kind}"
        if kind == "nii.gz":
            _nii(path, array)
        else:
            (np.save if kind == "npy" else np.savez)(path, array)
    names = [f"case{k}.{kind}" if has_suffix else f"case{k}" for k in range(len(labels))]
    rows = list(zip(names, labels, strict=True))[::-1]
    column = "dx" if table == "train.csv" else "label"
    if table.endswith(".json"):
        (root / table).write_text(json.dumps(dict(rows)))
    elif table.endswith(".jsonl"):
        texts = (json.dumps({"file_name": name, "label": label}) for name, label in rows)
        (root / table).write_text("\n".join(texts))
    else:
        lines = [f"file_name,age,{column}", *(f"{name},7,{label}" for name, label in rows)]
        (root / table).write_text("\n".join(lines))
    options: dict[str, Any] = {"table": table, "label": "dx"} if table == "train.csv" else {}
    reader = open_reader(str(root), **options)
    numbers = all(each.lstrip("-").isdecimal() for each in labels)
    classes = sorted(set(labels))
    expected = [int(each) if numbers else classes.index(each) for each in labels]
    assert (len(reader), np.asarray(reader.labels).tolist()) == (len(labels), expected)
    assert numbers or list(reader.classes) == classes
    for k, payload in enumerate(reader.read(np.arange(len(labels)))):
        values = reader.schema.split(payload)
        assert int(values.pop("label")) == expected[k]
        (array,) = values.values()
        np.testing.assert_array_equal(array, np.full((2, 3, 4 + k), k, np.float32))
    reader.close()


def test_a_table_that_disagrees_with_arrays_is_refused_and_rows_can_be_chosen(
    tmp_path: Path,
) -> None:
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", np.zeros((4, 5)))
    (tmp_path / "labels.csv").write_text("file_name,label\n0.npy,a\n1.npy,b\n")
    with pytest.raises(SourceError, match=r"no label for 1 file \['2.npy'\]: make both agree"):
        open_reader(str(tmp_path))
    assert len(open_reader(str(tmp_path), samples="rows")) == 12
    (tmp_path / "labels.csv").write_text("x,y\n7,8\n")
    assert len(open_reader(str(tmp_path))) == 12


@pytest.mark.parametrize("train", ["as targets", "one channel", "two channels"])
def test_numbers_that_end_names_of_tests_are_channels_where_those_of_the_training_are(
    train: str, tmp_path: Path
) -> None:
    for each in ("imagesTr", "imagesTs", "labelsTr"):
        (tmp_path / each).mkdir()
    ends = {"as targets": [""], "one channel": ["_0000"], "two channels": ["_0000", "_0001"]}[train]
    for case in range(2):
        for end in ends:
            np.save(tmp_path / "imagesTr" / f"p_{case:04}{end}.npy", np.zeros((2, 3)))
        np.save(tmp_path / "labelsTr" / f"p_{case:04}.npy", np.zeros((2, 3)))
    for case in range(3):
        for end in ends:
            np.save(tmp_path / "imagesTs" / f"q_{case:04}{end}.npy", np.full((2, 3), case))
    reader = FilesReader(str(tmp_path), split="test")
    fields = ["image_0000", "image_0001"] if len(ends) > 1 else ["data"]
    assert [name for name, _ in reader.schema.fields] == fields
    for case, payload in enumerate(reader.read(np.arange(3))):
        assert all((value == case).all() for value in reader.schema.split(payload).values())
    if len(ends) > 1:
        for case in range(3):
            (tmp_path / "imagesTs" / f"q_{case:04}_0001.npy").unlink()
        with pytest.raises(SourceError, match="case q_0000 has the channels _0000, and others"):
            FilesReader(str(tmp_path), split="test")


def test_the_case_of_other_channels_than_most_is_named(tmp_path: Path) -> None:
    for each in ("imagesTr", "labelsTr"):
        (tmp_path / each).mkdir()
    for case in range(3):
        for channel in range(2 + (case == 1)):
            np.save(tmp_path / "imagesTr" / f"c{case}_{channel:04}.npy", np.zeros((2, 3)))
        np.save(tmp_path / "labelsTr" / f"c{case}.npy", np.zeros((2, 3)))
    with pytest.raises(SourceError, match=r"case c1 .* _0002, and others _0000, _0001: make"):
        FilesReader(str(tmp_path))


def test_a_label_in_files_that_a_table_labels_as_well_names_the_table(tmp_path: Path) -> None:
    for k in range(2):
        np.savez(tmp_path / f"s{k}.npz", x=np.zeros((2, 3)), label=np.int64(k))
    (tmp_path / "labels.csv").write_text("file_name,label\ns0.npz,a\ns1.npz,b\n")
    with pytest.raises(UsageError, match=r"and a table names another: .*FOLDER/\*\.npz"):
        open_reader(str(tmp_path))
