"""Models by name, and the images that they take."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, cast

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.factory import call_with, check_options, load_factory, split_options
from dlio.train.networks.autoencoder import autoencoder
from dlio.train.networks.classic_networks import alexnet, googlenet, lenet
from dlio.train.networks.convnet import ConvNet, UNet
from dlio.train.networks.mlp import Mlp
from dlio.train.networks.resnet import SmallResNet, resnet50
from dlio.train.networks.transformer import HEADS, VisionTransformer
from dlio.train.train_options import MODEL_NAMES
from dlio.util.arguments import unknown_word

PIXEL_MEAN: Final = (0.485, 0.456, 0.406)
PIXEL_STD: Final = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, per channel, as torchvision uses them."""


def normalised(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Convert images to a model's input on the device: uint8 (n, 3, h, w), or float32 of the same
    range, which is changed.

    Returns float32 (n, 3, h, w) with mean 0 and standard deviation 1 over ImageNet's pixels.
    """
    mean, std = _pixels(device)
    return images.to(device, non_blocking=True).float().sub_(mean).div_(std)


@cache
def _pixels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (
        torch.tensor(each, device=device).view(1, 3, 1, 1) * 255 for each in (PIXEL_MEAN, PIXEL_STD)
    )
    return mean, std


def _lenet(classes: int, image_size: int) -> nn.Module:
    _check_side("lenet", image_size, 32, 32)
    return lenet(classes, 3)


def _alexnet(classes: int, image_size: int) -> nn.Module:
    _check_side("alexnet", image_size, 63)
    return alexnet(classes)


def _vit(classes: int, image_size: int, width: int = 192, depth: int = 12) -> nn.Module:
    if image_size % 16:
        raise UsageError(f"--model vit: give --image-size as a multiple of 16, not {image_size}")
    if width % HEADS:
        raise UsageError(f"--model vit(width={width}): give a multiple of its {HEADS} heads")
    return VisionTransformer(image_size, classes, width=width, depth=depth)


def _check_side(name: str, side: int, least: int, most: int | None = None) -> None:
    if side < least or (most is not None and side > most):
        wanted = f"{least} or more" if most is None else str(most)
        raise UsageError(f"--model {name}: give --image-size {wanted}, not {side}")


MODELS: Final[dict[str, Callable[..., nn.Module]]] = dict(
    zip(
        MODEL_NAMES,
        (
            *(SmallResNet, resnet50, googlenet, _alexnet, _lenet, _vit),
            *(Mlp, autoencoder, UNet, ConvNet),
        ),
        strict=True,
    )
)
"""Models by the names that --model accepts."""


def make_model(
    text: str, classes: int, image_size: int, more: Mapping[str, object] | None = None
) -> nn.Module:
    """Make the model of `--model`: a name in MODELS, or `module:factory`, and maybe
    `(option=value)`.

    The number of classes is passed to a factory's parameter `classes` or `num_classes`, the other
    values to those of their names. The model maps float32 (n, 3, image_size, image_size) to logits
    (n, classes); those of other tasks as `dlio.train.tasks` says.

    Raises UsageError for an unknown name, unsuitable options, or a factory that returns something
    other than a torch.nn.Module.
    """
    name, options = split_options("--model", text)
    offered: list[tuple[Sequence[str], object]] = [
        (("classes", "num_classes"), classes),
        (("image_size",), image_size),
        *(((each,), value) for each, value in (more or {}).items()),
    ]
    factory = find_model(text)
    model = call_with("--model", name, factory, options, offered)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def find_model(text: str) -> Callable[..., nn.Module]:
    """Return the factory of a `--model` value. Raises UsageError if there is none."""
    name, _ = split_options("--model", text)
    if ":" in name:
        return cast(Callable[..., nn.Module], load_factory("--model", name))
    if name not in MODELS:
        raise unknown_word(
            "--model", name, MODELS, f"choose {', '.join(MODELS)}, or module:factory"
        )
    return MODELS[name]


def check_model(text: str, image_size: int) -> None:
    """Check the options of a `--model` value before there are data: those of a network of dlio by
    making it without memory, those of a `module:factory` by its signature.

    Raises UsageError as `make_model`.
    """
    name, options = split_options("--model", text)
    if ":" in name:
        check_options("--model", name, find_model(text), options)
        return
    with torch.device("meta"):
        make_model(text, classes=2, image_size=image_size)
