"""A rank's residual: the part of its gradients that its messages have left out so far."""

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]


class ErrorFeedback:
    """One number per entry of a region.

    Args:
        entries: length of the region.
        keeps: a sum may have to be undone, because a rank was lost in the middle of it.
        decay: share of the residual that is still owed when the next sum begins.
    """

    def __init__(self, entries: int, keeps: bool = False, decay: float = 1.0) -> None:
        self._decay = np.float32(decay)
        self.owed = np.zeros(entries, np.float32)
        """Shape (entries,). A part of each checkpoint."""
        self._before = np.zeros(entries, np.float32) if keeps else None

    def keep(self) -> None:
        """Remember the residual, before a sum is started, and let it decay."""
        if self._before is not None:
            self._before[:] = self.owed
        if self._decay < 1.0:
            # For `diloco+threshold` only, where the residual stands for the outer momentum:
            # undecayed, it would be sent in full, however old.
            self.owed *= self._decay

    def put_back(self) -> None:
        """Return to the last residual that was remembered."""
        if self._before is not None:
            self.owed[:] = self._before

    def pay(self, region: _F32) -> None:
        """Add the residual to a region that is not compressed, because no other rank is left."""
        if len(self.owed):
            region += self.owed
            self.owed[:] = 0
