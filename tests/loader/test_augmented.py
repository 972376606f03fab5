"""A loader's augmented batches follow from (seed, epoch, sample) alone."""

import json
import pickle
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.errors import SourceError, UsageError
from dlio.image.random_source import KeyedRandom, stream_of
from tests.loader.augmented_checks import MEAN, STD, digests, recipe, report, users_own

BODY = str(Path(__file__).with_name("augmented_checks.py"))


def _open(pictures: Path, transform: Any, **options: Any) -> dlio.Dataset:
    return dlio.open(str(pictures), tiers="none", transform=transform, seed=3, **options)


def _loader(data: dlio.Dataset, batch: int = 4, **options: Any) -> Any:
    return dlio.DataLoader(data, batch, True, **options)


@pytest.mark.parametrize("make", [recipe, lambda: T.Compose([T.RandomResizedCrop(32), users_own])])
def test_threads_do_not_matter_and_epochs_do(pictures: Path, make: Any) -> None:
    seen = []
    for threads in (1, 4):
        with _open(pictures, make()) as data, _loader(data, num_workers=threads) as loader:
            seen.append(digests(loader))
    assert seen[0] == seen[1]
    first, second = seen[0]
    assert len(first) == len(second) == 12
    assert all(first[sample] != second[sample] for sample in first)
    with dlio.open(str(pictures), tiers="none", transform=make(), seed=4) as data:
        other = digests(_loader(data), 1)[0]
    assert not set(other.values()) & set(first.values())


