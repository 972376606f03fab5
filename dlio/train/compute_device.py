"""The device of a rank: the layout and the number formats of a model on it."""

import contextlib
from typing import Final

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.comm.launch_environment import local_rank
from dlio.errors import UsageError
from dlio.util.arguments import unknown_word

_OF_VOLUMES: Final = 5
"""Dimensions of a 3-D convolution's weights."""


def channels_last(model: nn.Module) -> nn.Module:
    """Lay out a model's 4-dimensional tensors with the channels last, but for 3-D networks."""
    if any(parameter.ndim == _OF_VOLUMES for parameter in model.parameters()):
        return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def choose_device(name: str, comm: Communicator) -> torch.device:
    """Return the device of --device; `auto` prefers a GPU. Raises UsageError.

    Ranks of one host take its GPUs in turn. Where the launcher shows each rank a GPU of its own
    (CUDA_VISIBLE_DEVICES), that is the one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
        name = f"cuda:{local_rank(comm.rank) % torch.cuda.device_count()}"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise unknown_word("--device", name, ("auto", "cpu", "cuda"))
    return torch.device(name)


DTYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast of a forward pass; weights and optimizer state stay float32.

    `fp16` also scales the loss, and skips optimizer steps whose gradients overflow (Micikevicius et
    al., "Mixed Precision Training", 2018). Ranks that share gradients skip the same steps.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device, self._dtype = device, DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    @property
    def scales(self) -> bool:
        """True if the loss is scaled."""
        return self.scaler.is_enabled()

    def casting(self) -> contextlib.AbstractContextManager[object]:
        """Context for a forward pass and its loss."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer unless gradients overflowed, and update the loss scale."""
        self.scaler.step(optimizer)
        self.scaler.update()
