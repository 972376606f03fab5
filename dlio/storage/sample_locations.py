"""STUB"""

from dataclasses import dataclass
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SampleLocations:
    known: npt.NDArray[np.bool_]
    descriptor: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    regular: npt.NDArray[np.bool_]
    offset: npt.NDArray[np.int64]
    stored: npt.NDArray[np.int64]
    raw: npt.NDArray[np.int64]
    digest: npt.NDArray[np.uint64]
    checked: npt.NDArray[np.bool_]
    tier: npt.NDArray[np.int8]

    def at(self, rows):
        return SampleLocations(*(getattr(self, name)[rows] for name in self.__slots__))
