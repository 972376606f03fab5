"""Folders of scans that do not stand for classes, and tables next to scans, are refused or told."""

import logging
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.errors import UsageError
from dlio.util import printable

nibabel = pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")


@pytest.fixture(autouse=True)
def _telling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printable, "_told", set())


def _nifti(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.ones((3, 4, 5), np.int16), np.eye(4)), path)


def _dicom(path: Path, series: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    made = pydicom.dataset.Dataset()
    made.file_meta, made.SeriesInstanceUID = meta, series
    made.SOPClassUID, made.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", "1.2.3"
    made.Rows, made.Columns, made.BitsAllocated, made.BitsStored, made.HighBit = 4, 5, 16, 16, 15
    made.PixelRepresentation, made.SamplesPerPixel = 0, 1
    made.PhotometricInterpretation, made.PixelData = "MONOCHROME2", bytes(40)
    made.save_as(path, enforce_file_format=True)


def _told(path: Path, caplog: pytest.LogCaptureFixture) -> tuple[list[str], str]:
    """Return (classes, warnings) of an opening."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dlio"), dlio.open(path) as data:
        return list(data.classes), caplog.text


def test_kinds_of_scans_of_bids_are_no_classes(tmp_path: Path) -> None:
    for kind, end in (("anat", "T1w"), ("anat", "T2w"), ("perf", "asl"), ("perf", "m0scan")):
        _nifti(tmp_path / f"sub-01/{kind}/sub-01_{end}.nii.gz")
    with pytest.raises(UsageError, match=r"anat, perf are folders of BIDS, .* a pattern") as caught:
        dlio.open(tmp_path / "sub-01")
    pattern = str(caught.value).split("'")[1]
    with dlio.open(pattern) as data:
        assert len(data) == 1
    with dlio.open(tmp_path / "sub-01", layout="classes") as data:
        assert data.classes == ["anat", "perf"]


def test_persons_of_bids_are_no_classes(tmp_path: Path) -> None:
    for person, runs in (("sub-01", 2), ("sub-02", 3)):
        for run in range(runs):
            _nifti(tmp_path / f"{person}/{person}_run-{run}_T1w.nii.gz")
    with pytest.raises(UsageError, match=r"sub-01, sub-02 are folders of BIDS") as caught:
        dlio.open(tmp_path)
    with dlio.open(str(caught.value).split("'")[1]) as data:
        assert len(data) == 5


def test_class_folders_called_as_persons_or_kinds_stay_classes(tmp_path: Path) -> None:
    for name in ("anat", "pet"):
        for k in range(2):
            _nifti(tmp_path / f"{name}/{k}.nii.gz")
    with dlio.open(tmp_path) as data:
        assert data.classes == ["anat", "pet"]


def test_folders_of_one_series_each_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("a", "b"):
        for k in range(3):
            _dicom(tmp_path / f"series/{folder}/{k}.dcm", f"1.{ord(folder)}")
            _dicom(tmp_path / f"classes/{folder}/{k}.dcm", f"1.{ord(folder)}.{k}")
            _dicom(tmp_path / f"bare/{folder}/IM{k}", f"1.{ord(folder)}")
    for name in ("series", "bare"):
        classes, text = _told(tmp_path / name, caplog)
        assert classes == ["a", "b"]
        assert "are of one series" in text
    assert "are of one series" not in _told(tmp_path / "classes", caplog)[1]


def test_folders_of_one_file_each_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("p1", "p2", "p3"):
        _nifti(tmp_path / name / "scan.nii.gz")
    assert "each of these folders holds one file" in _told(tmp_path, caplog)[1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "file_name,label\na.nii.gz,1\nb.nii.gz,0\n"),
        ("train.csv", "id;y\na;1\nb;0\n"),
        ("participants.tsv", "participant_id\tage\nsub-01\t20\n"),
        ("x.csv", "SOPInstanceUID,target\n1.2.3,1\n"),
    ],
)
@pytest.mark.parametrize("inner", ["", "scans"])
def test_tables_next_to_scans_are_told(
    name: str, text: str, inner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for each in "abc":
        _nifti(tmp_path / "data" / inner / f"{each}.nii.gz")
    (tmp_path / "data" / name).write_text(text)
    for path in {tmp_path / "data", tmp_path / "data" / inner}:
        text = _told(path, caplog)[1]
        assert f"1 file ({name}) in {tmp_path / 'data'}, which may hold labels" in text
        assert "format='tables'" not in text
        assert ("choose one with table=" in text) == (
            name in ("list.csv", "train.csv") and not inner
        )
