"""Each transform's parameters have the distributions of torchvision's formulas."""

import math
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dlio.errors import UsageError
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.random_source import KeyedRandom, RandomSource, drawing
from dlio.plan.order import keyed_uniforms
from tests.image.distributions import SOURCES, chi_square, ks, ks_of_two

N = 6000
FEW = 3000
"""Numbers drawn of torch's formulas, which take their time."""
POLICY = [
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color"),
    *("Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
]
SIGNED = POLICY[1:10]


@pytest.fixture(params=SOURCES)
def draws(request: pytest.FixtureRequest) -> Callable[[int], RandomSource]:
    """A source of random numbers for each sample."""
    torch.manual_seed(4)
    return SOURCES[request.param]


def test_a_samples_numbers_are_those_of_the_formula() -> None:
    for sample in (0, 7, 2**39):
        own = KeyedRandom(5, 3, sample, 64)
        row = keyed_uniforms(5, 3, np.array([sample], np.int64), 4, stream=64)[0]
        assert [own.uniform() for _ in range(4)] == row.tolist()


def test_color_jitters_factors_and_order(draws: Callable[[int], RandomSource]) -> None:
    jitter = T.ColorJitter(0.4, 1.5, (0.2, 0.7), 0.1)
    drawn = [jitter.draw(draws(sample), 8, 8) for sample in range(N)]
    limits = {
        "brightness": (0.6, 1.4),
        "contrast": (0.0, 2.5),
        "saturation": (0.2, 0.7),
        "hue": (-0.1, 0.1),
    }
    for name, (low, high) in limits.items():
        ks(
            [change.value for changes in drawn for change in changes if change.name == name],
            low,
            high,
        )
    orders = Counter(tuple(change.name for change in changes) for changes in drawn)
    chi_square([orders[order] for order in permutations(limits)])
    assert T.ColorJitter().draw(draws(0), 8, 8) == []
    assert [c.name for c in T.ColorJitter(contrast=0.2).draw(draws(0), 8, 8)] == ["contrast"]


def test_blurs_widths(draws: Callable[[int], RandomSource]) -> None:
    blur = T.GaussianBlur(5, (0.3, 1.7))
    ks([blur.draw(draws(sample), 8, 8)[0].value for sample in range(N)], 0.3, 1.7)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: T.RandomGrayscale(p),
        lambda p: T.RandomInvert(p),
        lambda p: T.RandomPosterize(4, p),
        lambda p: T.RandomSolarize(128, p),
        lambda p: T.RandomAutocontrast(p),
        lambda p: T.RandomEqualize(p),
        lambda p: T.RandomAdjustSharpness(2, p),
        lambda p: T.RandomHorizontalFlip(p),
        lambda p: T.RandomVerticalFlip(p),
        lambda p: T.RandomApply([T.ColorJitter(0.3)], p),
    ],
)
def test_changes_by_chance(make: Any, draws: Callable[[int], RandomSource]) -> None:
    transform = make(0.3)
    made = sum(bool(transform.draw(draws(sample), 8, 8)) for sample in range(N))
    chi_square([made, N - made], [0.3, 0.7])


def test_one_of_several_by_weight(draws: Callable[[int], RandomSource]) -> None:
    choice = T.RandomChoice([T.RandomInvert(1), T.RandomEqualize(1), T.RandomGrayscale(1)])
    drawn = Counter(choice.draw(draws(sample), 8, 8)[0].name for sample in range(N))
    chi_square(list(drawn.values()))
    choice = T.RandomChoice(choice.transforms, p=[1, 0, 3])
    drawn = Counter(choice.draw(draws(sample), 8, 8)[0].name for sample in range(N))
    chi_square([drawn["RandomInvert"], drawn["RandomGrayscale"]], [0.25, 0.75])
    assert len(drawn) == 2


