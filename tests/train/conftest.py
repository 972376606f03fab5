"""A data set that a run of a second or two trains on."""

from pathlib import Path

import pytest

from dlio.demo import draw_dataset

SAMPLES = 101
"""Not a multiple of anything: the last global batch is a small one."""
HELD_OUT = 23
CLASSES = 4


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and val/, 4 classes, 101 and 23 pictures."""
    folder = tmp_path_factory.mktemp("drawn") / "pictures"
    draw_dataset(str(folder), images=SAMPLES, validation=HELD_OUT, classes=CLASSES)
    return folder
