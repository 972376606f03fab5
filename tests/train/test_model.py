"""The models that --model names."""

import re

import pytest
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.model import MODELS, make_model

SIDES = {"lenet": 32, "alexnet": 63, "resnet50": 32, "googlenet": 32, "vit": 32}
SIDES |= {"mlp": 32, "autoencoder": 32, "convnet": 32}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet", "unet")])
def test_every_weight_of_a_network_of_the_field_learns(name: str) -> None:
    side = SIDES[name]
    model = make_model(name, 7, side)
    logits = model(torch.rand(2, 3, side, side))
    assert logits.shape == (2, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 6])).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "side", "says"),
    [
        ("lenet", 64, "--image-size 32"),
        ("alexnet", 48, "63 or more"),
        ("vit", 40, "multiple of 16"),
        ("vit(width=32)", 64, "multiple of its 3 heads"),
    ],
)
def test_a_network_that_does_not_take_an_image_says_which_it_takes(
    name: str, side: int, says: str
) -> None:
    with pytest.raises(UsageError, match=rf"--model {re.escape(name)}: .*{says}"):
        make_model(name, 7, side)


@pytest.mark.parametrize("image_size", [64, 96, 224])
def test_a_model_is_small_and_every_weight_learns(image_size: int) -> None:
    model = make_model("resnet", 7, image_size).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.rand(2, 3, image_size, image_size).to(memory_format=torch.channels_last)
    logits = model(images)
    assert logits.shape == (2, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 6])).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6


def test_a_model_overfits_one_batch() -> None:
    torch.manual_seed(0)
    model = make_model("resnet", 4, 32)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss.detach()) < 0.1


def test_a_new_residual_block_equals_its_shortcut() -> None:
    model = make_model("resnet", 2, 64)
    for block in model.get_submodule("stages").children():
        assert not block.get_parameter("norm2.weight").any()


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="resnet"):
        make_model("vgg", 2, 64)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("name", ["unet(width=2)", "convnet(width=2)"])
def test_networks_of_arrays_take_sides_of_any_size(name: str, dimensions: int) -> None:
    model = make_model(name, 5, 0, {"channels": 2, "dimensions": dimensions}).eval()
    sides = (9, 14, 11)[:dimensions]
    outputs = model(torch.rand(2, 2, *sides))
    assert outputs.shape == ((2, 5, *sides) if name.startswith("unet") else (2, 5))
    with pytest.raises(UsageError, match="dimensions=4: give 1 to 3"):
        make_model(name, 5, 0, {"channels": 2, "dimensions": 4})
