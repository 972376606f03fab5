"""Tensors between ranks within the passes of a model: parts of them, and sums over ranks.

Tensors of other devices pass through the host.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import leave
from dlio.comm.funnel import is_foreign_thread
from dlio.errors import CommError

_TAG: Final = 71


class RankGroup:
    """The ranks that compute a pass of a model together, and counts of their messages.

    Nothing else uses `comm`; the caller owns it.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.messages = 0
        """Messages that this rank has sent."""
        self.bytes = 0
        """Bytes that this rank has sent in messages to single ranks."""

    def __deepcopy__(self, memo: object) -> "RankGroup":
        return self

    def swap(
        self,
        parts: Sequence[torch.Tensor | None],
        shapes: Sequence[tuple[int, ...] | None],
        dtype: torch.dtype,
    ) -> list[torch.Tensor | None]:
        """Send a part to each rank and return those of the others, which have `shapes`, on the
        host; None for no message.

        Raises CommTimeout if another rank does not answer in time.
        """
        _check_thread()
        sent = [None if part is None else _bytes(part) for part in parts]
        received = [None if each is None else torch.empty(each, dtype=dtype) for each in shapes]
        requests: list[Request] = []
        for rank, buffer in enumerate(received):
            if buffer is not None:
                requests.append(self.comm.irecv(_bytes(buffer), rank, _TAG))
        for rank, data in enumerate(sent):
            if data is not None:
                requests.append(self.comm.isend(data, rank, _TAG))
                self.messages += 1
                self.bytes += len(data)
        try:
            self.comm.wait(requests, "the edges of the other ranks' parts")
        except BaseException:
            # The messages' memory must outlive them.
            ended = [request.cancel() for request in requests]
            if not all(ended):
                leave(requests, sent, received)
            raise
        return received

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, on the device of `values`. Collective."""
        if self.comm.size == 1:
            return values
        _check_thread()
        # Counts are exact in float64; 16-bit floats are summed in 32 bits.
        single = values.is_floating_point() and values.dtype != torch.float64
        wide = torch.float32 if single else torch.float64
        host = values.detach().to("cpu", wide, copy=True).contiguous()
        self.comm.wait([self.comm.iallreduce(host.numpy())], "a sum over the ranks of a sample")
        return host.to(values.device, values.dtype)


def _check_thread() -> None:
    if is_foreign_thread():
        raise CommError(
            "this MPI library lets one thread call it, and backward runs in another: use an MPI "
            "with thread support (Open MPI 5), or start ranks by torchrun"
        )


def _bytes(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
