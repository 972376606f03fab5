"""Class folders: read in torchvision's order, listed once; changed files are errors."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import Reader, open_reader
from dlio.errors import SourceError
from dlio_readers import fileset
from dlio_readers.folder import FolderReader

OLD = time.time() - 3600


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = ["b/2.JPG", "b/10.png", "a/x/1.jpeg", "a/0.jpg", "a/x.webp", "C/1.jpg", "a/notes.txt"]
    return _make(tmp_path / "data", files)


def _make(root: Path, files: list[str]) -> Path:
    for k, name in enumerate(files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes([k % 256]) * (10 + k))
    _age(root)
    return root


def _age(root: Path) -> None:
    """Make the folders old, since listings of recently changed folders are not cached."""
    for path, _, _ in os.walk(root):
        os.utime(path, (OLD, OLD))


def _names(reader: Reader) -> list[str]:
    return [reader.name(sample) for sample in range(len(reader))]


def _image_folder(root: Path) -> tuple[list[str], list[int]]:
    """List files and labels as torchvision.datasets.ImageFolder does (folder.py, make_dataset)."""
    extensions = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples, labels = [], []
    for label, name in enumerate(classes):
        for path, _, files in sorted(os.walk(root / name, followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(extensions):
                    samples.append(os.path.relpath(os.path.join(path, file), root))
                    labels.append(label)
    return samples, labels


def test_samples_come_in_image_folders_order(folder: Path) -> None:
    _make(folder, ["a/x-1/5.jpg", "a/x0/6.jpg", "a/x/y/7.jpg"])
    reader = open_reader(str(folder))
    names, labels = _image_folder(folder)
    assert _names(reader) == names
    assert reader.labels.tolist() == labels
    assert reader.classes == ["C", "a", "b"]


def test_payloads_are_the_files_with_their_labels(folder: Path) -> None:
    reader = open_reader(str(folder))
    for sample, payload in enumerate(reader.read(np.arange(len(reader)))):
        values = reader.schema.split(payload)
        image = values["image"]
        assert isinstance(image, memoryview)
        assert bytes(image) == (folder / reader.name(sample)).read_bytes()
        assert values["label"] == reader.labels[sample]
        assert len(payload) == reader.sizes[sample]


def test_a_listing_is_reused_until_a_folder_changes(folder: Path, cache: Path) -> None:
    first = open_reader(str(folder))
    (kept,) = cache.glob("*/kept")
    when = kept.stat().st_mtime_ns
    assert open_reader(str(folder)).fingerprint == first.fingerprint
    assert kept.stat().st_mtime_ns == when
    (folder / "a" / "x" / "9.jpg").write_bytes(b"more")
    changed = open_reader(str(folder))
    assert "a/x/9.jpg" in _names(changed)
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("damage", [b"", b"no array", None])
def test_a_damaged_cache_is_rebuilt(folder: Path, cache: Path, damage: bytes | None) -> None:
    names = _names(open_reader(str(folder)))
    for kept in cache.glob("*/kept/*"):
        data = bytearray(kept.read_bytes())
        data[-1] ^= 255
        kept.write_bytes(bytes(data) if damage is None else damage)
        assert _names(open_reader(str(folder))) == names


def test_a_cache_that_cannot_be_written_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", "/proc/nowhere")
    assert len(open_reader(str(folder))) == 6


@pytest.mark.parametrize("content", [b"short", b"longer than it was by far"])
def test_a_file_that_changed_size_is_refused_and_listed_again(
    folder: Path, content: bytes, cache: Path
) -> None:
    reader = open_reader(str(folder))
    (folder / "C" / "1.jpg").write_bytes(content)
    with pytest.raises(SourceError, match=r"C/1.jpg is no longer the 15 bytes.*run again"):
        reader.read(np.array([0]))
    assert list(cache.glob("*/kept")) == []
    assert open_reader(str(folder)).sizes[0] == len(content) + 8


def test_permissions_changed_before_an_opening_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fileset, "_CHECKED", 2)  # The first file and the last one.
    monkeypatch.setattr(fileset, "_COARSE_NS", -(10**15))  # As if it were opened later.
    first, changed = open_reader(str(folder)), folder / "a" / "0.jpg"
    changed.chmod(0o600)
    reader = open_reader(str(folder))
    assert (reader.fingerprint, reader.name(1)) == (first.fingerprint, "a/0.jpg")
    assert bytes(reader.read(np.arange(6))[1])[8:] == changed.read_bytes()
    assert bytes(reader.read(np.array([1]))[0])[8:] == changed.read_bytes()
    monkeypatch.setattr(fileset, "_COARSE_NS", 10**15)
    with pytest.raises(SourceError, match="has changed"):
        open_reader(str(folder)).read(np.array([1]))
    monkeypatch.setattr(fileset, "_COARSE_NS", -(10**15))
    open_reader(str(folder))
    os.utime(changed)
    with pytest.raises(SourceError, match="has changed"):
        open_reader(str(folder)).read(np.array([1]))
    assert open_reader(str(folder)).fingerprint != first.fingerprint


def test_a_file_that_vanished_is_named_and_listed_again(folder: Path, cache: Path) -> None:
    reader = open_reader(str(folder))
    before = os.stat(folder / "C")
    (folder / "C" / "1.jpg").rename(folder / "C" / "2.jpg")
    os.utime(folder / "C", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SourceError, match=r"C/1\.jpg is gone: the data set has changed; run again"):
        reader.read(np.array([0]))
    assert list(cache.glob("*/kept")) == []
    assert open_reader(str(folder)).name(0).endswith("2.jpg")


def test_a_new_file_is_noticed_also_if_its_folder_has_the_time_of_before(folder: Path) -> None:
    for name in ("", "C"):
        os.utime(folder / name, ns=(10**18, 10**18))
    assert len(open_reader(str(folder))) == 6
    shutil.copy(folder / "C" / "1.jpg", folder / "C" / "2.jpg")
    os.utime(folder / "C", ns=(10**18, 10**18))
    assert len(open_reader(str(folder))) == 7


def test_paths_without_a_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        open_reader(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds nothing to read"):
        open_reader(str(tmp_path / "empty"))
    hollow = _make(tmp_path / "hollow", ["a/1.jpg", "b/readme.txt"])
    with pytest.raises(SourceError, match="hollow/b is a class folder without images"):
        open_reader(str(hollow))


def test_blocks_mix_classes_and_are_even_in_bytes(tmp_path: Path) -> None:
    files = [f"{label}/{k}.jpg" for label in "abcd" for k in range(100)]
    root = _make(tmp_path / "data", files)
    for k, name in enumerate(files):
        (root / name).write_bytes(bytes(1500 + 7 * k))
    layout = (reader := FolderReader(str(root))).layout
    assert layout.blocks > 10
    sizes = [reader.sizes[layout.samples_of(k)].sum() for k in range(layout.blocks)]
    assert max(sizes) - min(sizes) <= 2 * reader.sizes.max()
    mixed = [len(set(reader.labels[layout.samples_of(k)])) for k in range(layout.blocks)]
    assert min(mixed) >= 2
    seen = np.concatenate([layout.samples_of(k) for k in range(layout.blocks)])
    assert np.array_equal(np.sort(seen), np.arange(400))


def test_urls_of_fsspec_are_read() -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for name in ("a/1.jpg", "b/2.jpg"):
        with files.open(f"/pictures/{name}", "wb") as file:
            file.write(name.encode())
    reader = open_reader("memory://pictures")
    assert _names(reader) == ["a/1.jpg", "b/2.jpg"]
    image = reader.schema.split(reader.read(np.array([1]))[0])["image"]
    assert isinstance(image, memoryview)
    assert bytes(image) == b"b/2.jpg"


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("labels.csv", "file_name,label\n2.jpg,dog\n1.png,cat\n3.jpg,dog\n"),
        ("labels.tsv", "label\timage\ndog\t2.jpg\ncat\t1.png\ndog\t3.jpg\n"),
        ("labels.json", '{"2.jpg": "dog", "1.png": "cat", "3.jpg": "dog"}'),
        (
            "metadata.jsonl",
            '{"file_name": "2.jpg", "class": "dog"}\n{"file_name": "1.png", "class": "cat"}\n'
            '{"file_name": "3.jpg", "class": "dog"}\n',
        ),
    ],
)
def test_a_flat_folder_takes_its_labels_from_a_table(tmp_path: Path, table: str, text: str) -> None:
    flat = _make(tmp_path / "flat", ["1.png", "2.jpg", "3.jpg"])
    assert open_reader(str(flat)).schema.fields == (("image", "image"),)
    (flat / table).write_text(text)
    reader = open_reader(str(flat))
    assert (list(reader.classes), reader.labels.tolist()) == (["cat", "dog"], [0, 1, 1])
    payload = reader.read(np.array([1]))[0]
    assert reader.schema.split(payload) == {"image": bytes([1]) * 11, "label": 1}
    (flat / table).write_text(text.replace("3.jpg", "4.jpg"))
    with pytest.raises(SourceError, match=r"1 of its files are not in the folder.*3\.jpg"):
        open_reader(str(flat))
    (flat / table).write_text("nonsense")
    with pytest.raises(SourceError, match="not a label table"):
        open_reader(str(flat))


def test_a_file_that_changed_at_the_same_size_is_refused(folder: Path) -> None:
    reader = open_reader(str(folder))
    (folder / "C" / "1.jpg").write_bytes(b"x" * 15)
    with pytest.raises(SourceError, match="has changed"):
        reader.read(np.array([0]))


def test_a_cache_of_the_hub_is_not_to_be_removed(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123" / "data"
    snapshot.mkdir(parents=True)
    (snapshot / "train-00000-of-00001.parquet").write_bytes(b"")
    (tmp_path / "datasets--a--b" / "refs").mkdir()
    (tmp_path / "datasets--a--b" / "refs" / "main").write_text("0123")
    with pytest.raises(SourceError) as raised:
        open_reader(str(tmp_path / "datasets--a--b"))
    assert "remove" not in str(raised.value)
    assert "datasets--a--b/snapshots/0123, whose files are links to follow" in str(raised.value)
