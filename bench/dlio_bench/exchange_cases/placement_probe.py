"""A callback of `--case placement`: the weights after the first steps, and a digest at the end."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport

_EARLY: Final = (1, 5)


class Probe(Callback):
    """Write the weights after steps 1 and 5, and a digest of those after each epoch, on rank 0.

    Args:
        path: the .npz file; arrays `step1`, `step5` and `digest`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._arrays: dict[str, Any] = {}

    def after_step(self, run: Run) -> None:
        if run.updates in _EARLY:
            self._arrays[f"step{run.updates}"] = _flat(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        if run.comm.rank == 0:
            digest = xxhash.xxh3_128_hexdigest(_flat(run).tobytes())
            np.savez(self._path, digest=np.array(digest), **self._arrays)


def _flat(run: Run) -> npt.NDArray[np.float32]:
    """Return all weights and running statistics."""
    values = [value.detach().cpu().reshape(-1) for value in run.model.state_dict().values()]
    return np.concatenate([value.float().numpy() for value in values])
