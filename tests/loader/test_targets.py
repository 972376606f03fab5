"""Boxes, masks and keypoints move with the pixels of the crop."""

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio import transforms as T  # noqa: N812
from dlio_staging.pack_folder import pack
from tests.loader import targets_data
from tests.loader.targets_data import drawn, painted, write_coco, write_masks, write_yolo

SIZE = 96


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def mistakes(image: torch.Tensor, boxes: torch.Tensor, slack: float) -> int:
    """Count pixels that are dark inside a box, or bright outside of all, off the edges by `slack`
    pixels."""
    bright = image[0].numpy() > 127
    height, width = bright.shape
    y, x = np.mgrid[:height, :width] + 0.5
    inside, near = np.zeros_like(bright), np.zeros_like(bright)
    for left, top, right, bottom in boxes.tolist():
        inside |= (
            (x > left + slack) & (x < right - slack) & (y > top + slack) & (y < bottom - slack)
        )
        near |= (x > left - slack) & (x < right + slack) & (y > top - slack) & (y < bottom + slack)
    return int((inside & ~bright).sum() + (bright & ~near).sum())


@pytest.mark.parametrize(("kind", "slack"), [("coco", 0.51), ("yolo", 0.51), ("jpeg", 1.0)])
def test_boxes_are_where_the_painted_pixels_are_in_hundreds_of_crops(
    tmp_path: Path, kind: str, slack: float
) -> None:
    rows = drawn(1, 12)
    if kind == "yolo":
        write_yolo(tmp_path, rows)
    elif kind == "coco":
        write_coco(tmp_path, rows)
    else:  # So large that crops are decoded at a half, a quarter and an eighth.
        large = [
            (4 * h, 4 * w, [(4 * a, 4 * b, 4 * c, 4 * d) for a, b, c, d in boxes])
            for h, w, boxes in rows
        ]
        write_coco(tmp_path, large, "jpg")
    flips = T.Compose([T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), T.RandomVerticalFlip()])
    shown = 0
    with dlio.open(tmp_path, transform=flips, tiers="none") as data:
        for epoch in range(25):
            data.set_epoch(epoch)
            for index in range(len(data)):
                image, target = data[index]
                assert mistakes(image, target["boxes"], slack) == 0, (epoch, index)
                shown += len(target["boxes"])
    assert 150 < shown < 300


def test_masks_are_the_painted_pixels(tmp_path: Path) -> None:
    rows = drawn(2, 8)
    write_coco(tmp_path / "coco", rows)
    write_masks(tmp_path / "masks", rows)
    with (
        dlio.open(tmp_path / "coco", image_size=SIZE, tiers="none", masks=True) as instances,
        dlio.open(tmp_path / "masks", image_size=SIZE, tiers="none") as classes,
    ):
        for epoch in range(10):
            for data in (instances, classes):
                data.set_epoch(epoch)
            for index in range(len(rows)):
                image, target = instances[index]
                assert target["masks"].dtype == torch.uint8
                assert target["masks"].shape == (len(target["boxes"]), SIZE, SIZE)
                again, mask = classes[index]
                assert torch.equal(image, again)
                assert set(mask.unique().tolist()) <= {0, 7}
                drawn_mask = target["masks"].amax(0) if len(target["boxes"]) else mask * 0
                assert torch.equal(drawn_mask * 7, mask)
                # Pixels are blended along the edges, and masks are not.
                edges = 4 * SIZE
                assert int(((image[0] > 127) != (mask == 7)).sum()) <= edges // 2
                assert int(((image[0] == 255) & (mask == 0)).sum()) <= edges // 2


def test_keypoints_move_and_change_sides_in_a_mirror(tmp_path: Path) -> None:
    write_coco(tmp_path, [(100, 200, [(40, 20, 120, 80)])])
    plain = T.Compose([T.RandomResizedCrop((50, 100), (1, 1), (2, 2))])
    flipped = T.Compose([*plain.transforms, T.RandomHorizontalFlip(1)])
    upside = T.Compose([*plain.transforms, T.RandomVerticalFlip(1)])
    points = []
    for transform in (plain, flipped, upside):
        with dlio.open(tmp_path, transform=transform, tiers="none") as data:
            points.append(data[0][1]["keypoints"][0].tolist())
    nose, left, right = [20, 10, 2], [30, 25, 2], [50, 25, 1]
    assert points[0] == [nose, left, right]
    assert points[1] == [[80, 10, 2], [50, 25, 1], [70, 25, 2]]
    assert points[2] == [[20, 40, 2], [50, 25, 1], [30, 25, 2]]


