"""Bits of floating-point numbers and bytes of messages, by operations of a device."""

import torch
from torch.nn import functional


def exponents_of(values: torch.Tensor, added: int = 0) -> torch.Tensor:
    """Return the biased exponents of numbers >= 0, float32; int32.

    Args:
        added: added to the numbers' bits first.
    """
    return (values.view(torch.int32) + added) >> 23


def in_rows(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return values, shape (n,), n at least 1, as (rows, width), filled up with zeros."""
    return functional.pad(values, (0, -len(values) % width)).view(-1, width)


def power(biased: torch.Tensor) -> torch.Tensor:
    """Return 2^(biased - 127), float32, for int32 from 1 to 254."""
    return (biased << 23).view(torch.float32)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's entries."""
    return values.contiguous().view(torch.uint8) if values.numel() else values.to(torch.uint8)


def typed(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that bytes of a message hold, which may begin at any byte."""
    if not message.numel():
        return message.to(dtype)
    return message.clone().view(dtype)


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Pack booleans, shape (n,), as `numpy.packbits`: eight in a byte, the first in the highest."""
    padded = in_rows(bits.to(torch.uint8), 8)
    return (padded << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def unpacked(packed_bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` bits of bytes, uint8 of 0 and 1."""
    return ((packed_bits[:, None] >> _shifts(packed_bits.device)) & 1).view(-1)[:count]


def _shifts(device: torch.device) -> torch.Tensor:
    """Places of a byte's bits, in numpy's order."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
