"""Reductions of tensors over ranks, computed by MPI or, for types unknown to MPI, here.

MPI reduces C's number types. Open MPI returns garbage for others, notably float16 and bfloat16.
Those are exchanged as they are and summed here, in float32 and in the order of ranks. This sends
half the bytes of float32 and rounds once instead of at each hop. MPI takes the largest and the
least of floats as integers in the same order, which keeps NaN (`dlio.comm.float_order`), and sums
integers of fewer than 4 bytes as int32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce as fold_left
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from mpi4py import MPI

from dlio.comm.float_order import ordered_bits, ordered_floats
from dlio.errors import UsageError

Kind = Any
"""A member of torch.distributed.ReduceOp.RedOpType."""
Fold = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_Op = dist.ReduceOp
_TYPES: Final = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_SUMS: Final = (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM)
_BITS: Final = (_Op.BAND, _Op.BOR, _Op.BXOR)
_OPS: Final[dict[Kind, tuple[MPI.Op, Fold]]] = {
    **dict.fromkeys(_SUMS, (MPI.SUM, torch.add)),
    _Op.PRODUCT: (MPI.PROD, torch.mul),
    _Op.MIN: (MPI.MIN, torch.minimum),
    _Op.MAX: (MPI.MAX, torch.maximum),
    _Op.BAND: (MPI.BAND, torch.bitwise_and),
    _Op.BOR: (MPI.BOR, torch.bitwise_or),
    _Op.BXOR: (MPI.BXOR, torch.bitwise_xor),
}
_TRUTH: Final[dict[Kind, tuple[MPI.Op, Fold]]] = {
    **dict.fromkeys((_Op.SUM, _Op.MAX, _Op.BOR), _OPS[_Op.BOR]),
    **dict.fromkeys((_Op.PRODUCT, _Op.MIN, _Op.BAND), _OPS[_Op.BAND]),
    _Op.BXOR: _OPS[_Op.BXOR],
}
"""Reductions of bool, stored as bytes 0 and 1: a sum is a logical or, a product a logical and."""
_PARTS: Final = {torch.complex64: MPI.FLOAT, torch.complex128: MPI.DOUBLE}
_ORDERS: Final = {torch.float32: MPI.INT32_T, torch.float64: MPI.INT64_T}
_NAMES: Final[dict[Kind, Literal["max", "min"]]] = {_Op.MAX: "max", _Op.MIN: "min"}
_WIDER: Final = {torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Signed types that hold all values of unsigned ones, for which torch lacks arithmetic."""
_NATIVE: Final = 4
"""Bytes from which on MPI sums integers. Open MPI 5.0.11 sums narrower ones in vector registers,
which saturate, and the last few as C does, which wrap: 100 + 100 of int8 is 127 or -56."""
_WORD: Final = 8
_BLOCK: Final = 1 << 16
"""Elements summed at a time: 256 KiB of float32 fit into a core's cache."""


