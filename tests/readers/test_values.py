"""Values of scans, masks and boxes are those of each format's own library: pydicom, pycocotools,
and Pillow's turning by EXIF."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw, ImageOps

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio.image.file_headers import exif_orientation, stored_places, turned
from dlio.image.segmentation_masks import draw_instance
from dlio_readers.files import FilesReader


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


# DICOM


def _scan(path: Path, pixels: npt.NDArray[Any], **tags: Any) -> Path:
    """Write pixels of shape (frames, rows, columns)."""
    import pydicom.uid
    from pydicom.dataset import FileDataset, FileMetaDataset

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.EnhancedCTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    made = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    made.SOPClassUID, made.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3"
    made.NumberOfFrames, made.Rows, made.Columns = pixels.shape
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 8 * pixels.itemsize
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(pixels.dtype.kind == "i")
    for name, value in tags.items():
        setattr(made, name, value)
    made.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)
    return path


def _group(slope: float | None, intercept: float | None) -> Any:
    """A functional group that rescales; of None an empty one."""
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    inner, group = Dataset(), Dataset()
    if slope is None:
        return group
    inner.RescaleSlope, inner.RescaleIntercept = slope, intercept
    group.PixelValueTransformationSequence = Sequence([inner])
    return group


def _values(path: Path) -> npt.NDArray[Any]:
    with dlio.open(str(path), tiers="none", image_size=None) as data:
        sample: Any = data[0]
        image = sample["image"] if isinstance(sample, dict) else sample[0]
        return np.asarray(image)


@pytest.mark.parametrize("seed", range(12))
def test_slopes_and_intercepts_lie_where_the_standard_has_them(seed: int, tmp_path: Path) -> None:
    """In the file, in groups that frames share, or in a frame's own; the innermost one counts."""
    pytest.importorskip("pydicom")
    from pydicom.pixels import apply_rescale
    from pydicom.sequence import Sequence

    generator = np.random.default_rng(seed)
    frames = int(generator.integers(1, 4))
    pixels = generator.integers(0, 4000, (frames, 5, 6)).astype(np.uint16)
    drawn: list[tuple[float | None, float | None]] = [
        (None, None) if generator.random() < 0.3 else tuple(generator.integers(1, 9, 2).tolist())
        for _ in range(frames + 2)
    ]
    tags: dict[str, Any] = {}
    (slope, intercept), shared, own = drawn[0], drawn[1], drawn[2:]
    if slope is not None or seed % 2:  # An attribute without a value says nothing.
        tags |= {"RescaleSlope": slope, "RescaleIntercept": intercept}
    if seed % 3:
        tags["SharedFunctionalGroupsSequence"] = Sequence([_group(*shared)])
        tags["PerFrameFunctionalGroupsSequence"] = Sequence([_group(*each) for each in own])
    path = _scan(tmp_path / "a.dcm", pixels, **tags)
    wanted = pixels.astype(np.float32)
    for k in range(frames):
        inner = (own[k], shared) if seed % 3 else ()
        pairs = [pair for pair in (*inner, (slope, intercept)) if pair[0] is not None]
        if pairs:
            import pydicom

            one = pydicom.Dataset()
            one.RescaleSlope, one.RescaleIntercept = pairs[0]
            wanted[k] = apply_rescale(pixels[k], one)
    assert np.array_equal(_values(path).reshape(wanted.shape), wanted)