def test_trivial_augments_operations_and_magnitudes(draws: Callable[[int], RandomSource]) -> None:
    policy = T.TrivialAugmentWide()
    drawn = [policy.draw(draws(sample), 100, 80)[0] for sample in range(4 * N)]
    chi_square([sum(change.name == name for change in drawn) for name in POLICY])
    tops = dict.fromkeys(SIGNED, 0.99) | {"TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}
    for name in SIGNED:
        values = np.array([change.value for change in drawn if change.name == name])
        wanted = torch.linspace(0, tops[name], 31).numpy()
        levels = np.abs(np.abs(values)[:, None] - wanted).argmin(1)
        assert np.allclose(np.abs(values), wanted[levels], rtol=1e-6)
        chi_square(np.bincount(levels, minlength=31).tolist())
        nonzero = values[levels > 0]
        chi_square([int((nonzero > 0).sum()), int((nonzero < 0).sum())])
    solarized = [change.value for change in drawn if change.name == "Solarize"]
    chi_square([solarized.count(float(v)) for v in torch.linspace(255, 0, 31)])
    bits = Counter(change.value for change in drawn if change.name == "Posterize")
    steps = (8 - (torch.arange(31) / ((31 - 1) / 6)).round().int()).tolist()
    chances = [steps.count(value) / 31 for value in sorted(set(steps))]
    chi_square([bits[value] for value in sorted(set(steps))], chances)


def test_rand_augments_operations_and_strength(draws: Callable[[int], RandomSource]) -> None:
    height, width, level = 100, 80, 9
    policy = T.RandAugment(num_ops=3, magnitude=level)
    drawn = [policy.draw(draws(sample), height, width) for sample in range(N)]
    for k in range(3):
        chi_square([sum(changes[k].name == name for changes in drawn) for name in POLICY])
    # Operations of one image do not depend on each other.
    pairs = Counter((changes[0].name, changes[1].name) for changes in drawn)
    chi_square([pairs[a, b] for a in POLICY for b in POLICY])
    tops = dict.fromkeys(SIGNED, 0.9) | {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0}
    tops |= {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height}
    changes = [change for each in drawn for change in each]
    for name in SIGNED:
        values = [change.value for change in changes if change.name == name]
        size = float(torch.linspace(0, tops[name], 31)[level])
        assert np.allclose(np.abs(values), size, rtol=1e-6)
        chi_square([sum(value > 0 for value in values), sum(value < 0 for value in values)])
    wanted = {
        "Posterize": float((8 - (torch.arange(31) / ((31 - 1) / 4)).round().int())[level]),
        "Solarize": float(torch.linspace(255, 0, 31)[level]),
        "Equalize": 0.0,
    }
    for name, size in wanted.items():
        assert {change.value for change in changes if change.name == name} == {size}


def _their_box(height: int, width: int, scale: Any, ratio: Any) -> tuple[int, ...] | None:
    """torchvision's RandomErasing.get_params, by its formulas."""
    for _ in range(10):
        area = height * width * torch.empty(1).uniform_(*scale).item()
        log_ratio = torch.log(torch.tensor(ratio))
        aspect = torch.exp(torch.empty(1).uniform_(float(log_ratio[0]), float(log_ratio[1]))).item()
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if not (h < height and w < width):
            continue
        top = int(torch.randint(0, height - h + 1, size=(1,)).item())
        return top, int(torch.randint(0, width - w + 1, size=(1,)).item()), h, w
    return None


@pytest.mark.parametrize(
    ("shape", "scale", "ratio"),
    [((60, 90), (0.02, 0.33), (0.3, 3.3)), ((20, 60), (0.3, 0.9), (0.5, 2.0))],
)
def test_erased_boxes(
    draws: Callable[[int], RandomSource], shape: tuple[int, int], scale: Any, ratio: Any
) -> None:
    erasing = T.RandomErasing(1.0, scale, ratio)
    ours = [erasing.draw(draws(sample), *shape) for sample in range(FEW)]
    torch.manual_seed(9)
    theirs = [_their_box(*shape, scale, ratio) for _ in range(FEW)]
    misses = [sum(box is None for box in boxes) for boxes in (ours, theirs)]
    assert abs(misses[0] - misses[1]) <= 4 * math.sqrt(FEW / 2)
    boxes = [np.array([box for box in each if box is not None]) for each in (ours, theirs)]
    for column in range(4):
        ks_of_two(boxes[0][:, column], boxes[1][:, column])
    areas, ratios = (
        [each[:, 2] * each[:, 3] for each in boxes],
        [each[:, 2] / each[:, 3] for each in boxes],
    )
    ks_of_two(*areas)
    ks_of_two(*ratios)
    rare = T.RandomErasing(0.25)
    erased = sum(rare.draw(draws(sample), 50, 50) is not None for sample in range(FEW))
    chi_square([erased, FEW - erased], [0.25, 0.75])


def test_erasing_overwrites_the_box_alone() -> None:
    image = torch.rand(3, 30, 40)
    for value, wanted in ((0, torch.zeros(3)), ([1, 2, 3], torch.tensor([1.0, 2, 3]))):
        torch.manual_seed(1)
        box = T.RandomErasing(1.0).draw(SOURCES["torch"](0), 30, 40)
        torch.manual_seed(1)
        made = T.RandomErasing(1.0, value=value)(image)
        assert box is not None
        top, left, height, width = box
        part = made[:, top : top + height, left : left + width]
        assert torch.equal(part, wanted[:, None, None].expand_as(part))
        assert int((made != image).sum()) == part.numel()
    noise = T.RandomErasing(1.0, (0.9, 0.95), (0.9, 1.1), "random")(torch.zeros(3, 300, 300))
    drawn = noise[noise != 0]
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert float(image.min()) >= 0
    same = T.RandomErasing(1.0, inplace=True)(image)
    assert same is image


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_of_mixup_are_betas(draws: Callable[[int], RandomSource], alpha: float) -> None:
    mixup = T.MixUp(alpha=alpha, num_classes=2)
    ours = [mixup.draw(draws(sample), 8, 8).part for sample in range(N)]
    theirs = torch.distributions.Beta(torch.tensor(alpha), torch.tensor(alpha)).sample((N,))
    ks_of_two(ours, theirs.numpy())


def _their_cut(alpha: float, height: int, width: int) -> tuple[float, ...]:
    """torchvision's CutMix, by its formulas: (x1, y1, x2, y2, share)."""
    part = float(torch.distributions.Beta(torch.tensor([alpha]), torch.tensor([alpha])).sample(()))
    x, y = torch.randint(width, size=(1,)), torch.randint(height, size=(1,))
    reach = 0.5 * math.sqrt(1.0 - part)
    across, down = int(reach * width), int(reach * height)
    x1, y1 = int(torch.clamp(x - across, min=0)), int(torch.clamp(y - down, min=0))
    x2, y2 = int(torch.clamp(x + across, max=width)), int(torch.clamp(y + down, max=height))
    return x1, y1, x2, y2, 1.0 - (x2 - x1) * (y2 - y1) / (width * height)


def test_cutmixs_boxes(draws: Callable[[int], RandomSource]) -> None:
    cutmix = T.CutMix(alpha=0.7, num_classes=2)
    drawn = [cutmix.draw(draws(sample), 60, 90) for sample in range(FEW)]
    ours = np.array([(*(each.box or ()), each.part) for each in drawn])
    torch.manual_seed(10)
    theirs = np.array([_their_cut(0.7, 60, 90) for _ in range(FEW)])
    for column in range(5):
        ks_of_two(ours[:, column], theirs[:, column])


def test_mixtures_of_a_batch_are_torchvisions() -> None:
    images, labels = torch.rand(5, 3, 12, 16), torch.tensor([0, 3, 1, 1, 2])
    one_hot = torch.nn.functional.one_hot(labels, 4).float()
    torch.manual_seed(2)
    mixed, probabilities = T.MixUp(alpha=0.4, num_classes=4)(images, labels)
    torch.manual_seed(2)
    part = float(torch.distributions.Beta(torch.tensor([0.4]), torch.tensor([0.4])).sample(()))
    assert torch.allclose(mixed, images.roll(1, 0).mul(1 - part).add(images.mul(part)), atol=1e-6)
    wanted = one_hot.roll(1, 0).mul(1 - part).add(one_hot.mul(part))
    assert torch.allclose(probabilities, wanted, atol=1e-6)
    torch.manual_seed(3)
    mixed, probabilities = T.CutMix(num_classes=4)([images, labels])
    torch.manual_seed(3)
    x1, y1, x2, y2, part = _their_cut(1.0, 12, 16)
    by_hand = images.clone()
    by_hand[..., int(y1) : int(y2), int(x1) : int(x2)] = images.roll(1, 0)[
        ..., int(y1) : int(y2), int(x1) : int(x2)
    ]
    assert torch.equal(mixed, by_hand)
    wanted = one_hot.roll(1, 0).mul(1 - part).add(one_hot.mul(part))
    assert torch.allclose(probabilities, wanted, atol=1e-6)
    assert torch.allclose(probabilities.sum(1), torch.ones(5))
    # Probabilities can be mixed again, as by a loop that does both.
    again = T.MixUp()(mixed, probabilities)[1]
    assert torch.allclose(again.sum(1), torch.ones(5))


def test_one_mixture_of_several() -> None:
    torch.manual_seed(5)
    either = T.RandomChoice([T.MixUp(num_classes=3), T.CutMix(num_classes=3)])
    images = torch.eye(2).view(2, 1, 1, 2).expand(2, 1, 2, 2).contiguous()
    made = [either(images, torch.tensor([0, 1]))[0] for _ in range(40)]
    cut = sum(bool(((each == 0) | (each == 1)).all()) for each in made)
    assert 8 < cut < 32


ANY: Any = T
"""The transforms without types, to be called wrongly."""
ALL = [
    T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    T.RandAugment(fill=7),
    T.TrivialAugmentWide(interpolation="bilinear", fill=[1, 2, 3]),
    T.GaussianBlur(5),
    T.RandomGrayscale(1),
    T.RandomInvert(1),
    T.RandomPosterize(3, 1),
    T.RandomSolarize(128, 1),
    T.RandomAutocontrast(1),
    T.RandomEqualize(1),
    T.RandomAdjustSharpness(2, 1),
    T.RandomHorizontalFlip(1),
    T.RandomVerticalFlip(1),
    T.RandomApply([T.ColorJitter(0.3)], 1),
    T.RandomChoice([T.RandomInvert(1), T.RandomEqualize(1)]),
]


@pytest.mark.parametrize("transform", ALL, ids=lambda each: type(each).__name__)
def test_every_kind_of_picture_is_taken_and_every_transform_sent(transform: Any) -> None:
    tensor = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (3, 20, 31), np.uint8))
    picture = Image.fromarray(tensor.permute(1, 2, 0).contiguous().numpy())
    copy = pickle.loads(pickle.dumps(transform))
    assert repr(copy) == repr(transform)
    with drawing(lambda: KeyedRandom(1, 0, 5, 64)):
        wanted = transform(tensor)
    for given in (picture, tensor[None], tensor.float() / 255, tensor.expand(2, 3, 20, 31)):
        with drawing(lambda: KeyedRandom(1, 0, 5, 64)):
            made = copy(given)
        if isinstance(made, Image.Image):
            made = torch.from_numpy(np.array(made)).permute(2, 0, 1)
        if made.dtype == torch.float32:
            made = made.mul(255).round().to(torch.uint8)
        assert all(torch.equal(each, wanted) for each in made.reshape(-1, 3, 20, 31))
    assert transform(tensor[:1]).shape == (1, 20, 31)
    gray = transform(picture.convert("L"))
    assert (gray.mode, gray.size) == ("L", picture.size)


