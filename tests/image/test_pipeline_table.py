"""A pipeline that is given is the one that is run; those of torchvision come within a level."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.errors import UsageError
from dlio.util.printable import _told
from tests.image import pipeline_table

GUIDE = Path(__file__).parents[2] / "docs/guides/transforms.md"


def test_pipelines_come_as_close_as_the_guide_says() -> None:
    text = GUIDE.read_text(encoding="utf-8").split("| pipeline | for | antialias |")[1]
    lines = text.split("\n\n")[0].splitlines()[2:]
    said = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines]
    measured = pipeline_table.rows()
    assert [row[:4] for row in said] == [row[:4] for row in measured]
    assert len(measured) >= 40
    for written, row in zip(said, measured, strict=True):
        assert abs(float(written[4]) - float(row[4])) <= 0.2, row
        assert float(row[4]) <= 1, row


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Pictures of 28 pixels, whose left half is darker."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(12):
            image = Image.new("RGB", (28, 20), (200, 10 * number, 0))
            image.paste((50, 0, 0), (0, 0, 14, 20))
            image.save(tmp_path / name / f"{number}.png")
    return tmp_path


def _own() -> Any:
    return T.Compose([T.ToTensor(), T.Normalize([0.0] * 3, [1.0] * 3)])


def _batch(path: Path, **options: Any) -> torch.Tensor:
    with (
        dlio.open(str(path), tiers="none", **options) as data,
        dlio.DataLoader(data, 24) as loader,
    ):
        images: torch.Tensor = next(iter(loader))[0]
        assert torch.equal(images[5], data[5][0])
        return images


@pytest.mark.parametrize("transform", [_own(), T.ToTensor(), lambda image: image.float() / 255])
def test_nothing_is_added_to_a_pipeline(digits: Path, transform: Any) -> None:
    images = _batch(digits, transform=transform)
    assert images.shape == (24, 3, 20, 28)
    assert (images[:, 0, :, :14] < 0.5).all()  # None is mirrored.
    assert (images[:, 0, :, 14:] > 0.5).all()


def test_crops_are_made_where_they_are_asked_for(digits: Path) -> None:
    assert _batch(digits, image_size=16, transform=_own()).shape == (24, 3, 16, 16)
    assert _batch(digits, image_size=(8, 16)).shape == (24, 3, 8, 16)
    assert _batch(digits, image_size=[8, 16], train=False, transform=_own()).shape[2:] == (8, 16)
    assert _batch(digits).shape == (24, 3, 224, 224)
    with pytest.raises(UsageError, match="crops=2"):
        dlio.open(str(digits), transform=_own(), crops=2)[0]


def test_a_pipeline_of_images_gets_them_without_crops(digits: Path) -> None:
    assert _batch(digits, image_size=None, transform=_own()).shape == (24, 3, 20, 28)
    with dlio.open(str(digits), image_size=None, transform=sorted) as data:
        assert data[0] == ["image", "label"]  # The names of the sample as it is.


def test_a_random_step_without_a_crop_is_drawn_for_each_sample(digits: Path) -> None:
    flips = T.Compose([T.RandomHorizontalFlip(), T.ToTensor()])
    images = _batch(digits, transform=flips, seed=3)
    mirrored = images[:, 0, 0, 0] > 0.5
    assert 0 < int(mirrored.sum()) < 24
    assert torch.equal(images, _batch(digits, transform=flips, seed=3))


@pytest.mark.parametrize("form", ["png", "tif", "pgm"])
@pytest.mark.parametrize("steps", ["Resize(40), CenterCrop(32), ToTensor", "ToTensor"])
def test_grey_of_16_bits_is_torchvisions_in_its_pipelines(
    form: str, steps: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = np.arange(0, 40 * 30 * 40, 40).reshape(40, 30).astype(np.uint16)
    (tmp_path / "a").mkdir()
    Image.fromarray(numbers).save(path := tmp_path / "a" / f"0.{form}")
    pipeline = pipeline_table.PipelineCase("v1", steps, True, "Pillow").pipeline()
    with Image.open(path) as image:
        wanted = pipeline(image.convert("RGB"))
    assert (wanted == 1).double().mean() > 0.9
    with dlio.open(str(tmp_path), transform=T.ToTensor(), tiers="none") as data:
        assert torch.equal(data[0][0][2], torch.from_numpy(numbers // 256) / 255)
    assert "16 bits" not in caplog.text
    _told.discard("white")
    with dlio.open(str(tmp_path), transform=pipeline, tiers="none") as data:
        assert torch.equal(data[0][0], wanted)
    line = caplog.records[-1].getMessage()
    assert line.startswith(f"a/0.{form} has 16 bits of grey: numbers above 255 become white")
