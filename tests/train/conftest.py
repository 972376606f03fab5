"""A data set that a run of a second or two trains on."""

from pathlib import Path

import pytest

from dlio.demo import draw_dataset


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and val/: 101 and 23 pictures in 4 classes.

    101 is a multiple of nothing: the last global batch is a small one.
    """
    folder = tmp_path_factory.mktemp("drawn") / "pictures"
    draw_dataset(str(folder), images=101, validation=23, classes=4)
    return folder