def test_conversions_are_torchvisions() -> None:
    picture = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    for same in (T.PILToTensor(), T.ToImage(), T.ToPureTensor(), T.ToDtype(torch.uint8)):
        assert torch.equal(same(picture), pixels)
        assert torch.equal(same(pixels), pixels)
    for scaled in (T.ToTensor(), T.ConvertImageDtype(), T.ToDtype(torch.float32, scale=True)):
        assert torch.equal(scaled(picture), pixels.float() / 255)
    assert torch.equal(T.ToDtype(torch.float32)(picture), pixels.float())
    back = T.ConvertImageDtype(torch.uint8)(T.ToTensor()(picture))
    assert torch.equal(back, pixels)
    assert int(T.ConvertImageDtype(torch.int16)(pixels).max()) == 59 * 128
    assert (
        int(T.ConvertImageDtype(torch.uint8)(T.ConvertImageDtype(torch.int16)(pixels)).max()) == 59
    )
    wanted = (pixels.float() / 255 - 0.5) / 0.25
    assert torch.allclose(T.Normalize([0.5], [0.25])(T.ToTensor()(picture)), wanted)
    batch = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (2, 6, 7, 3), np.uint8))
    last = batch.permute(0, 3, 1, 2)  # As a loader makes batches, channels last.
    for each in (last, last.float() / 255):
        normal = T.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.25])
        assert torch.equal(normal(each), normal(each.contiguous()))
        assert normal(each).stride() == each.stride()
    floats = T.ToTensor()(picture)
    T.Normalize([0.5], [0.25])(floats)
    assert torch.equal(floats, T.ToTensor()(picture))


