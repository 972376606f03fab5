"""The largest and the least of floats as those of integers in the same order.

MPI.MAX and gloo's MAX compare with `<`, which is false for NaN: a NaN of another rank than the
first is lost (Open MPI 5.0.11, torch 2.13.0). Of integers in the floats' order, NaN is an end.
"""

import numpy as np
import numpy.typing as npt

from dlio.comm.comm_protocol import Array, Op, Request


def ordered_bits(values: npt.NDArray[np.floating], op: Op) -> npt.NDArray[np.signedinteger]:
    """Return integers in the order of float32 or float64 values, of their size and shape.

    NaN is the greatest for "max" and the least for "min".
    """
    nan = np.copysign(np.nan, 1.0 if op == "max" else -1.0).astype(values.dtype)
    return _flipped(np.where(np.isnan(values), nan, values))


def ordered_floats(bits: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.floating]:
    """Return the values of `ordered_bits`."""
    return _flipped(bits.copy()).view(f"f{bits.itemsize}")


def _flipped(values: Array) -> npt.NDArray[np.signedinteger]:
    """Flip all bits but the sign's of negative numbers, in place: sign and magnitude become two's
    complement, and back."""
    bits: npt.NDArray[np.signedinteger] = values.view(f"i{values.itemsize}")
    bits ^= (bits >> (8 * bits.itemsize - 1)) & np.iinfo(bits.dtype).max
    return bits


class OrderedReduction:
    """The reduction of a float array's ordered bits; once it is done, the array has the result."""

    def __init__(self, request: Request, bits: npt.NDArray[np.signedinteger], array: Array) -> None:
        self._request, self._bits, self._array = request, bits, array
        self._is_copied = False

    def done(self) -> bool:
        if not self._is_copied and self._request.done():
            np.copyto(self._array, ordered_floats(self._bits))
            self._is_copied = True
        return self._is_copied

    def cancel(self) -> bool:
        return self._request.cancel()
