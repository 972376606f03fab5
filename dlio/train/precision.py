"""Mixed precision: what is computed in 16 bits, and the loss scaled so that gradients fit."""

import contextlib
from typing import Final

import torch

DTYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Casts what torch's autocast deems safe; weights and optimizer stay float32.

    `fp16` also scales the loss, and leaves steps out whose gradients overflow (Micikevicius et
    al., 2018); ranks decide alike where they share gradients.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device, self._dtype = device, DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    @property
    def scales(self) -> bool:
        return self.scaler.is_enabled()

    def casting(self) -> contextlib.AbstractContextManager[object]:
        """For a forward pass and its loss."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer, unless gradients overflowed."""
        self.scaler.step(optimizer)
        self.scaler.update()
