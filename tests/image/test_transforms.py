"""Transforms have torchvision's distributions, and the fused ones those of the plain."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio.errors import UsageError
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.crop import DRAWS, Crop
from dlio.image.fusion import TransformParts, fused
from dlio.plan.order import keyed_uniforms

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def _theirs(height: int, width: int, scale: Any, ratio: Any) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, by its formulas."""
    area = height * width
    log_ratio = torch.log(torch.tensor(ratio))
    for _ in range(10):
        target = area * torch.empty(1).uniform_(scale[0], scale[1]).item()
        aspect = torch.exp(torch.empty(1).uniform_(float(log_ratio[0]), float(log_ratio[1]))).item()
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            i = int(torch.randint(0, height - h + 1, size=(1,)).item())
            j = int(torch.randint(0, width - w + 1, size=(1,)).item())
            return i, j, h, w
    in_ratio = width / height
    if in_ratio < min(ratio):
        w, h = width, round(width / min(ratio))
    elif in_ratio > max(ratio):
        h, w = height, round(height * max(ratio))
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("shape", [(375, 500), (100, 100), (40, 900), (900, 40)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 0.9)])
def test_the_same_draws_give_torchvisions_parameters(
    shape: tuple[int, int], scale: tuple[float, float]
) -> None:
    image = torch.zeros(3, *shape)
    torch.manual_seed(3)
    ours = [T.RandomResizedCrop.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(50)]
    torch.manual_seed(3)
    theirs = [_theirs(*shape, scale, (3 / 4, 4 / 3)) for _ in range(50)]
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    # torchvision takes the exponential in single precision: at most a rounding in a few differs.
    assert same >= 48


@pytest.mark.parametrize("shape", [(375, 500), (80, 300)])
def test_the_fused_crop_is_distributed_as_torchvisions(shape: tuple[int, int]) -> None:
    """Two samples of each figure, compared by Kolmogorov's and Smirnov's statistic."""
    n, scale, ratio = 4000, (0.2, 0.8), (0.5, 1.5)
    crop = Crop(224, True, scale, ratio, flip=0.3, upend=0.2)
    rows = keyed_uniforms(1, 0, np.arange(n), crop.draws)
    boxes = [crop.box(*shape, row.tolist()) for row in rows]
    torch.manual_seed(1)
    theirs = np.array([_theirs(*shape, scale, ratio) for _ in range(n)])
    ours = np.array([(b.top, b.left, b.height, b.width) for b in boxes])
    critical = 1.95 * math.sqrt(2 / n)  # One in a thousand.
    for column in range(4):
        values = np.unique(np.concatenate([ours[:, column], theirs[:, column]]))
        ranks = [np.searchsorted(np.sort(x[:, column]), values, "right") for x in (ours, theirs)]
        assert np.abs(ranks[0] - ranks[1]).max() / n < critical
    assert abs(np.mean([box.flip for box in boxes]) - 0.3) < 0.03
    assert abs(np.mean([box.upend for box in boxes]) - 0.2) < 0.03
    assert crop.draws == DRAWS


def test_the_first_part_of_a_compose_is_fused() -> None:
    transform = T.Compose(
        [
            T.RandomResizedCrop((64, 96), scale=(0.3, 1)),
            T.RandomHorizontalFlip(0.2),
            T.RandomVerticalFlip(0.1),
            T.Normalize(MEAN, STD),
        ]
    )
    parts = fused(transform)
    assert parts.crop == Crop(64, True, (0.3, 1.0), flip=0.2, upend=0.1, across=96)
    assert parts.rest is None
    assert [(n, type(step)) for n, step in parts.batchwise] == [(3, T.Normalize)]
    parts = fused(T.Compose([T.Resize(256), T.CenterCrop(224), str]))
    assert parts.crop == Crop(224, False, resize=256, across=224)
    assert isinstance(parts.rest, T.Compose)
    assert parts.rest.transforms == [str]
    assert not parts.batchwise
    assert fused(str) == TransformParts(None, (), str, (), None)
    assert fused(None) == TransformParts(None, (), None, (), None)
    whole = fused(T.Compose([T.CenterCrop(8)]))
    assert (whole.crop, whole.rest) == (None, None)
    assert whole.whole is not None


@pytest.mark.parametrize("shape", [(120, 160), (161, 90), (64, 64)])
def test_the_fused_middle_is_resizes_and_center_crops(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    generator = np.random.default_rng(3)
    small = Image.fromarray(generator.integers(0, 255, (4, 4, 3), np.uint8))
    picture = small.resize(shape[::-1], Image.Resampling.BICUBIC)
    (tmp_path / "a").mkdir()
    picture.save(tmp_path / "a" / "x.png")
    transform = T.Compose([T.Resize(48), T.CenterCrop((40, 32))])
    with dlio.open(str(tmp_path), tiers="none", transform=transform) as data:
        ours, _ = data[0]
    theirs = np.asarray(transform(picture))
    assert ours.shape == (3, 40, 32)
    gap = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs.astype(int))
    assert gap.mean() < 6


def test_a_batch_is_normalised_where_it_lies(pictures: Path) -> None:
    plain = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip()])
    normal = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)])
    with (
        dlio.open(str(pictures), tiers="none", transform=plain) as one,
        dlio.open(str(pictures), tiers="none", transform=normal) as two,
        dlio.DataLoader(one, 6) as pixels,
        dlio.DataLoader(two, 6) as floats,
    ):
        for (images, labels), (made, again) in zip(pixels, floats, strict=True):
            assert images.dtype == torch.uint8
            wanted = (images.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(
                STD
            ).view(3, 1, 1)
            assert torch.allclose(made, wanted, atol=1e-5)
            assert torch.equal(labels, again)
        assert torch.allclose(two[3][0], T.Normalize(MEAN, STD)(one[3][0]))
        on_device = dlio.DataLoader(two, 6, device="meta")
        assert next(iter(on_device))[0].dtype == torch.float32


def test_plain_transforms_take_tensors_and_pictures() -> None:
    picture = Image.fromarray(np.arange(60 * 40 * 3, dtype=np.uint8).reshape(60, 40, 3))
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    for transform, size in (
        (T.RandomResizedCrop(16), (16, 16)),
        (T.Resize(20), (30, 20)),
        (T.Resize((10, 12)), (10, 12)),
        (T.CenterCrop(30), (30, 30)),
    ):
        assert transform(picture).size == size[::-1]
        assert transform(tensor).shape == (3, *size)
        assert transform(tensor.float()).shape == (3, *size)
    assert torch.equal(T.RandomHorizontalFlip(1)(tensor), tensor.flip(-1))
    assert torch.equal(T.RandomVerticalFlip(0)(tensor), tensor)
    flipped = T.RandomHorizontalFlip(1)(picture)
    assert np.array_equal(np.asarray(flipped), np.asarray(picture)[:, ::-1])
    assert T.ToFloat()(tensor).max() <= 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: T.RandomResizedCrop(0),
        lambda: T.RandomResizedCrop(8, scale=(1, 0.5)),
        lambda: T.RandomHorizontalFlip(2),
        lambda: T.Normalize([0.5], [0.0]),
    ],
)
def test_what_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()