def test_a_table_of_values_is_applied_as_by_pydicom(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.sequence import Sequence

    table = pydicom.Dataset()
    table.add_new("LUTDescriptor", "US", [4, 2, 16])
    table.add_new("LUTData", "US", [10, 20, 30, 4000])
    pixels = np.arange(12, dtype=np.uint16).reshape(1, 3, 4)
    path = _scan(tmp_path / "a.dcm", pixels, ModalityLUTSequence=Sequence([table]))
    whole = pydicom.dcmread(path)
    wanted = pydicom.pixels.apply_modality_lut(whole.pixel_array, whole)
    assert np.array_equal(_values(path), wanted)


def test_groups_that_are_not_one_for_each_frame_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from pydicom.sequence import Sequence

    groups = Sequence([_group(1, 0)] * 2)
    pixels = np.zeros((3, 4, 5), np.uint16)
    path = _scan(tmp_path / "a.dcm", pixels, PerFrameFunctionalGroupsSequence=groups)
    with pytest.raises(SourceError, match=r"a\.dcm.*3 frames have 2 functional groups"):
        FilesReader(str(path))


@pytest.mark.parametrize("names", [("IM0001", "IM0002"), ("1.2.840.1", "1.2.840.2")])
def test_scans_without_a_suffix_are_found(
    names: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pydicom")
    for k, name in enumerate(names):
        for folder in ("flat", "classes/ill", "classes/well"):
            _scan(tmp_path / folder / name, np.full((1, 3, 4), k, np.uint16))
    _scan(tmp_path / "flat" / "DICOMDIR", np.zeros((1, 3, 4), np.uint16))
    (tmp_path / "flat" / "README").write_text("scans" * 100)
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(str(tmp_path / "flat"))
    assert [reader.name(k) for k in range(len(reader))] == list(names)
    assert "1 files without a suffix are left out" in caplog.text
    assert open_reader(str(tmp_path / "classes")).classes == ["ill", "well"]
    assert _values(tmp_path / "flat" / names[1]).max() == 1


# COCO


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_polygons_of_any_number_of_points_are_drawn_as_by_pycocotools() -> None:
    tools = pytest.importorskip("pycocotools.mask")
    generator = np.random.default_rng(0)
    for _ in range(200):
        height, width = generator.integers(5, 90, 2).tolist()
        # The first decides how pycocotools takes them all: it has points enough.
        counts = [int(generator.integers(6, 12)), *generator.integers(0, 9, 2).tolist()]
        shape = [generator.uniform(-5, 95, count).round(2).tolist() for count in counts]
        wanted = tools.decode(tools.merge(tools.frPyObjects(shape, height, width)))
        assert np.array_equal(draw_instance(shape, height, width, "x"), wanted), shape


def _coco(folder: Path, record: dict[str, Any], shapes: list[Any], place: str) -> Path:
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (80, 60)).save(folder / place)
    fixed = {"image_id": 1, "category_id": 1, "bbox": [5, 5, 40, 30], "area": 1, "iscrowd": 0}
    whole = {
        "images": [{"id": 1, "width": 80, "height": 60, **record}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [
            {"id": k, "segmentation": shape, **fixed} for k, shape in enumerate(shapes)
        ],
    }
    path = folder / "annotations" / "instances_val.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(whole))
    return path


def test_a_picture_keeps_its_good_instances(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [10, 10, 50, 12, 45, 40, 12, 38]
    shapes = [[good], [good, [10, 10, 50, 40]], [[10, 10, 50, 40]], [[]], []]
    _coco(tmp_path, {"file_name": "0.jpg"}, shapes, "val/0.jpg")
    with (
        caplog.at_level(logging.WARNING, "dlio"),
        dlio.open(str(tmp_path), image_size=None, masks=True, tiers="none") as data,
    ):
        assert data[0][1]["masks"].sum((1, 2)).tolist() == [1025, 1025, 0, 0, 0]
    assert "3 of 5 instances have polygons of fewer than three points" in caplog.text


def test_a_picture_without_a_file_name_is_found_by_its_url(tmp_path: Path) -> None:
    url = {"coco_url": "http://images.example.org/a/train2017/0%2001.jpg"}
    path = _coco(tmp_path, url, [[[5, 5, 45, 5, 45, 35]]], "train2017/0 01.jpg")
    assert open_reader(str(path)).name(0) == "train2017/0 01.jpg"
    for wrong in ({}, {"coco_url": 7}, {"coco_url": "http://images.example.org"}):
        path = _coco(tmp_path / "wrong", wrong, [], "train2017/0.jpg")
        with pytest.raises(SourceError, match="no file_name, nor a coco_url"):
            open_reader(str(path))


# YOLO


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_boxes_lie_on_what_they_are_around_in_a_turned_photo(
    form: str, turn: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Image.new("RGB", (100, 40))
    ImageDraw.Draw(stored).rectangle([60, 5, 91, 14], fill="white")
    exif = Image.Exif()
    exif[274] = turn
    memory = io.BytesIO()
    options = {"lossless": True} if form == "WEBP" else {"quality": 95}
    stored.save(memory, form, exif=exif.tobytes(), **options)
    assert exif_orientation(memory.getvalue()) == turn
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(memory.getvalue())))
    assert np.array_equal(np.asarray(shown), turned(np.asarray(stored), turn)) or form == "JPEG"
    rows, columns = np.nonzero(np.asarray(shown.convert("L")) > 128)
    top, bottom = rows.min() / shown.height, (rows.max() + 1) / shown.height
    left, right = columns.min() / shown.width, (columns.max() + 1) / shown.width
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images" / f"p.{form.lower()}").write_bytes(memory.getvalue())
    corners = (left, top, right, top, right, bottom, left, bottom)
    (tmp_path / "labels" / "p.txt").write_text("0 " + " ".join(map(str, corners)))
    with (
        caplog.at_level(logging.WARNING, "dlio"),
        dlio.open(str(tmp_path), image_size=None, masks=True, tiers="none") as data,
    ):
        image, target = data[0]
    assert np.abs(target["boxes"][0].numpy() - [60, 5, 92, 15]).max() <= 1
    inside = image.float().mean(0)[target["masks"][0].bool()]
    assert len(inside) >= 280
    assert inside.mean() > 240
    assert ("is turned by EXIF" in caplog.text) == (turn > 1)


@pytest.mark.parametrize("turn", range(1, 9))
def test_places_are_turned_back(turn: int) -> None:
    marked = np.zeros((4, 6), np.uint8)
    marked[1, 4] = 1
    (row,), (column,) = np.nonzero(turned(marked, turn))
    height, width = turned(marked, turn).shape
    place = stored_places(np.array([(column + 0.5) / width, (row + 0.5) / height]), turn)
    assert np.allclose(place * (6, 4), (4.5, 1.5))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xe1\x00\x00Exif\0\0II*\0",
        b"\x89PNG\r\n\x1a\n\xff\xff\xff\xffeXIf",
        b"RIFF\0\0\0\0WEBPEXIF\4\0\0\0II*\0",
    ],
)
def test_damaged_exif_turns_nothing(data: bytes) -> None:
    assert exif_orientation(data) == 1
