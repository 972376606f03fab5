"""Find pairs of neurons with proportional weights, by blocks of cosine similarities."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Twin:
    """A pair of neurons: `scale` times neuron `twin` approximates neuron `of`."""

    of: int
    twin: int
    scale: float
    distance: float
    """Euclidean norm of (w_of, b_of) - scale (w_twin, b_twin)."""


def find_twins(
    vectors: Array,
    order: npt.NDArray[np.int64],
    scales: bool,
    tolerance: float,
    block: int = 256,
) -> list[Twin]:
    """Return a twin for each neuron that another one can replace.

    Greedy and deterministic: each neuron, in `order`, is compared with the earlier ones that stay.
    If the nearest is within `tolerance`, the pair becomes a Twin; otherwise the neuron stays. A
    neuron that replaces another therefore always stays itself.

    Memory: a float32 copy of `vectors`, and `block` x neurons similarities.

    Args:
        vectors: (w, b) of each neuron, shape (neurons, k).
        order: neurons to examine, the most important first.
        scales: allow any positive factor between two neurons; otherwise the factor is 1.
        tolerance: largest allowed distance, relative to the norm of the neuron's own vector.
        block: neurons compared at a time.
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
    """Approximate distances, good enough to choose the nearest neuron."""
    wide = cosines.astype(np.float64)
    if scales:
        sines: Array = np.sqrt(np.maximum(0.0, 1.0 - wide**2))
        return np.where(wide > 0, sines, np.inf)
    squares: Array = own**2 + others**2 - 2 * own * others * wide
    return squares


def _exact(vectors: Array, neuron: int, twin: int, scales: bool) -> Twin | None:
    """Compute scale and distance in double precision; None if the scale is not positive."""
    mine, other = vectors[neuron], vectors[twin]
    scale = float(mine @ other / (other @ other)) if scales else 1.0
    if scale <= 0:
        return None
    return Twin(neuron, twin, scale, float(np.linalg.norm(mine - scale * other)))