def test_keypoints_outside_of_the_crop_are_not_labelled(tmp_path: Path) -> None:
    write_coco(tmp_path, [(100, 100, [(0, 0, 100, 100)])])
    middle = T.Compose([T.Resize(100), T.CenterCrop(40)])
    with dlio.open(tmp_path, transform=middle, tiers="none") as data:
        _, target = data[0]
    assert target["boxes"].tolist() == [[0, 0, 40, 40]]
    assert target["keypoints"][0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_boxes_that_are_hardly_visible_are_dropped_if_wanted(tmp_path: Path) -> None:
    boxes = [(0, 0, 50, 100), (0, 0, 28, 100), (0, 0, 25, 25), (30, 30, 70, 70)]
    write_coco(tmp_path, [(100, 100, boxes)])
    middle = T.Compose([T.Resize(100), T.CenterCrop(50)])
    seen = []
    for least in (0.0, 0.1, 1.0):
        with dlio.open(
            tmp_path, transform=middle, tiers="none", min_visible=least, masks=True
        ) as data:
            _, target = data[0]
            lengths = {len(target[name]) for name in ("boxes", "labels", "masks", "keypoints")}
            assert len(lengths) == 1
            seen.append(target["boxes"].tolist())
    first, second, last = [0, 0, 25, 50], [0, 0, 3, 50], [5, 5, 45, 45]
    assert seen == [[first, second, last], [first, last], [last]]


def test_whole_pictures_come_with_whole_targets_in_lists(tmp_path: Path) -> None:
    rows = drawn(3, 6, boxes=2)
    write_coco(tmp_path, rows)
    with (
        dlio.open(tmp_path, image_size=None, tiers="none", masks=True) as data,
        dlio.DataLoader(data, batch_size=6) as loader,
    ):
        ((images, targets),) = list(loader)
        assert isinstance(images, list)
        for image, target in zip(images, targets, strict=True):
            height, width, boxes = rows[target["image_id"] - 100]
            assert image.shape == (3, height, width)
            assert target["boxes"].tolist() == [list(box) for box in boxes]
            assert target["labels"].tolist() == [1, 3]
            for mask, (left, top, right, bottom) in zip(target["masks"], boxes, strict=True):
                assert int(mask.sum()) == (right - left) * (bottom - top)
                assert mask[top:bottom, left:right].all()


def flat(batch: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    images, targets = batch
    return {
        target["image_id"]: (image, target["boxes"], target["labels"])
        for image, target in zip(images, targets, strict=True)
    }


def epoch_of(path: Path, **options: Any) -> dict[int, Any]:
    """Return (image, boxes, labels) of each picture in one epoch."""
    tiers = options.pop("tiers", "none")
    seen: dict[int, Any] = {}
    with (
        dlio.open(path, image_size=SIZE, tiers=tiers) as data,
        dlio.DataLoader(data, batch_size=4, **options) as loader,
    ):
        for batch in loader:
            assert isinstance(batch[1], list)
            seen.update(flat(batch))
    return seen


def same(one: dict[int, Any], two: dict[int, Any]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(a, b) for k in one for a, b in zip(one[k], two[k], strict=True)
    )


def test_tiers_shards_and_engines_give_the_same_crops_and_boxes(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco", drawn(4, 11, boxes=3))
    pack(str(tmp_path / "coco"), str(tmp_path / "packed"), order="source")
    plain = epoch_of(tmp_path / "coco", shuffle=True)
    assert len(plain) == 11
    assert same(plain, epoch_of(tmp_path / "coco", shuffle=False, tiers="ram:16MiB"))
    assert same(plain, epoch_of(tmp_path / "packed", shuffle=True, tiers="ram:16MiB"))
    assert same(plain, epoch_of(tmp_path / "coco", workers="process", num_workers=1))
    with dlio.open(tmp_path / "coco", image_size=SIZE, tiers="none") as data:
        torchs: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(data, batch_size=4)
        seen = {k: v for batch in torchs for k, v in flat(batch).items()}
        assert same(plain, seen)
        copy = pickle.loads(pickle.dumps(data))
        assert torch.equal(copy[3][1]["boxes"], data[3][1]["boxes"])


def test_packing_does_not_take_pictures_away_from_their_boxes(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco", drawn(4, 2))
    with pytest.raises(dlio.UsageError, match=r"--resize.*boxes"):
        pack(str(tmp_path / "coco"), str(tmp_path / "packed"), resize=32)


@pytest.mark.parametrize("empty", [False, True])
def test_pictures_without_boxes_have_empty_targets(tmp_path: Path, empty: bool) -> None:
    rows = [(60, 60, []), (60, 60, [] if empty else [(0, 0, 60, 60)])]
    write_coco(tmp_path, rows)
    with (
        dlio.open(tmp_path, image_size=32, tiers="none", masks=True) as data,
        dlio.DataLoader(data, batch_size=2) as loader,
    ):
        ((_, targets),) = list(loader)
        lengths = sorted(len(target["boxes"]) for target in targets)
        assert lengths == ([0, 0] if empty else [0, 1])
        (target,) = [each for each in targets if each["image_id"] == 100]
        assert target["boxes"].shape == (0, 4)
        assert target["labels"].dtype == torch.int64
        assert target["keypoints"].shape == (0, 3, 3)
        assert target["masks"].shape == (0, 32, 32)


def test_normalize_is_applied_to_the_images_of_a_batch_alone(tmp_path: Path) -> None:
    write_coco(tmp_path, drawn(5, 4))
    transform = T.Compose([T.RandomResizedCrop(SIZE), T.Normalize([0.5] * 3, [0.25] * 3)])
    with (
        dlio.open(tmp_path, transform=transform, tiers="none") as data,
        dlio.DataLoader(data, batch_size=4) as loader,
    ):
        ((images, targets),) = list(loader)
        assert images.dtype == torch.float32
        assert images.min() >= -2
        for k, target in enumerate(targets):
            number = int(target["image_id"]) - 100
            image, again = data[number]
            assert torch.equal(again["boxes"], target["boxes"])
            assert torch.allclose(image, images[k])


@pytest.mark.parametrize(
    "step", [T.RandomHorizontalFlip(), T.Resize(32), T.Compose([T.CenterCrop(8)])]
)
def test_steps_that_would_move_pixels_alone_are_refused(tmp_path: Path, step: Any) -> None:
    write_coco(tmp_path, drawn(5, 2))
    transform = T.Compose([T.RandomResizedCrop(SIZE), T.ToFloat(), step])
    with pytest.raises(dlio.UsageError, match=r"leave its boxes and masks behind.*map\(\)"):
        dlio.open(tmp_path, transform=transform)


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_several_crops_are_refused(tmp_path: Path, kind: str) -> None:
    (write_coco if kind == "boxes" else write_masks)(tmp_path, drawn(5, 2))
    for options in ({"crops": 2}, {"transform": T.RandomResizedCrop(SIZE, crops=2)}):
        with pytest.raises(dlio.UsageError, match=r"crops=2: its boxes.*leave crops= out"):
            dlio.open(tmp_path, **options)


def test_map_gets_the_picture_and_its_target(tmp_path: Path) -> None:
    write_coco(tmp_path, drawn(5, 4))

    def both(sample: Any) -> Any:
        image, target = sample
        target["area"] = (target["boxes"][:, 2:] - target["boxes"][:, :2]).prod(1)
        return image.float(), target

    with dlio.open(tmp_path, image_size=SIZE, tiers="none") as data:
        with dlio.DataLoader(data.map(both), batch_size=4) as loader:
            ((images, targets),) = list(loader)
        assert images.shape == (4, 3, SIZE, SIZE)
        assert all(len(target["area"]) == len(target["boxes"]) for target in targets)


def test_decoded_tiers_are_refused_for_boxes(tmp_path: Path) -> None:
    write_coco(tmp_path, drawn(5, 2))
    with pytest.raises(dlio.UsageError, match="leave :decoded out"):
        dlio.open(tmp_path, tiers="ram:1MiB:decoded")


def test_a_share_beyond_one_is_refused(tmp_path: Path) -> None:
    write_coco(tmp_path, drawn(5, 2))
    values: list[Any] = [-0.1, 1.1, float("nan"), "half"]
    for value in values:
        with pytest.raises(dlio.UsageError, match="min_visible"):
            dlio.open(tmp_path, min_visible=value)


def test_targets_are_padded_to_one_number_of_boxes(tmp_path: Path) -> None:
    boxes = [(0, 0, 10, 10), (0, 0, 30, 30), (5, 5, 25, 25)]
    write_coco(tmp_path, [(40, 40, boxes), (40, 40, boxes[:1]), (40, 40, [])])
    with dlio.open(
        tmp_path, image_size=40, train=False, tiers="none", masks=True, min_visible=0.5
    ) as data:
        for most, wanted in ((None, [3, 1, 0]), (2, [2, 1, 0]), (5, [3, 1, 0])):
            with dlio.DataLoader(data, 3, collate_fn=dlio.PadTargets(most)) as loader:
                ((images, targets),) = list(loader)
            order = loader.last_samples.tolist()
            size = most or 3
            assert images.shape == (3, 3, 40, 40)
            assert targets["count"].tolist() == [wanted[k] for k in order]
            assert targets["boxes"].shape == (3, size, 4)
            assert targets["masks"].shape == (3, size, 40, 40)
            assert targets["keypoints"].shape == (3, size, 3, 3)
            for k, number in enumerate(order):
                count = wanted[number]
                assert (targets["labels"][k, count:] == -1).all()
                assert (targets["boxes"][k, count:] == 0).all()
                own = data[number][1]
                chosen = [1, 2] if (number, most) == (0, 2) else list(range(count))
                assert torch.equal(targets["boxes"][k, :count], own["boxes"][chosen])
                assert torch.equal(targets["masks"][k, :count], own["masks"][chosen])
    with pytest.raises(dlio.UsageError, match="most"):
        dlio.PadTargets(0)
    with pytest.raises(dlio.UsageError, match=r"not .picture, Target"):
        dlio.PadTargets()([(torch.zeros(3), 1)])


@pytest.mark.mpi
def test_ranks_give_the_pixels_and_boxes_of_one_process(
    tmp_path: Path, mpirun: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write_coco(tmp_path, drawn(7, 13, boxes=2))
    seen: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2):
        done = mpirun(ranks, str(Path(__file__).with_name("targets_checks.py")), str(tmp_path))
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == ranks
        parts = [json.loads(line) for line in lines]
        assert sum(map(len, parts)) == 13
        seen[ranks] = {key: value for part in parts for key, value in part.items()}
    assert len(seen[1]) == 13
    assert seen[1] == seen[2]


# Photos without labels.


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for k, (height, width, boxes) in enumerate(drawn(6, 5)):
        targets_data.write(tmp_path / f"{k}.jpg", painted(height, width, boxes))
    return tmp_path


def test_unlabelled_photos_of_several_sizes_are_batched(photos: Path) -> None:
    with dlio.open(photos, image_size=48) as data, dlio.DataLoader(data, batch_size=5) as loader:
        assert data[0]["image"].shape == (3, 48, 48)
        (batch,) = list(loader)
        assert list(batch) == ["image"]
        assert batch["image"].shape == (5, 3, 48, 48)
        # The crop of a sample is the same, however it is asked for.
        numbers = loader.last_samples.tolist()
        for k, number in enumerate(numbers):
            assert torch.equal(batch["image"][k], data[number]["image"])


def test_unlabelled_photos_are_normalized_and_collated_like_others(photos: Path) -> None:
    transform = T.Compose([T.RandomResizedCrop(32), T.Normalize([0.5] * 3, [0.5] * 3)])
    with dlio.open(photos, transform=transform, tiers="none") as data:
        with dlio.DataLoader(data, batch_size=5) as loader:
            (batch,) = list(loader)
        assert batch["image"].dtype == torch.float32
        with dlio.DataLoader(data, batch_size=5, collate_fn=list) as loader:
            (samples,) = list(loader)
        assert [each["image"].shape for each in samples] == [(3, 32, 32)] * 5


def test_unlabelled_photos_may_lie_in_a_decoded_tier(photos: Path) -> None:
    with dlio.open(photos, image_size=32, tiers="ram:1MiB,ram:16MiB:decoded") as data:
        loader = dlio.DataLoader(data, batch_size=5)
        with loader:
            first = [batch["image"].clone() for batch in loader]
            again = [batch["image"].clone() for batch in loader]
    assert first[0].shape == again[0].shape == (5, 3, 32, 32)


def test_whole_photos_are_a_list_with_collate_fn_list(photos: Path) -> None:
    with (
        dlio.open(photos, image_size=None, tiers="none") as data,
        dlio.DataLoader(data, batch_size=5, collate_fn=list) as loader,
    ):
        (samples,) = list(loader)
        assert len({each["image"].shape for each in samples}) > 1
