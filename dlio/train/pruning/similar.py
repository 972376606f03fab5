"""Neurons that do the same up to a factor, found by blocks of similarities."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Twin:
    """Neuron `of` does what `scale` times neuron `twin` does, up to a distance."""

    of: int
    twin: int
    scale: float
    distance: float
    """Length of (w, b) of the one less scale times (w, b) of the other."""


def find_twins(
    vectors: Array,
    order: npt.NDArray[np.int64],
    scales: bool,
    tolerance: float,
    block: int = 256,
) -> list[Twin]:
    """For each neuron that another one can stand in for, that other one.

    Greedy and deterministic: neurons are looked at in `order`; one that is within `tolerance` of
    one before it that stays is its twin, any other stays. So no neuron stands in for another and
    goes itself. Memory: the vectors in float32 once more, and `block` times as many similarities
    as there are neurons.

    Args:
        vectors: (w, b) of each neuron, shape (neurons, k).
        order: the neurons to look at; those that matter most come first.
        scales: whether a factor above 0 between two is allowed; else they have to be the same.
        tolerance: distance, as a part of the neuron's own length, that is allowed.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    order = order[lengths[order] > 0]
    if len(order) < 2:
        return []
    units = (vectors / np.maximum(lengths, 1e-300)[:, None]).astype(np.float32)
    stays: list[int] = []
    kept = np.zeros((0, vectors.shape[1]), np.float32)
    twins: list[Twin] = []
    for start in range(0, len(order), block):
        some = order[start : start + block]
        cosines = units[some] @ np.concatenate([kept, units[some]]).T
        older = len(stays)
        ids = np.concatenate([np.array(stays, np.int64), some])
        allowed = np.zeros(len(ids), bool)
        allowed[:older] = True
        for at, neuron in enumerate(some):
            twin = None
            if allowed.any():
                distances = _distances(cosines[at], lengths[neuron], lengths[ids], scales)
                distances[~allowed] = np.inf
                twin = _exact(vectors, int(neuron), int(ids[int(distances.argmin())]), scales)
            if twin is not None and twin.distance <= tolerance * lengths[neuron]:
                twins.append(twin)
            else:
                allowed[older + at] = True
        fresh = ids[older:][allowed[older:]]
        stays += fresh.tolist()
        kept = np.concatenate([kept, units[fresh]])
    return twins


def _distances(cosines: npt.NDArray[np.float32], own: float, others: Array, scales: bool) -> Array:
    """Approximate; to choose the nearest by."""
    wide = cosines.astype(np.float64)
    if scales:
        sines: Array = np.sqrt(np.maximum(0.0, 1.0 - wide**2))
        return np.where(wide > 0, sines, np.inf)
    squares: Array = own**2 + others**2 - 2 * own * others * wide
    return squares


def _exact(vectors: Array, neuron: int, twin: int, scales: bool) -> Twin | None:
    mine, other = vectors[neuron], vectors[twin]
    scale = float(mine @ other / (other @ other)) if scales else 1.0
    if scale <= 0:
        return None
    return Twin(neuron, twin, scale, float(np.linalg.norm(mine - scale * other)))
