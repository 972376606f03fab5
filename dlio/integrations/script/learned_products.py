"""Learned weights of a loss's terms, such as those of tasks: one process's gradients of them.

The gradient of a weight is made of the value of the term that it multiplies, and autograd has kept
that of this rank's part of the batch. During a backward it is multiplied by the factor by which the
term's own gradient is: the sum over ranks is then made of the whole batch's value. A value that
joins terms with other factors cannot be made so.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from dlio.exchange.loss_terms import (
    LINEAR,
    SAVED_FACTORS,
    SCALES,
    GraphStates,
    LossTerms,
    name_of,
    shape_of,
)

_OTHER: Final = -1
"""Stands for anything but a term, such as a penalty: its factor is 1."""
_MOST: Final = 4096
"""Elements of a value that are told apart."""
_Elements = tuple[frozenset[int], ...]
"""The terms in each element of a tensor, in its order; a single entry if all have the same."""


@dataclass(frozen=True, slots=True)
class LearnedProduct:
    """A product of parameters and a value that depends on samples, without a dimension of these."""

    node: Any
    place: str
    """Attribute of the node with the value that the parameters are multiplied by."""
    elements: _Elements

    @property
    def text(self) -> str:
        """The same on all ranks for the same product."""
        return " ".join(",".join(map(str, sorted(each))) for each in self.elements)

    def is_clear(self, factors: Sequence[float]) -> bool:
        """True if the value can be multiplied by one factor for each element."""
        if all(abs(factor - 1) <= 1e-9 for factor in factors):
            return True
        joined = (_factors_in(each, factors) for each in self.elements)
        if any(max(each) - min(each) > 1e-9 * max(each) for each in joined):
            return False
        value = self.value
        strides = zip(value.stride(), value.shape, strict=True)
        is_spread = any(stride == 0 and size > 1 for stride, size in strides)
        # Hooks of saved tensors, such as `save_on_cpu`, give another copy each time.
        return not is_spread and value.data_ptr() == self.value.data_ptr()

    @property
    def value(self) -> torch.Tensor:
        saved: torch.Tensor = getattr(self.node, self.place).data
        return saved

    def times(self, factors: Sequence[float], value: torch.Tensor) -> torch.Tensor:
        """Return a value multiplied by the factors of its elements."""
        each = [_factors_in(terms, factors)[0] for terms in self.elements]
        by = torch.tensor(each, dtype=value.dtype, device=value.device)
        by = by.reshape(value.shape) if len(each) > 1 else by.reshape(())
        # Where a rank's part has no element to count, 0 / 0 has made NaN.
        return torch.where(by == 0, torch.zeros_like(value), value * by)


def learned_products(parts: LossTerms, states: GraphStates) -> list[LearnedProduct]:
    """Return the products of learned weights in a loss, given its terms."""
    places = {
        single.reduces: number
        for number, term in enumerate(parts.terms)
        for single in (term.each or (term,))
    }
    known: dict[Any, _Elements] = {}
    return [
        LearnedProduct(
            node, SAVED_FACTORS[name_of(node)][place], _elements(below, places, states, known)
        )
        for node, place in parts.learned
        for below in (node.next_functions[place][0],)
    ]


@contextmanager
def multiplied_values(
    products: Sequence[LearnedProduct], factors: Sequence[float]
) -> Iterator[None]:
    """Multiply the values that learned weights are multiplied by, inside the `with` block."""
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for product in products if factors else ():
            value = product.value
            if value.data_ptr() not in before and product.is_clear(factors):
                before[value.data_ptr()] = value, value.clone()
                value.copy_(product.times(factors, value))
        yield
    finally:
        for value, kept in before.values():
            value.copy_(kept)


def _factors_in(terms: frozenset[int], factors: Sequence[float]) -> list[float]:
    return [factors[term] if 0 <= term < len(factors) else 1.0 for term in terms]


def _elements(
    top: Any, places: dict[Any, int], states: GraphStates, known: dict[Any, _Elements]
) -> _Elements:
    """Return the terms in each element of a node's output."""
    # Without recursion: a loss that a loop adds up is as deep as it has terms.
    stack = [top]
    while stack:
        node = stack[-1]
        below = [] if _is_end(node, places, states) else _inputs(node)
        unknown = [each for each in below if each not in known]
        if unknown:
            stack += unknown
            continue
        stack.pop()
        if node not in known:
            own = (frozenset([places.get(node, _OTHER)]),)
            known[node] = _joined(node, [known[each] for each in below]) if below else own
    return known[top]


def _inputs(node: Any) -> list[Any]:
    return [below for below, _ in node.next_functions if below is not None]


def _is_end(node: Any, places: dict[Any, int], states: GraphStates) -> bool:
    name = name_of(node)
    is_linear = name in LINEAR or name in SCALES or name in SAVED_FACTORS
    sums = name.startswith(("Sum", "Mean", "Nansum"))
    return node in places or states.is_constant(node) or not (is_linear or sums)


def _joined(node: Any, below: Sequence[_Elements]) -> _Elements:
    """Return the terms in each element of a node's output, by those of its inputs."""
    name, size = name_of(node), math.prod(shape_of(node))
    every = (frozenset[int]().union(*(terms for each in below for terms in each)),)
    if all(len(each) == 1 and each == below[0] for each in below) or not 1 < size <= _MOST:
        return every
    if name in ("StackBackward0", "CatBackward0") and node._saved_dim == 0:
        sizes = [math.prod(shape_of(*each)) for each in node.next_functions if each[0] is not None]
        if sum(sizes) == size:
            spread = zip(below, sizes, strict=True)
            return tuple(t for each, n in spread for t in (each * n if len(each) == 1 else each))
        return every
    is_moved = name in ("PermuteBackward0", "TransposeBackward0", "TBackward0", "IndexBackward0")
    is_moved |= name in SAVED_FACTORS and not name.startswith(("Mul", "Div"))
    if is_moved or any(len(each) not in (1, size) for each in below):
        return every
    whole = [each * size if len(each) == 1 else each for each in below]
    return tuple(frozenset[int]().union(*each) for each in zip(*whole, strict=True))
