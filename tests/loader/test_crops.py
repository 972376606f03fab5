"""A loader's several crops of each picture are those of one crop at a time, from one decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.data.reader_contract import SampleName
from dlio.errors import UsageError
from dlio.image import decoder
from dlio.image.crop import DRAWS, Box, Crop
from dlio.image.decoder import Decoder
from dlio.image.native import NativeCrop, NativeLibrary, pool_library
from dlio.image.random_source import KeyedRandom, stream_of
from tests.loader.augmented_checks import MEAN, STD, users_own
from tests.loader.test_gallery import parsed, pixels_of

N, SIDE, SEED = 3, 32, 3
PAINTS = [T.ColorJitter(0.4, 0.4, 0.4), T.RandomGrayscale(0.5)]
ERASING = T.RandomErasing(0.6, value="random")
TIERS = ["none", "ram:8MiB", "ram:8MiB:decoded"]


def _steps(crops: int = N) -> list[Any]:
    first = T.RandomResizedCrop(SIDE, crops=crops)
    return [first, T.RandomHorizontalFlip(), *PAINTS, T.Normalize(MEAN, STD), ERASING]


def _open(pictures: Path, transform: Any = None, tiers: str = "none", **options: Any) -> Any:
    return dlio.open(str(pictures), tiers=tiers, transform=transform, seed=SEED, **options)


def _one_by_one(data: dlio.Dataset, epoch: int, sample: int, kept: bool) -> torch.Tensor:
    """The crops of a sample, each decoded and transformed by itself."""
    decoder = Decoder(Crop(SIDE, True), SEED, kept)
    wide = Decoder(Crop(SIDE, True, crops=N), SEED).draw(epoch, np.array([sample]))[0]
    image = data.recipe.fields(sample, data._payload(sample))["image"]
    made = []
    for crop in range(N):
        pixels = np.empty((SIDE, SIDE, 3), np.uint8)
        name = SampleName(data.reader, sample)
        decoder.decode(image, name, wide[crop * DRAWS : (crop + 1) * DRAWS], pixels)
        for number, step in enumerate(PAINTS, 2):
            draws = KeyedRandom(SEED, epoch, sample, stream_of(number, crop))
            pixels = step.apply(pixels, draws)
        normal = T.Normalize(MEAN, STD)(torch.from_numpy(pixels).permute(2, 0, 1)[None])
        draws = KeyedRandom(SEED, epoch, sample, stream_of(5, crop))
        made.append(ERASING.erase_each(normal, [draws])[0])
    return torch.stack(made)


@pytest.fixture(scope="module")
def wanted(pictures: Path) -> dict[tuple[bool, int], list[torch.Tensor]]:
    """The crops of all samples, by (decoded in two steps, epoch)."""
    with _open(pictures) as data:
        return {
            (kept, epoch): [_one_by_one(data, epoch, k, kept) for k in range(len(data))]
            for kept in (False, True)
            for epoch in range(2)
        }


@pytest.mark.parametrize(
    ("engine", "tiers"),
    [("torch", "none"), *((engine, tiers) for engine in ("planned", "threads") for tiers in TIERS)],
)
def test_batches_are_crops_made_one_by_one(
    pictures: Path, wanted: Any, engine: str, tiers: str
) -> None:
    options: dict[str, Any] = {"num_workers": 2}
    if engine == "torch":
        options = {"num_workers": 1, "workers": "process"}
    if engine == "threads":
        options["sampler"] = iter(range(12))
    kept, seen = "decoded" in tiers, 0
    epochs = 2 if engine == "planned" else 1
    with (
        _open(pictures, T.Compose(_steps()), tiers) as data,
        dlio.DataLoader(data, 5, **options) as loader,
    ):
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for images, labels in loader:
                assert images.shape[1:] == (N, 3, SIDE, SIDE)
                assert labels.shape == images.shape[:1]
                for image, label in zip(images, labels.tolist(), strict=True):
                    sample = seen % 12
                    assert torch.allclose(image, wanted[kept, epoch][sample], atol=1e-6)
                    assert label == data.reader.labels[sample]
                    seen += 1
        assert seen == 12 * epochs
        assert f"engine={engine!r}" in repr(loader)


def test_items_and_torchs_own_loader_give_the_same(pictures: Path, wanted: Any) -> None:
    with _open(pictures, T.Compose(_steps())) as data:
        plain = torch.utils.data.DataLoader(data, batch_size=12, num_workers=0)
        [(images, labels)] = list(plain)
        assert labels.tolist() == [int(label) for label in data.reader.labels]
        for sample in range(12):
            assert torch.allclose(images[sample], wanted[False, 0][sample], atol=1e-6)


def test_the_first_crop_is_that_of_a_loader_without_crops(pictures: Path) -> None:
    both = [_open(pictures, T.Compose(_steps(crops))) for crops in (1, 2)]
    with both[0] as one, both[1] as two:
        for (alone, _), (pair, _) in zip(
            dlio.DataLoader(one, 4, True), dlio.DataLoader(two, 4, True), strict=True
        ):
            assert torch.equal(pair[:, 0], alone)
            assert not any(map(torch.equal, pair[:, 1], alone))


@pytest.mark.parametrize("tiers", TIERS)
def test_each_picture_is_decoded_once(
    pictures: Path, tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    before = decoder._decode_jpeg

    def counting(*args: Any) -> Any:
        calls.append(args[1])
        return before(*args)

    def counting_crops(library: NativeLibrary, crops: Sequence[NativeCrop]) -> list[bool]:
        boxes = [each.box for each in crops]
        calls.extend((each.top, each.left, each.height, each.width, 1) for each in boxes)
        return crops_before(library, crops)

    crops_before = NativeLibrary.crops
    monkeypatch.setattr(decoder, "_decode_jpeg", counting)
    monkeypatch.setattr(NativeLibrary, "crops", counting_crops)
    large = T.RandomResizedCrop(200, (0.3, 1.0), crops=N)
    with _open(pictures, large, tiers) as data, dlio.DataLoader(data, 4) as loader:
        assert [images.shape for images, _ in loader] == [(4, N, 3, 200, 200)] * 3
    assert len(calls) == len({str(name) for name in calls}) == 12


def test_evaluation_decodes_the_part_that_is_shown_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a" / "0.jpg")
    calls = []
    before = decoder._decode_jpeg

    def counting(image: Any, name: Any, size: Any, box: Box, factor: int) -> Any:
        calls.append((box.top, box.left, box.height, box.width, factor))
        return before(image, name, size, box, factor)

    def counting_crops(library: NativeLibrary, crops: Sequence[NativeCrop]) -> list[bool]:
        boxes = [each.box for each in crops]
        calls.extend((each.top, each.left, each.height, each.width, 1) for each in boxes)
        return crops_before(library, crops)

    crops_before = NativeLibrary.crops
    monkeypatch.setattr(pool_library, "find", lambda: None)
    monkeypatch.setattr(decoder, "_decode_jpeg", counting)
    monkeypatch.setattr(NativeLibrary, "crops", counting_crops)
    steps: list[Any] = [T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize(MEAN, STD)]
    with _open(tmp_path, T.Compose(steps)) as data, dlio.DataLoader(data, 1) as loader:
        [(images, _)] = list(loader)
    assert images.shape == (1, 3, 224, 224)
    # 224 of 256 pixels of the short side, at the middle.
    assert calls == [(23, 86, 328, 328, 1)]


def test_open_takes_crops_of_its_own(pictures: Path) -> None:
    transform = T.Compose([T.RandomResizedCrop(48, crops=2), T.RandomHorizontalFlip()])
    with _open(pictures, image_size=48, crops=2) as short, _open(pictures, transform) as long:
        assert torch.equal(short[5][0], long[5][0])
        assert short[:3][1][0].shape == (2, 3, 48, 48)
        [images, _] = next(iter(dlio.DataLoader(short, 12)))
        assert torch.equal(images[5], long[5][0])
        view = short.where("label", 1)
        assert view[0][0].shape == (2, 3, 48, 48)


def test_mixtures_of_data_sets_take_crops(pictures: Path) -> None:
    sources = {name: (str(pictures), 0.5) for name in ("first", "second")}
    with (
        _open(pictures, image_size=16, crops=2) as plain,
        dlio.mix(sources, image_size=16, crops=2, tiers="none", seed=SEED) as data,
        dlio.DataLoader(data, 4) as loader,
    ):
        images, _ = next(iter(loader))
        assert images.shape == (4, 2, 3, 16, 16)
        assert torch.equal(data[0][0], plain[0][0])
        with pytest.raises(UsageError, match="crops=2, train=False"):
            dlio.mix(sources, crops=2, train=False)


def test_a_users_function_gets_each_crop_with_its_own_numbers(pictures: Path) -> None:
    both = [T.Compose([T.RandomResizedCrop(SIDE, crops=n), users_own]) for n in (1, 2)]
    with _open(pictures, both[0]) as one, _open(pictures, both[1]) as two:
        for threads in (1, 4):
            with dlio.DataLoader(two, 12, num_workers=threads) as loader:
                [(images, _)] = list(loader)
            assert images.shape == (12, 2, 3, SIDE, SIDE)
            for sample, (first, second) in enumerate(images):
                assert torch.equal(first, one[sample][0])
                assert torch.equal(second, two[sample][0][1])

    noise = T.Compose([T.RandomResizedCrop(SIDE, crops=2), torch.rand_like])
    with _open(pictures, T.Compose([T.ToTensor(), noise])) as whole:
        first, second = whole[0][0]
        assert not torch.equal(first, second)


def test_a_users_collate_gets_the_crops_of_each_sample(pictures: Path) -> None:
    with (
        _open(pictures, T.Compose(_steps())) as data,
        dlio.DataLoader(data, 4, collate_fn=list) as loader,
    ):
        batch: Any = next(iter(loader))
        for sample, (image, label) in enumerate(batch):
            assert torch.allclose(image, data[sample][0], atol=1e-6)
            assert label == data.reader.labels[sample]


def test_a_page_shows_crops_side_by_side(pictures: Path) -> None:
    with _open(pictures, image_size=SIDE, crops=2) as data:
        html = data.show(1, shuffle=False, epochs=1).html
        page = parsed(html)
        shown = pixels_of(page.addresses[1])[..., ::-1]
        first, second = data[0][0].permute(0, 2, 3, 1).numpy()
    assert np.array_equal(shown, np.concatenate([first, second], axis=1))
    assert "epoch 0, crop 1" in html
    assert "epoch 0, crop 2" in html


@pytest.mark.parametrize("mix", [T.MixUp(), T.CutMix(), T.RandomChoice([T.MixUp(), T.CutMix()])])
def test_mixtures_of_several_crops_are_an_error(pictures: Path, mix: Any) -> None:
    with pytest.raises(UsageError, match=r"crops=3: MixUp and CutMix .* leave crops= out"):
        _open(pictures, T.Compose([*_steps(), mix]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"crops": 0}, "from 1 to 256"),
        ({"crops": 2, "train": False}, "train=False"),
        ({"crops": 2, "image_size": None}, "not cropped"),
        ({"crops": 2, "transform": T.RandomResizedCrop(8)}, "give transform=RandomResizedCrop"),
        ({"crops": 2, "window": 2}, "patches_per_volume"),
    ],
)
def test_crops_that_cannot_be_are_an_error(
    pictures: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        dlio.open(str(pictures), tiers="none", **options)
