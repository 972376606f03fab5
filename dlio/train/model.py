"""A small residual network for images of 64 to 224 pixels, to train without a GPU."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Final, cast

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.config import MODEL_NAMES
from dlio.train.factory import call_with, load_factory, split_options
from dlio.util.arguments import unknown_word

__all__ = ["MODELS", "ResidualBlock", "SmallResNet", "find_model", "make_model", "normalised"]

_MEAN: Final = (0.485, 0.456, 0.406)
_STD: Final = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, per channel, as torchvision uses them."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., arXiv 1512.03385).

    Input (n, inputs, h, w), output (n, outputs, ceil(h / stride), ceil(w / stride)).
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        # Each block starts as its shortcut, which allows a high learning rate from the start
        # (Goyal et al., arXiv 1706.02677).
        nn.init.zeros_(self.norm2.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                # ceil_mode: the convolutions round odd sizes up.
                nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity(),
                nn.Conv2d(inputs, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, inputs, h, w) -> (n, outputs, h / stride, w / stride)
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network: a stem that reduces the image to 56 pixels at most, three residual stages
    and a linear classifier.

    1.2 million parameters at the default width; 45 million multiply-adds for an image of 64 x 64
    pixels, 146 million for one of 224 x 224. Input: float32 (n, 3, image_size, image_size),
    normalised; output: logits (n, classes).
    """

    def __init__(self, classes: int, image_size: int, width: int = 32) -> None:
        super().__init__()
        stem: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        side = image_size // 2
        while side > 56:
            stem.append(nn.MaxPool2d(3, 2, 1))
            side = (side + 1) // 2
        self.stem = nn.Sequential(*stem)
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(ResidualBlock(inputs, outputs, 2) for inputs, outputs in itertools.pairwise(widths))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, image_size, image_size), normalised -> logits (n, classes)
        features = self.stages(self.stem(x))
        logits: torch.Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def normalised(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Convert images to a model's input on the device.

    Args:
        images: uint8 (n, 3, h, w).

    Returns float32 (n, 3, h, w) with mean 0 and standard deviation 1 over ImageNet's pixels.
    """
    mean, std = _pixels(device)
    return images.to(device, non_blocking=True).float().sub_(mean).div_(std)


@cache
def _pixels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (torch.tensor(each, device=device).view(1, 3, 1, 1) * 255 for each in (_MEAN, _STD))
    return mean, std


MODELS: Final[dict[str, Callable[..., nn.Module]]] = dict(
    zip(MODEL_NAMES, (SmallResNet,), strict=True)
)
"""Models by the names that --model accepts."""


def make_model(text: str, classes: int, image_size: int) -> nn.Module:
    """Make the model of `--model`.

    Args:
        text: a name in MODELS, or `module:factory`; optionally followed by `(option=value)`.
        classes: passed to a factory with a parameter `classes` or `num_classes`.
        image_size: passed to a factory with a parameter of this name.

    The model maps float32 (n, 3, image_size, image_size) to logits (n, classes).

    Raises UsageError for an unknown name, unsuitable options, or a factory that returns something
    other than a torch.nn.Module.
    """
    name, options = split_options("--model", text)
    offered = ((("classes", "num_classes"), classes), (("image_size",), image_size))
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