@pytest.mark.parametrize("make", [recipe, lambda: T.Compose([T.RandomResizedCrop(32), users_own])])
def test_a_resumed_epoch_has_the_same_pixels(pictures: Path, make: Any) -> None:
    with _open(pictures, make()) as data, _loader(data) as loader:
        whole = list(loader)
    with _open(pictures, make()) as data, _loader(data) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with _open(pictures, make()) as data, _loader(data) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert len(rest) == 2
    for made, wanted in zip(rest, whole[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.daily("2")
def test_ranks_do_not_matter(
    pictures: Path, ranks: int, mpirun: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = mpirun(ranks, "-W", "error", BODY, str(pictures), "4")
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == ranks
    for name, epochs in report(str(pictures), 4).items():
        for epoch, alone in enumerate(epochs):
            merged: dict[str, str] = {}
            for each in reports:
                assert not merged.keys() & each[name][epoch].keys()
                merged |= each[name][epoch]
            assert len(merged) == 12
            assert merged == {str(sample): digest for sample, digest in alone.items()}


def test_pixels_are_those_of_each_transform_with_the_samples_numbers(pictures: Path) -> None:
    steps = [T.TrivialAugmentWide(), T.ColorJitter(0.4, 0.4, 0.4), T.RandomGrayscale(0.5)]
    plain = T.Compose([T.RandomResizedCrop(32)])
    with (
        _open(pictures, plain) as crops,
        _open(pictures, T.Compose([T.RandomResizedCrop(32), *steps])) as data,
        _loader(data) as loader,
    ):
        for epoch in range(2):
            loader.set_epoch(epoch)
            crops.set_epoch(epoch)
            for images, _ in loader:
                assert images.dtype == torch.uint8
                for sample, image in zip(loader.last_samples.tolist(), images, strict=True):
                    pixels = crops[sample][0].permute(1, 2, 0).contiguous().numpy()
                    for number, step in enumerate(steps, 1):
                        draws = KeyedRandom(3, epoch, sample, stream_of(number))
                        pixels = step.apply(pixels, draws)
                    assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)
        data.set_epoch(0)
        crops.set_epoch(0)


def test_items_are_those_of_batches(pictures: Path) -> None:
    steps = recipe().transforms[:-1]
    with _open(pictures, T.Compose(steps)) as data, _loader(data) as loader:
        for images, labels in loader:
            for sample, image, label in zip(loader.last_samples, images, labels, strict=True):
                own, number = data[int(sample)]
                assert number == label
                assert torch.allclose(own, image, atol=1e-6)


def test_erasing_is_done_for_the_batch_behind_normalize(pictures: Path) -> None:
    steps: list[Any] = [T.RandomResizedCrop(32), T.Normalize(MEAN, STD)]
    erasing = T.RandomErasing(0.6, value=9)
    with (
        _open(pictures, T.Compose(steps)) as plain,
        _open(pictures, T.Compose([*steps, erasing])) as data,
        _loader(data, 12) as loader,
    ):
        images, _ = next(iter(loader))
        boxes = []
        for sample, image in zip(loader.last_samples.tolist(), images, strict=True):
            wanted = plain[sample][0].clone()
            box = erasing.draw(KeyedRandom(3, 0, sample, stream_of(2)), 32, 32)
            if box is not None:
                top, left, height, width = box
                wanted[:, top : top + height, left : left + width] = 9
            boxes.append(box)
            assert torch.allclose(image, wanted, atol=1e-6)
        assert 0 < sum(box is None for box in boxes) < 12
        assert data.recipe.transform is None


@pytest.mark.parametrize("partners", ["step", "rank"])
def test_each_sample_is_mixed_with_the_one_before_it(pictures: Path, partners: Any) -> None:
    steps: list[Any] = [T.RandomResizedCrop(32), T.Normalize(MEAN, STD)]
    mixup = T.MixUp(alpha=0.5, partners=partners)
    with (
        _open(pictures, T.Compose(steps)) as plain,
        _open(pictures, T.Compose([*steps, mixup])) as data,
        _loader(data, 5) as loader,
    ):
        for images, labels in loader:
            samples = loader.last_samples.tolist()
            assert labels.shape == (len(samples), 3)
            for k, sample in enumerate(samples):
                part = mixup.draw(KeyedRandom(3, 0, sample, stream_of(2)), 32, 32).part
                (image, label), (other, second) = plain[sample], plain[samples[k - 1]]
                assert torch.allclose(images[k], image * part + other * (1 - part), atol=1e-5)
                wanted = torch.zeros(3)
                wanted[label] += part
                wanted[second] += 1 - part
                assert torch.allclose(labels[k], wanted, atol=1e-6)
        image, label = data[4]
        assert torch.equal(image, plain[4][0])  # A single sample is not mixed.
        assert isinstance(label, int)


def test_a_users_collate_gets_mixed_samples(pictures: Path) -> None:
    with (
        _open(pictures, recipe()) as data,
        _loader(data) as loader,
        _loader(data, collate_fn=list) as listed,
    ):
        loader.set_epoch(1)
        listed.set_epoch(1)
        for (images, labels), batch in zip(loader, listed, strict=True):
            assert len(batch) == len(images)
            for (image, label), wanted, probabilities in zip(batch, images, labels, strict=True):
                assert torch.allclose(image, wanted, atol=1e-6)
                assert torch.equal(label, probabilities)


def test_samples_that_cannot_be_decoded_are_mixed_with_nobody(
    pictures: Path, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    files = sorted(pictures.rglob("*.*"))[:6]
    for number, file in enumerate(files):
        content = file.read_bytes()
        target = tmp_path / "ab"[number % 2] / f"{number}{file.suffix}"
        target.write_bytes(content[: len(content) // 3] if number == 2 else content)
    steps: list[Any] = [T.RandomResizedCrop(32), T.ToTensor(), T.MixUp()]
    with (
        _open(tmp_path, T.Compose(steps), on_error="skip") as data,
        dlio.DataLoader(data, 6) as loader,
        _open(tmp_path, T.Compose(steps[:2]), on_error="skip") as plain,
    ):
        images, labels = next(iter(loader))
        samples = loader.last_samples.tolist()
        assert labels.shape == (5, 2)
        (missing,) = set(range(6)) - set(samples)
        behind = (missing + 1) % 6
        row = samples.index(behind)
        assert torch.allclose(images[row], plain[behind][0], atol=1e-6)
        assert sorted(labels[row].tolist()) == [0, 1]
        assert len(loader.stats()["skipped"]) == 1
    with _open(tmp_path, T.Compose(steps)) as data, pytest.raises(SourceError):
        list(dlio.DataLoader(data, 6))


def test_mixtures_want_batches_that_dlio_makes(pictures: Path) -> None:
    with _open(pictures, recipe()) as data:
        for options in ({"workers": "process", "num_workers": 1}, {"batch_size": None}):
            chosen: dict[str, Any] = {"batch_size": 4, **options}
            with (
                pytest.raises(UsageError, match="MixUp"),
                dlio.DataLoader(data, **chosen) as loader,
            ):
                next(iter(loader))
        sampler = torch.utils.data.SequentialSampler(range(12))
        with dlio.DataLoader(data, 6, sampler=sampler) as loader:
            assert next(iter(loader))[1].shape == (6, 3)
    with pytest.raises(UsageError, match="last"):
        _open(pictures, T.Compose([T.RandomResizedCrop(32), T.MixUp(), str]))
    with pytest.raises(UsageError, match="begin with"):
        _open(pictures, T.Compose([T.Resize(32), T.MixUp()]))


def test_photos_without_classes_are_augmented_and_not_mixed(pictures: Path, tmp_path: Path) -> None:
    for number, file in enumerate(sorted(pictures.rglob("*.*"))):
        (tmp_path / f"{number}{file.suffix}").write_bytes(file.read_bytes())
    steps = recipe().transforms[:-1]
    with _open(tmp_path, T.Compose(steps)) as data, _loader(data) as loader:
        for batch in loader:
            (images,) = batch.values()
            for sample, image in zip(loader.last_samples.tolist(), images, strict=True):
                (own,) = data[sample].values()
                assert torch.allclose(own, image, atol=1e-6)
    with pytest.raises(UsageError, match="numbers of classes"):
        _open(tmp_path, recipe())
    whole = T.Compose([T.ColorJitter(0.3), T.Resize((16, 20))])
    with _open(tmp_path, whole) as data, _loader(data) as loader:
        (images,) = next(iter(loader)).values()
        assert images.shape == (4, 3, 16, 20)


def test_batches_are_mixed_on_the_device_where_they_lie(pictures: Path) -> None:
    with _open(pictures, recipe()) as data, _loader(data, 5, device="meta") as loader:
        shapes = []
        for images, labels in loader:
            assert images.device.type == labels.device.type == "meta"
            shapes.append((tuple(images.shape), tuple(labels.shape)))
        assert shapes == [((n, 3, 32, 32), (n, 3)) for n in (5, 5, 2)]


def test_mixtures_of_any_loader_by_its_collate_fn() -> None:
    samples = [(torch.rand(3, 4, 4), k % 3) for k in range(8)]
    mix = T.RandomChoice([T.MixUp(num_classes=3), T.CutMix(num_classes=3)])

    def collate(batch: list[Any]) -> Any:
        return mix(*torch.utils.data.default_collate(batch))

    loader: Any = dlio.DataLoader(samples, 4, collate_fn=collate)
    for images, labels in loader:
        assert (images.shape, labels.shape) == ((4, 3, 4, 4), (4, 3))


class _Everything:
    """Draws from every generator that users reach for."""

    def __init__(self) -> None:
        self.own = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(50)
        drawn = [
            torch.rand(1),
            torch.randn(1),
            torch.randint(0, 1000, (1,)).float(),
            torch.randperm(50)[:1].float(),
            torch.empty(1).uniform_(0, 1),
            torch.rand_like(weights)[:1],
            torch.multinomial(weights, 1).float(),
            torch.distributions.Beta(torch.tensor(1.0), torch.tensor(1.0)).sample((1,)),
            torch.rand(1, generator=self.torch),
            torch.tensor([random.random()]),
            torch.tensor([np.random.rand()]),  # noqa: NPY002 - as users do
            torch.tensor([self.own.random()]),
            torch.tensor([self.numpy.random()]),
            torch.tensor([float(T.RandomErasing(1.0)(image.float()).sum())]),
        ]
        return torch.cat([each.double() for each in drawn])


def test_every_generator_of_a_users_transform_is_the_samples(pictures: Path) -> None:
    seen = []
    for threads in (1, 4):
        random.seed(threads)
        np.random.seed(threads)  # noqa: NPY002
        torch.manual_seed(threads)
        transform = T.Compose([T.RandomResizedCrop(32), _Everything()])
        with _open(pictures, transform) as data, _loader(data, num_workers=threads) as loader:
            before = random.getstate(), torch.get_rng_state()
            made: dict[int, torch.Tensor] = {}
            for epoch in range(2):
                loader.set_epoch(epoch)
                for drawn, _ in loader:
                    made |= dict(
                        zip((loader.last_samples + 12 * epoch).tolist(), drawn, strict=True)
                    )
            assert random.getstate() == before[0]
            assert torch.equal(torch.get_rng_state(), before[1])
            data.set_epoch(1)
            assert torch.equal(data[3][0], made[15])
        seen.append(torch.stack([made[k] for k in sorted(made)]))
    assert torch.equal(seen[0], seen[1])
    for column in seen[0].T:  # Other numbers for other samples and epochs.
        assert len(column.unique()) > 12


def test_functions_of_map_draw_the_samples_numbers(pictures: Path) -> None:
    seen = []
    for threads in (1, 4):
        with (
            _open(pictures, None, image_size=32).map(lambda pair: torch.rand(1)) as data,
            _loader(data, num_workers=threads) as loader,
        ):
            drawn = [torch.cat(list(loader)) for _ in range(2)]
        assert not torch.equal(*drawn)
        seen.append(torch.cat(drawn))
    assert torch.equal(*seen)


def test_random_transforms_are_not_kept(pictures: Path) -> None:
    data = _open(pictures, users_own, train=False)
    with data, pytest.raises(UsageError, match="random"):
        data.map(lambda pair: pair[0], kept=True)


def test_whole_images_go_through_pipelines_that_begin_otherwise(pictures: Path) -> None:
    transform = T.Compose([T.ColorJitter(0.3), T.Resize(20), T.CenterCrop(16), T.ToTensor()])
    with _open(pictures, transform) as data, _loader(data) as loader:
        images, labels = next(iter(loader))
        assert images.shape == (4, 3, 16, 16)
        assert images.dtype == torch.float32
        image, label = data[int(loader.last_samples[1])]
        assert torch.equal(image, images[1])
        assert label == labels[1]
        copy = pickle.loads(pickle.dumps(data))
        assert torch.equal(copy[int(loader.last_samples[1])][0], image)
        copy.close()
