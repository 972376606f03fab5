"""Fixtures that several rooms' tests share."""

import os
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_images() -> Path:
    """The folder with the real-image archives; skips where it is not there."""
    folder = Path(os.environ.get("DLIO_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "tiny-imagenet-40.tar").exists():
        pytest.skip(f"no real images in {folder} (set DLIO_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def imagenet(real_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet pictures in class folders, `<wnid>/<name>.JPEG`."""
    folder = tmp_path_factory.mktemp("imagenet")
    with tarfile.open(real_images / "imagenet-sample-1000.tar") as archive:
        for member in archive.getmembers()[:200]:
            if not member.isfile():
                continue
            name = os.path.basename(member.name)
            class_folder = folder / name.split("_")[0]
            class_folder.mkdir(exist_ok=True)
            stream = archive.extractfile(member)
            assert stream is not None
            (class_folder / name).write_bytes(stream.read())
    return folder
