"""The verdict about a sample is the same for `dlio verify`, `dlio pack`, plain reading, and loaders
of any crop, epoch and tier; it is called damaged only where its format's own library refuses it."""

import functools
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import dlio
from dlio.errors import DlioError
from dlio_staging.pack_folder import pack
from dlio_staging.verify import verify
from tests.conftest import examples
from tests.readers import test_damage
from tests.readers.picture_files import PICTURES, PictureFile, pillows

WORDS = ("damaged", "restore it", "corrupt")
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Files of bytes shrink for minutes, and tell no more then."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.


@st.composite
def harmed(draw: st.DrawFn, data: bytes, first: int = 0) -> bytes:
    """The same file, or one that is damaged from a place on, empty, or of another kind."""
    way = draw(
        st.sampled_from(["", "flip", "cut", "hole", "lost", "more", "empty", "text", "zeros"])
    )
    at = draw(st.integers(min(first, len(data) - 1), len(data) - 1))
    made = bytearray(data)
    if way == "flip":
        made[at] ^= 1 << draw(st.integers(0, 7))
    elif way == "cut":
        del made[at:]
    elif way == "hole":
        made[at : at + 40] = bytes(len(made[at : at + 40]))
    elif way == "lost":
        del made[at : at + draw(st.integers(1, 20))]
    elif way == "more":
        made += draw(st.binary(min_size=1, max_size=9))
    elif way == "empty":
        made.clear()
    elif way == "text":
        made[:] = b"not found: see https://example.org\n" * 30
    elif way == "zeros":
        made[:] = bytes(len(made))
    return bytes(made)


@st.composite
def pictures(draw: st.DrawFn) -> tuple[PictureFile, bytes]:
    drawn = draw(st.one_of(*PICTURES.values()))
    return drawn, draw(harmed(drawn.data))


def _skipped(path: Path, tiers: str, size: int, epochs: int) -> list[set[str]]:
    """Return the names that a loader leaves out in each epoch."""
    skipped = []
    with (
        dlio.open(str(path), tiers=tiers, image_size=size, on_error="skip") as data,
        dlio.DataLoader(data, 2, True) as loader,
    ):
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            count = sum(len(images) for images, _ in loader)
            assert count == len(data) - len(loader.stats()["skipped"])
            skipped.append(set(loader.stats()["skipped"]))
    return skipped


