"""Losses that compare the samples of a batch with each other, found in their autograd graph.

The value of such a loss over a part of a batch is another loss: in-batch negatives become fewer,
correlations and deviations are those of the part. No weight makes up for that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from dlio.exchange.loss_terms import (
    LAYERS,
    GraphStates,
    LossTerms,
    dims_of,
    is_parameter,
    name_of,
    shape_of,
)

_NODES: Final = 20_000
_FEWEST: Final = 3
"""Samples from which on a shape tells the dimension of samples."""
_CHAIN: Final = 8
"""Operations between scores and the layer that makes them."""
_PARTS: Final = 4
"""Most tensors of samples that are concatenated, such as the views of an image."""
_OVER_SAMPLES: Final = {
    "MeanBackward1": "a mean",
    "SumBackward1": "a sum",
    "VarBackward0": "a variance",
    "StdBackward0": "a deviation",
    "LogsumexpBackward0": "a logsumexp",
    "SoftmaxBackward0": "a softmax",
    "LogSoftmaxBackward0": "a softmax",
}

_BY_ORDER: Final = {
    "TopkBackward0": "the largest",
    "SortBackward0": "the order",
    "KthvalueBackward0": "the k-th value",
    "MedianBackward0": "the median",
    "MedianBackward1": "the median",
    "MaxBackward0": "the maximum",
    "MinBackward0": "the minimum",
    "AmaxBackward0": "the maximum",
    "AminBackward0": "the minimum",
}


def mixed_samples(
    roots: Sequence[torch.Tensor], samples: int, found: LossTerms, dim: int = 0
) -> str | None:
    """Return how a loss of `samples` samples compares them; None if it does not, as far as is seen.

    `dim` is the dimension of samples in the batch's tensors. Takes time in proportion to the graph.
    """
    if samples < _FEWEST:
        return None
    reduced = [term.reduces for term in found.terms]
    for node in _nodes(roots):
        name = name_of(node)
        if name in _OVER_SAMPLES and any(node is each for each in reduced):
            continue
        if name in _BY_DIM:
            said = _BY_DIM[name](node, samples, dim)
        else:
            said = _TESTS.get(name, _broadcast)(node, samples)
        if said is not None:
            return said
    return None


def _nodes(roots: Sequence[torch.Tensor]) -> Iterator[Any]:
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack and len(seen) < _NODES:
        node = stack.pop()
        yield node
        below = [f for f, _ in node.next_functions if f is not None and f not in seen]
        seen.update(below)
        stack += below


def _is_pairs(first: int, second: int, samples: int) -> bool:
    return first == second and first % samples == 0 and first // samples <= _PARTS


def _cross_entropy(node: Any, samples: int) -> str | None:
    target, scores = node._saved_target, shape_of(node.next_functions[0][0])
    if target.ndim != 1 or len(scores) != 2 or not _is_pairs(scores[0], scores[1], samples):
        return None
    numbers = torch.arange(len(target), device=target.device)
    if not target.equal(numbers) or _is_of_classes(node, samples):
        return None
    return "a cross entropy among the samples of the batch"


def _is_of_classes(node: Any, samples: int) -> bool:
    """True if scores are a layer's, with a parameter for each class, of which there are as many as
    samples."""
    states = GraphStates(samples)
    for _ in range(_CHAIN):
        below = [f for f, _ in node.next_functions if f is not None]
        of_data = [each for each in below if not states.is_constant(each)]
        if len(of_data) != 1:
            return False
        (node,) = of_data
        name = name_of(node)
        if name in LAYERS:
            return True
        if name in ("MmBackward0", "BmmBackward0"):
            return any(f is not None and states.is_constant(f) for f, _ in node.next_functions)
    return False


def _product(node: Any, samples: int) -> str | None:
    operands = [f for f, _ in node.next_functions]
    states = GraphStates(samples)
    if any(f is None or states.is_constant(f) for f in operands):
        return None
    first, result = shape_of(operands[0]), shape_of(node)
    if len(first) == 3 and first[0] % samples == 0:
        return None  # A product for each sample, as in attention.
    if _is_pairs(result[-2], result[-1], samples):
        return "products of all pairs of samples"
    if first[-1] == samples and max(result) > 1:
        return "products summed over the batch"
    return None


def _distances(node: Any, samples: int) -> str | None:
    first, second = shape_of(node)[-2:]
    return "distances of all pairs of samples" if _is_pairs(first, second, samples) else None


def _reduction(node: Any, samples: int, dim: int) -> str | None:
    below = node.next_functions[0][0]
    if below is None or is_parameter(below):
        return None
    shape = shape_of(below)
    # Some of the samples are those of a class, whose mean is compared with others.
    picks = name_of(below) == "IndexBackward0" and below._saved_self_sym_sizes[dim] == samples
    is_of_batch = len(shape) > dim and (shape[dim] == samples or picks)
    over = len(shape) > 1 and dims_of(node, len(shape)) == (dim,) and is_of_batch
    return f"{_OVER_SAMPLES[name_of(node)]} over the batch" if over else None


def _order(node: Any, samples: int, dim: int) -> str | None:
    below = node.next_functions[0][0]
    if below is None or is_parameter(below):
        return None
    shape = shape_of(below)
    over = dim in dims_of(node, len(shape)) or len(shape) <= dim
    if len(shape) == 1 and name_of(below).startswith(("View", "Reshape", "UnsafeView")):
        # Flattened elements of all samples.
        below = below.next_functions[0][0]
        shape = shape_of(below) if below is not None else shape
    is_of_batch = over and shape[min(dim, len(shape) - 1)] == samples
    return f"{_BY_ORDER[name_of(node)]} of the batch" if is_of_batch else None


def _selection(node: Any, samples: int) -> str | None:
    indices = node._saved_indices
    first = indices[0] if indices else None
    if not isinstance(first, torch.Tensor) or first.dtype != torch.int64 or first.ndim != 1:
        return None
    if len(first) > samples and bool((first[1:] >= first[:-1]).all()):
        return None  # Each sample some times, such as once for each of its boxes.
    below = node.next_functions[0][0]
    is_other = node._saved_self_sym_sizes[0] == samples and len(first) != samples
    if is_other and below is not None and not is_parameter(below):
        return "pairs or triplets of samples"
    return None


def _broadcast(node: Any, samples: int) -> str | None:
    operands = [f for f, _ in node.next_functions if f is not None]
    if len(operands) != 2 or not name_of(node).startswith(("Add", "Sub", "Mul", "Div", "Minimum")):
        return None
    if any(map(is_parameter, operands)):
        return None  # Such as the weights of channels, as many as there are samples.
    result = shape_of(node)
    places = [dim for dim, size in enumerate(result) if size == samples]
    shapes = [shape_of(each) for each in operands]
    if len(places) < 2 or any(len(shape) != len(result) for shape in shapes):
        return None
    for i in places:
        for j in places:
            if (shapes[0][i], shapes[0][j], shapes[1][i], shapes[1][j]) == (samples, 1, 1, samples):
                return "all pairs of samples"
    return None


_TESTS: Final[dict[str, Callable[[Any, int], str | None]]] = {
    "NllLossBackward0": _cross_entropy,
    "MmBackward0": _product,
    "BmmBackward0": _product,
    "CdistBackward0": _distances,
    "EuclideanDistBackward0": _distances,
    "IndexBackward0": _selection,
}
_BY_DIM: Final[dict[str, Callable[[Any, int, int], str | None]]] = {
    **dict.fromkeys(_OVER_SAMPLES, _reduction),
    **dict.fromkeys(_BY_ORDER, _order),
}