@pytest.mark.parametrize(
    "make",
    [
        lambda: T.ColorJitter(brightness=-1),
        lambda: T.ColorJitter(contrast=(0.5, 0.1)),
        lambda: T.ColorJitter(saturation=(-0.5, 0.1)),
        lambda: T.ColorJitter(hue=0.6),
        lambda: T.ColorJitter(hue=(-0.1, 0.7)),
        lambda: ANY.ColorJitter(hue="red"),
        lambda: T.GaussianBlur(4),
        lambda: T.GaussianBlur(0),
        lambda: T.GaussianBlur((3, 5, 7)),
        lambda: T.GaussianBlur(3, 0),
        lambda: T.GaussianBlur(3, (2, 1)),
        lambda: T.RandomGrayscale(1.5),
        lambda: T.RandomPosterize(9),
        lambda: T.RandomSolarize(-1),
        lambda: T.RandomAdjustSharpness(-1),
        lambda: T.RandAugment(magnitude=31),
        lambda: T.RandAugment(num_ops=-1),
        lambda: T.RandAugment(interpolation="bicubic"),
        lambda: T.TrivialAugmentWide(1),
        lambda: T.TrivialAugmentWide(fill=[1, 2]),
        lambda: T.RandomErasing(p=-0.1),
        lambda: T.RandomErasing(scale=(0.1, 1.5)),
        lambda: ANY.RandomErasing(scale=0.3),
        lambda: T.RandomErasing(ratio=(0, 2)),
        lambda: ANY.RandomErasing(value="noise"),
        lambda: T.RandomErasing(1.0, value=[1, 2])(torch.zeros(3, 50, 50)),
        lambda: ANY.RandomErasing()(Image.new("RGB", (4, 4))),
        lambda: ANY.Normalize([0.5], [0.5])(Image.new("RGB", (4, 4))),
        lambda: T.Normalize([], []),
        lambda: ANY.ToDtype("float"),
        lambda: T.MixUp(alpha=0),
        lambda: T.CutMix(num_classes=0),
        lambda: T.MixUp()(torch.rand(2, 3, 4, 4), torch.tensor([0, 1])),
        lambda: T.MixUp(num_classes=2)(torch.rand(2, 3, 4, 4), torch.tensor([0, 5])),
        lambda: T.MixUp(num_classes=2)(torch.rand(3, 4, 4), torch.tensor([0, 1, 1])),
        lambda: T.MixUp(num_classes=2)(torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0, 1])),
        lambda: T.CutMix(num_classes=2)(torch.rand(2, 3, 4, 4)),
        lambda: ANY.RandomApply([3]),
        lambda: T.RandomApply([], p=2),
        lambda: T.RandomChoice([]),
        lambda: T.RandomChoice([str], p=[1, 2]),
        lambda: T.RandomInvert(1)(torch.zeros(3, 4, 4) - 1),
        lambda: T.RandomInvert(1)(torch.zeros(2, 4, 4).byte()),
        lambda: T.RandomInvert(1)(torch.zeros(4).byte()),
        lambda: T.RandomInvert(1)({"image": torch.zeros(3, 4, 4)}),
        lambda: T.RandomInvert(1)(Image.new("RGBA", (4, 4))),
    ],
)
def test_wrong_parameters_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()