@settings(suppress_health_check=list(HealthCheck), phases=PHASES, max_examples=examples(25))
@given(files=st.lists(pictures(), min_size=2, max_size=5))
def test_all_ways_to_a_picture_come_to_the_same_verdict(
    files: Sequence[tuple[PictureFile, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("data")
    data, packed = folder / "data", folder / "packed"
    (data / "a").mkdir(parents=True)
    names = []
    for k, (drawn, body) in enumerate(files):
        suffix = "jpg" if drawn.suffix == "gif" else drawn.suffix
        names.append(f"a/{k}.{suffix}")
        (data / names[-1]).write_bytes(body)
    Image.new("RGB", (9, 9)).save(data / "a" / "sound.png")
    refused: dict[str, str] = {}
    with dlio.open(str(data), tiers="none", image_size=None) as opened:
        for k in range(len(opened)):
            try:
                opened[k]
            except DlioError as error:
                refused[str(error).split(" ")[0]] = str(error)
    assert set(refused) <= set(names)
    for (drawn, body), name in zip(files, names, strict=True):
        text = refused.get(name, "")
        assert len(text.splitlines()) <= 1
        if any(word in text for word in WORDS):
            assert pillows(body) is None, (drawn.about, text)
    checked = verify(str(data))
    assert {line.partition(" ")[0] for line in checked.damaged} == set(refused)
    assert pack(str(data), str(packed)).undecodable == len(refused)
    assert {line.partition(" ")[0] for line in verify(str(packed)).damaged} == set(refused)
    for path, tiers, size in (
        (data, "none", 8),
        (data, "ram:64MiB:decoded", 24),
        (packed, "ram:64MiB", 40),
    ):
        for skipped in _skipped(path, tiers, size, 2):
            assert skipped == set(refused), (tiers, size)


# Arrays and scans, one a file


def _npy(path: Path, values: Any) -> None:
    np.save(path, values)


def _npz(path: Path, values: Any) -> None:
    np.savez_compressed(path, data=values)


def _h5(path: Path, values: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(1, 3, 4), compression="gzip")


def _nifti(path: Path, values: Any) -> None:
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)


def _read_npy(path: Path) -> None:
    np.load(io.BytesIO(path.read_bytes()))  # NumPy leaves files open that it refuses.


def _read_npz(path: Path) -> None:
    with np.load(io.BytesIO(path.read_bytes())) as arrays:
        [arrays[name] for name in arrays.files]


def _read_h5(path: Path) -> None:
    with h5py.File(path) as file:
        [file[name][...] for name in file]


def _read_nifti(path: Path) -> None:
    np.asarray(pytest.importorskip("nibabel").load(path).dataobj)


FORMS = {
    ".npy": (_npy, _read_npy),
    ".npz": (_npz, _read_npz),
    ".h5": (_h5, _read_h5),
    ".nii": (_nifti, _read_nifti),
    ".nii.gz": (_nifti, _read_nifti),
}


def _said(call: Any) -> str:
    """Return the error of a call, or nothing."""
    try:
        call()
    except DlioError as error:
        return str(error)
    return ""


@settings(suppress_health_check=list(HealthCheck), phases=PHASES, max_examples=examples(60))
@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
def test_all_ways_to_an_array_come_to_the_same_verdict(
    form: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    write, read = FORMS[form]
    names = [f"{'ab'[k % 2]}/{k}{form}" for k in range(4)]
    refused_by_library = set()
    for k, name in enumerate(names):
        file = folder / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, np.arange(24 + 12 * k, dtype=np.int16).reshape(2 + k, 3, 4))
        if k:
            file.write_bytes(data.draw(harmed(file.read_bytes())))
        try:
            read(file)
        except Exception:  # Of many types.
            refused_by_library.add(name)
    path = folder / "data"

    def opened() -> None:
        dlio.open(str(path), tiers="none").close()

    whole = _said(opened)
    assert len(whole.splitlines()) <= 1
    if any(word in whole for word in WORDS):
        assert any(name in whole for name in refused_by_library), whole
    if whole:  # Headers are read once, for an index: one that is damaged stops all commands.
        assert _said(lambda: verify(str(path)))
        assert _said(lambda: pack(str(path), str(folder / "packed")))
        return
    refused = {}
    with dlio.open(str(path), tiers="none") as plain:
        assert len(plain) == len(names)
        for k in range(len(plain)):
            if text := _said(functools.partial(plain.__getitem__, k)):
                refused[next(name for name in names if name in text)] = text
    for name, text in refused.items():
        assert len(text.splitlines()) == 1
        assert name in refused_by_library or not any(word in text for word in WORDS), text
    checked = verify(str(path))
    assert len(checked.damaged) == len(refused)
    assert all(any(name in line for line in checked.damaged) for name in refused)
    for tiers, epoch in itertools.product(("none", "ram:64MiB"), range(2)):
        with (
            dlio.open(str(path), tiers=tiers, on_error="skip") as left,
            dlio.DataLoader(left, 1, True, collate_fn=list) as loader,
        ):
            loader.set_epoch(epoch)
            assert sum(map(len, loader)) == len(left) - len(refused)
            assert set(loader.stats()["skipped"]) == set(refused)


# Files of many samples

MANY = sorted(set(test_damage.FORMATS) - {"mds", "nifti", "dicom"})


@settings(suppress_health_check=list(HealthCheck), phases=PHASES, max_examples=examples(40))
@given(form=st.sampled_from(MANY), seed=st.integers(0, 1 << 32))
def test_all_ways_to_a_file_of_samples_come_to_the_same_verdict(
    form: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(seed)
    path = test_damage.FORMATS[form].draw(rng, folder)
    test_damage.damage(rng, Path(path))
    refused: set[int] = set()

    def read() -> None:
        with dlio.open(path, tiers="none") as plain:
            numbers = range(len(plain))
            refused.update(k for k in numbers if _said(functools.partial(plain.__getitem__, k)))

    whole = _said(read)
    assert len(whole.splitlines()) <= 1
    packed = _said(lambda: pack(path, str(folder / "packed")))
    if whole:
        assert _said(lambda: verify(path)) == whole
        assert packed
        return
    assert len(verify(path).damaged) == len(refused)
    assert bool(packed) == bool(refused)
    for tiers, epoch in itertools.product(("none", "ram:64MiB"), range(2)):
        with (
            dlio.open(path, tiers=tiers, on_error="skip") as left,
            dlio.DataLoader(left, 2, True, collate_fn=list) as loader,
        ):
            loader.set_epoch(epoch)
            assert sum(map(len, loader)) == len(left) - len(refused)
            assert len(loader.stats()["skipped"]) == len(refused)
