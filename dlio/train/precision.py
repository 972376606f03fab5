"""Mixed precision: autocast to 16 bits, and loss scaling for float16."""

import contextlib
from typing import Final

import torch

DTYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast of a forward pass; weights and optimizer state stay float32.

    `fp16` also scales the loss, and skips optimizer steps whose gradients overflow (Micikevicius et
    al., "Mixed Precision Training", 2018). Ranks that share gradients skip the same steps.

    Args:
        name: `fp32`, `bf16` or `fp16`.
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