@dataclass(frozen=True)
class Reduction:
    """One of torch's reductions, for tensors of one type.

    Raises UsageError if torch does not define this reduction for the type.
    """

    kind: Kind
    dtype: torch.dtype
    factor: float | torch.Tensor = 1.0
    """Factor by which each rank multiplies its input before the sum (PREMUL_SUM)."""

    def __post_init__(self) -> None:
        if self.dtype == torch.bool:
            known = self.kind in _TRUTH
        elif self.dtype.is_complex:
            known = self.kind in (*_SUMS, _Op.PRODUCT)
        elif self.dtype.is_floating_point:
            known = self.kind not in _BITS
        else:
            known = self.kind != _Op.PREMUL_SUM and self.dtype in _TYPES
            known &= self.kind != _Op.AVG or self.dtype not in (*_WIDER, torch.uint64)
        if not known:
            raise UsageError(f"there is no {self.kind.name} of {self.dtype}")

    def __str__(self) -> str:
        return f"{self.kind.name} of {self.dtype}"

    @classmethod
    def of(cls, op: dist.ReduceOp, dtype: torch.dtype) -> "Reduction":
        kind = op.op  # type: ignore[attr-defined]
        if kind != _Op.PREMUL_SUM:
            return cls(kind, dtype)
        factor = getattr(op, "factor", None)
        if factor is None:
            raise UsageError("this torch does not tell PREMUL_SUM's factor: multiply, then SUM")
        return cls(kind, dtype, factor.cpu() if isinstance(factor, torch.Tensor) else factor)

    def native(self) -> tuple[MPI.Datatype, MPI.Op] | None:
        """Return MPI's datatype and operation, or None if MPI cannot compute the reduction."""
        if self.dtype == torch.bool:
            return MPI.UINT8_T, _TRUTH[self.kind][0]
        if self.dtype in _PARTS:
            return (_PARTS[self.dtype], MPI.SUM) if self.kind in _SUMS else None
        if self._is_ordered():
            return _ORDERS[self.dtype], _OPS[self.kind][0]
        if self.wide() != self.dtype:
            return None
        return (_TYPES[self.dtype], _OPS[self.kind][0]) if self.dtype in _TYPES else None

    @torch.inference_mode()
    def encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return flat host values as MPI reduces them: `native`'s type, the bytes of the dtype."""
        if not self._is_ordered():
            return tensor
        return torch.from_numpy(ordered_bits(tensor.numpy(), _NAMES[self.kind]))

    @torch.inference_mode()
    def decode(self, tensor: torch.Tensor) -> None:
        """Turn flat host values that MPI has reduced into numbers, in place."""
        if self._is_ordered():
            bits = tensor.numpy().view(f"i{tensor.itemsize}")
            tensor.copy_(torch.from_numpy(ordered_floats(bits)))

    def _is_ordered(self) -> bool:
        """True if MPI reduces integers in the order of floats."""
        return self.kind in _NAMES and self.dtype in _ORDERS

    @torch.inference_mode()
    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's input multiplied by the factor; the input itself if that is 1."""
        if self.kind != _Op.PREMUL_SUM:
            return tensor
        return (tensor.to(self.wide()) * self.factor).to(self.dtype)

    @torch.inference_mode()
    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy this rank's input, converted to the type in which it is summed."""
        return self.scaled(tensor).to(self.wide())

    @torch.inference_mode()
    def averaged(self, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        """Divide a sum in place by the number of ranks if the reduction is AVG; return it.

        Integers are rounded towards zero.
        """
        if self.kind == _Op.AVG:
            whole = not (self.dtype.is_floating_point or self.dtype.is_complex)
            tensor.div_(ranks, rounding_mode="trunc" if whole else None)
        return tensor

    @torch.inference_mode()
    def fold(self, rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Reduce the ranks' `scaled` inputs, of this reduction's dtype and shape (ranks, n), in the
        order of ranks, into `into`, which is returned.
        """
        fold: Any = (_TRUTH if self.dtype == torch.bool else _OPS)[self.kind][1]
        if self.dtype == torch.uint64:
            # Flipping the highest bit gives signed numbers the order of unsigned ones.
            turn = torch.iinfo(torch.int64).min if self.kind in (_Op.MIN, _Op.MAX) else 0
            whole = fold_left(fold, torch.bitwise_xor(rows.view(torch.int64), turn))
            into.view(torch.int64).copy_(torch.bitwise_xor(whole, turn))
            return into
        for start in range(0, len(into), _BLOCK):
            part = slice(start, start + _BLOCK)
            total = rows[0, part].to(self.wide(), copy=True)
            for row in rows[1:, part]:
                fold(total, row.to(self.wide()), out=total)
            into[part].copy_(self.averaged(total, len(rows)))
        return into

    def wide(self) -> torch.dtype:
        """Dtype in which the reduction is computed."""
        if self.dtype.is_floating_point and self.dtype not in _TYPES:
            return torch.float32
        whole = self.dtype in _TYPES and not self.dtype.is_floating_point
        if whole and self.kind == _Op.AVG and self.dtype.itemsize < _WORD:
            return torch.int64  # The sum may leave the type, the mean does not.
        if whole and self.kind == _Op.SUM and self.dtype.itemsize < _NATIVE:
            return torch.int32
        return _WIDER.get(self.dtype, self.dtype)
