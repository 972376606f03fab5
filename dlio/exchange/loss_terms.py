"""Terms of a loss, read from its autograd graph: means and sums over the samples of a batch.

`find_terms` descends from the loss to the operations that reduce the samples' dimension. Above
these, the loss has to be linear for a sum over ranks to equal the value of the whole batch.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import zip_longest
from typing import Any, Final

import torch

_number_of: Final[Callable[[torch.Tensor], Any]] = torch.Tensor.tolist
"""Without what a run of a script puts around it."""
NEARLY_NONE: Final = 1e-10
"""Stands for no element."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """A number by which a sum over samples is divided, or multiplied by its inverse."""

    value: float
    is_tensor: bool = False
    is_factor: bool = False
    is_of_list: bool = False
    """True if it is the number of values that were stacked for a mean."""


_JOIN: Final = Divisor(0.0)
"""Stands, among divisors, for an addition that joins terms."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTerm:
    """A part of a loss that reduces samples by one operation."""

    node: Any
    """The autograd node at which the gradient of this term alone enters."""
    reduces: Any
    """The node that reduces the samples, at or below it."""
    name: str
    """Operation, such as `cross_entropy` or `sum`."""
    is_sum: bool
    """True for a sum, False for a mean."""
    count: float
    """Elements, or sum of their weights, that a mean divides by."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor that is reduced."""
    divisors: tuple[Divisor, ...] = ()
    """Divisors of a sum, the innermost first."""
    pads: bool = False
    """True if it reduces all elements of each sample, padded ones included."""
    varies: bool = False
    """True if classes have weights: the count depends on a batch's labels."""
    each: tuple["LossTerm", ...] = ()
    """The terms of single samples that a loop of the script adds up to this one."""

    @property
    def key(self) -> str:
        """The same on all ranks for the same term."""
        text = f"{self.name} as a {'sum' if self.is_sum else 'mean'}"
        return f"{text}, divided {len(self.divisors)} times" if self.divisors else text

    def divided_by(self, number: int) -> float:
        """Return a divisor; `NEARLY_NONE` for a count of no element that the script keeps from
        being 0, as by `clamp(min=1)`: where all ranks have none, the loss is 0 and not NaN."""
        divisor = self.divisors[number]
        is_kept = divisor.is_tensor and divisor.value == 1 and self.selects_nothing
        return NEARLY_NONE if is_kept else divisor.value

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows that its elements may be of."""
        shape = self.shape
        return (*(math.prod(shape[: k + 1]) for k in range(len(shape))), *shape)

    @property
    def selects_nothing(self) -> bool:
        """True if no element counts: there are none, or a mask is zero throughout; of a sum over
        single samples, in none of these."""
        return all(selects_nothing(each.reduces) for each in self.each or (self,))

    @property
    def may_be_kept(self) -> bool:
        """True if a sum is divided by a 1 that may stand for no element, and has no mask that tells
        how many there are."""
        ones = any(each.is_tensor and each.value == 1 for each in self.divisors)
        return ones and self.is_sum and math.prod(self.shape) > 1 and not has_mask(self.reduces)

    def counts(self, value: float, samples: int) -> bool:
        """True if a number is that of the samples, or of the elements of the leading dimensions."""
        sizes = [math.prod(self.shape[: k + 1]) for k in range(len(self.shape))]
        return value in (samples, *sizes)


def is_count(term: LossTerm, divisor: Divisor, size: int) -> bool:
    """True if a sum seems to be divided by a number of the samples or elements of a part."""
    if divisor.is_factor:
        return term.counts(divisor.value, size) and not is_round(divisor.value)
    return divisor.is_tensor or term.counts(divisor.value, size)


def is_round(value: float) -> bool:
    """True for a number such as 2, 5, 10 or 400, whose inverse is a usual coefficient."""
    digits = f"{value:.0f}".rstrip("0")
    return len(digits) <= 1 or digits == "25"


@dataclass(slots=True)
class LossTerms:
    """Terms of one backward pass."""

    terms: list[LossTerm] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Operations through which a loss is not a mean or sum over samples."""
    hidden: list[str] = field(default_factory=list)
    """Custom autograd functions and compiled graphs that make a part of the loss."""
    has_constants: bool = False
    """True if a part depends on parameters alone, such as a penalty."""
    is_given: bool = False
    """True if backward is given a gradient whose elements differ."""
    learned: list[tuple[Any, int]] = field(default_factory=list)
    """Products of parameters and of a value of samples, with the place of the latter."""

    def note_learned(self, node: Any, of_samples: Any) -> None:
        """Note a product of a value of samples, if the other factor is learned."""
        factors = [each for each, _ in node.next_functions]
        if len(factors) == 2 and None not in factors:
            self.learned.append((node, factors.index(of_samples)))


class _State(Enum):
    """Dependence of a tensor of the graph."""

    CONSTANT = auto()
    """Parameters alone."""
    REDUCED = auto()
    """Samples, but it has no dimension of them."""
    SAMPLES = auto()
    """Samples, with a dimension of them."""


_BUDGET: Final = 20_000
"""Nodes that are visited before a tensor counts as one of samples."""
_DEEPEST: Final = 64
"""Operations, back from a reduction, among which that of a single sample is looked for."""
_FUSED: Final = {
    "NllLossBackward0": "cross_entropy",
    "NllLoss2DBackward0": "cross_entropy",
    "NllLoss2dBackward0": "cross_entropy",
    "MseLossBackward0": "mse_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "SoftMarginLossBackward0": "soft_margin_loss",
    "MultiMarginLossBackward0": "multi_margin_loss",
    "MultilabelMarginLossBackward0": "multilabel_margin_loss",
}
SCALES: Final = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0")
_LONGEST_CHAIN: Final = 4
_MEANS: Final = ("MeanBackward0", "MeanBackward1")
_SUMS: Final = ("SumBackward0", "SumBackward1", "NansumBackward0")
_WHOLE: Final = (*_MEANS[:1], "SumBackward0", "DotBackward0", "VdotBackward0", "MaxBackward1")
"""Operations whose result has no dimension."""
_BY_DIM: Final = (
    "MeanBackward1",
    "SumBackward1",
    "NansumBackward0",
    "VarBackward0",
    "StdBackward0",
    "LogsumexpBackward0",
    "LinalgVectorNormBackward0",
    "NormBackward1",
    "AmaxBackward0",
    "AminBackward0",
)
_LOOKUPS: Final = (
    "EmbeddingBackward0",
    "IndexBackward0",
    "IndexSelectBackward0",
    "GatherBackward0",
)
_PRODUCTS: Final = ("MmBackward0", "BmmBackward0", "MvBackward0")
SAVED_FACTORS: Final = {
    "MulBackward0": ("_saved_self", "_saved_other"),
    "DivBackward0": ("_saved_self", "_saved_other"),
    "DotBackward0": ("_saved_self", "_saved_tensor"),
    "VdotBackward0": ("_saved_self", "_saved_other"),
    "MvBackward0": ("_saved_self", "_saved_vec"),
    "MmBackward0": ("_saved_self", "_saved_mat2"),
    "BmmBackward0": ("_saved_self", "_saved_mat2"),
}
"""Products, and the attributes that hold the values of their factors."""
LAYERS: Final = (
    "AddmmBackward0",
    "BaddbmmBackward0",
    "ConvolutionBackward0",
    "NativeBatchNormBackward0",
    "NativeGroupNormBackward0",
    "NativeLayerNormBackward0",
    "CudnnBatchNormBackward0",
    "EmbeddingBackward0",
    "EmbeddingBagBackward0",
    "MkldnnRnnLayerBackward0",
)
"""Operations of layers of networks."""
LINEAR: Final = (
    "AddBackward0",
    "AddBackward1",
    "SubBackward0",
    "SubBackward1",
    "RsubBackward1",
    "NegBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "UnsqueezeBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "TBackward0",
    "TransposeBackward0",
    "CloneBackward0",
    "AliasBackward0",
    "ToCopyBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "IndexBackward0",
    "UnbindBackward0",
    "SplitBackward0",
    "StackBackward0",
    "CatBackward0",
    "DiagonalBackward0",
)
_MASKS: Final = {
    "MulBackward0": ("_saved_self", "_saved_other"),
    "WhereBackward0": ("_saved_condition",),
}
_EQUAL: Final = 1e-6
"""Largest relative difference of equal numbers."""
_STEPS: Final = 6
"""Operations, back from a reduction, among which a mask is looked for."""


def name_of(node: Any) -> str:
    """Name of a node's operation in autograd, such as `MeanBackward0`."""
    name: str = node.name()
    return name.rpartition("::")[2]


def operation(node: Any) -> str:
    """Name of a node's operation as users know it, such as `mean`."""
    name = name_of(node)
    return _FUSED.get(name) or name.partition("Backward")[0].lower() or name


def shape_of(node: Any, output: int = 0) -> tuple[int, ...]:
    """Shape of a node's output."""
    return tuple(map(int, node._input_metadata[output].shape))


def _shape_below(node: Any) -> tuple[int, ...]:
    """Shape of the first input of a node that has a gradient: the predictions, whichever way round
    the script gives these and the targets."""
    return shape_of(*next(each for each in node.next_functions if each[0] is not None))


def batch_dim(shape: Sequence[int], samples: int, known: int = 0) -> int:
    """Dimension of the samples: the one that is `known` if it has their number, or the first that
    has, or else the first."""
    if known < len(shape) and shape[known] == samples:
        return known
    return next((dim for dim, size in enumerate(shape) if size == samples), 0)


class GraphStates:
    """Dependences of the tensors of one graph, whose batch has a number of samples.

    `dim` is the dimension of these, where it has another one's size, too. With `without_zeros`
    terms times 0 are left out.
    """

    def __init__(self, samples: int, dim: int = 0, without_zeros: bool = False) -> None:
        self.samples, self.dim, self.without_zeros = samples, dim, without_zeros
        self._known: dict[Any, _State] = {}

    def of(self, node: Any) -> _State:
        """Return the dependence of a node's output."""
        known = self._known
        if node in known:
            return known[node]
        # Without recursion: a penalty that a loop adds up is as deep as the model has parameters.
        stack, left = [node], _BUDGET
        while stack:
            last = stack[-1]
            children = [] if _is_of_data(last) else _inputs(last)
            unknown = [each for each in children if each not in known]
            if not unknown or (left := left - 1) < 0:
                known[last] = self._combined(last, [known.get(f, _State.SAMPLES) for f in children])
                stack.pop()
            else:
                stack += unknown
        return known[node]

    def is_constant(self, node: Any) -> bool:
        """True if a node's output depends on parameters alone."""
        return self.of(node) is _State.CONSTANT

    def _combined(self, node: Any, below: list[_State]) -> _State:
        name = name_of(node)
        if name == "AccumulateGrad":
            known = isinstance(node.variable, torch.nn.Parameter)
            return _State.CONSTANT if known else _State.SAMPLES
        state = max(below, key=lambda each: each.value, default=_State.SAMPLES)
        if state is _State.CONSTANT:
            # Parameters and another tensor without a gradient: the other one may be data.
            mixes = len(below) < len(node.next_functions)
            same = shape_of(node) == shape_of(_inputs(node)[0])
            is_data = name in _LOOKUPS or (mixes and not same)
            return _State.SAMPLES if is_data else state
        if state is _State.SAMPLES:
            if name in _PRODUCTS:
                return _product_state(node, self.samples)
            if name in _FUSED:
                return _State.REDUCED if node._saved_reduction else state
            if name in _WHOLE or not shape_of(node):
                return _State.REDUCED
            if name in _BY_DIM and _reduces_samples(node, self.samples, self.dim):
                return _State.REDUCED
        return state


def _product_state(node: Any, samples: int) -> _State:
    """Tell whether a product of two matrices adds up the samples."""
    (first, _), (second, _) = node.next_functions
    shape = shape_of(node)
    if first is None or samples == 1 or any(f and is_parameter(f) for f in (first, second)):
        return _State.SAMPLES
    adds_up = name_of(node) == "MmBackward0" and shape_of(first)[1] == samples
    return _State.REDUCED if adds_up or math.prod(shape) == 1 else _State.SAMPLES


def _inputs(node: Any) -> list[Any]:
    return [f for f, _ in node.next_functions if f is not None]


def _is_of_data(node: Any) -> bool:
    """True for an operation of a network's layer: its result depends on data."""
    name = name_of(node)
    if name in _PRODUCTS:
        return not all(f is not None and is_parameter(f) for f, _ in node.next_functions)
    return name in LAYERS


def is_parameter(node: Any) -> bool:
    """True for a parameter, also transposed or in another shape."""
    for _ in range(4):
        if name_of(node) == "AccumulateGrad":
            return isinstance(node.variable, torch.nn.Parameter)
        inputs = _inputs(node)
        if len(inputs) != 1 or len(node.next_functions) != 1:
            return False
        node = inputs[0]
    return False


def _reduces_samples(node: Any, samples: int, dim: int) -> bool:
    """True if a reduction of some dimensions reduces that of the samples."""
    shape = shape_of(*node.next_functions[0])
    dims = dims_of(node, len(shape))
    at = batch_dim(shape, samples, dim)
    return len(dims) == len(shape) or at in dims


def dims_of(node: Any, rank: int) -> tuple[int, ...]:
    """Return the dimensions that a node reduces, of a tensor of so many."""
    dims = getattr(node, "_saved_dim", None)
    if dims is None or dims == ():
        return tuple(range(rank))
    several = (dims,) if isinstance(dims, int) else tuple(dims)
    # Autograd keeps a negative dimension as an unsigned number.
    return tuple((d - (1 << 64) if d >= 1 << 63 else d) % rank if rank else 0 for d in several)


def chain_to(root: torch.Tensor, term: LossTerm) -> tuple[type, ...]:
    """Return the types of nodes from a loss to its only term; none if another one may join on the
    way, or the term's count cannot be told there alone."""
    kinds: list[type] = []
    node: Any = root.grad_fn
    while node is not None and len(kinds) < _LONGEST_CHAIN:
        kinds.append(type(node))
        if node == term.reduces:
            return tuple(kinds) if name_of(node) in _FUSED and not term.is_sum else ()
        inputs = _inputs(node)
        node = inputs[0] if len(inputs) == 1 and name_of(node) in SCALES else None
    return ()


def count_along(root: torch.Tensor, chain: Sequence[type]) -> float | None:
    """Return what `find_terms` returns as the count of the only term of a loss, given `chain_to` of
    an earlier one; None if this one is another kind of loss."""
    # Each of these operations has a type of its own.
    node: Any = root.grad_fn
    for kind in chain[:-1]:
        if type(node) is not kind:
            return None
        node = next(iter(_inputs(node)), None)
    last: Any = node
    if type(node) is not chain[-1] or last._saved_reduction != 1:
        return None
    weight = getattr(last, "_saved_total_weight", None)
    if weight is not None:
        return float(_number_of(weight))
    return float(math.prod(_shape_below(last)))


def find_terms(
    roots: Sequence[torch.Tensor],
    states: GraphStates,
    of_loops: Collection[str] = (),
    gradients: Sequence[torch.Tensor | None] = (),
) -> LossTerms:
    """Return the terms of a loss, or of several: the tensors on which backward is called.

    Those of single samples, one by one, are joined to one term: a sum over samples. Of one sample
    alone, only those whose names `of_loops` has, which a loop adds up.

    Args:
        gradients: those that backward is given, of the first roots.
    """
    terms = LossTerms()
    stack: list[tuple[Any, Any, tuple[Divisor, ...]]] = []
    for root, gradient in zip_longest(roots, gradients):
        node = root.grad_fn
        if node is None:
            continue
        if root.ndim and states.of(node) is _State.SAMPLES:
            # Backward of a vector is that of its sum, or that divided by a number.
            by = () if gradient is None else _divisor_given(gradient)
            terms.is_given |= by is None
            terms.terms.append(LossTerm(node, node, "sum", True, 0.0, tuple(root.shape), by or ()))
        else:
            stack.append((node, node, ()))
    while stack:
        node, point, divisors = stack.pop()
        for child, is_alone, more in _visited(node, point, divisors, states, terms):
            is_again = more == (_JOIN,) and divisors[:1] == more
            stack.append(
                (child, point if is_alone else child, divisors if is_again else (*more, *divisors))
            )
    terms.terms = _joined(terms.terms, states, of_loops)
    return terms


def _divisor_given(gradient: torch.Tensor) -> tuple[Divisor, ...] | None:
    """Return the number that a gradient of a vector divides each of its elements by; None for a
    gradient whose elements differ."""
    if not gradient.numel():
        return ()
    least, most = (float(each) for each in gradient.detach().aminmax())
    if not most - least <= _EQUAL * abs(most):
        return None
    return (Divisor(float(f"{1 / most:.6g}")),) if most else ()


def _joined(
    terms: Sequence[LossTerm], states: GraphStates, of_loops: Collection[str]
) -> list[LossTerm]:
    """Return terms with one in the place of those of single samples."""
    samples, dim = states.samples, states.dim
    groups: dict[tuple[str, bool], list[LossTerm]] = {}
    for term in terms:
        groups.setdefault((term.name, term.is_sum), []).append(term)
    result = []
    for (name, _), group in groups.items():
        text = f"{name} of each sample"
        can = len(group) % samples == 0 and (samples > 1 or text in of_loops)
        if not (can and all(is_of_one(each.reduces, samples, dim) for each in group)):
            for term in group:
                kept = [d for d in term.divisors if d is not _JOIN and not d.is_of_list]
                result.append(replace(term, divisors=tuple(kept)))
            continue
        outer = [_outer(each.divisors) for each in group]
        common = 0
        while all(len(each) > common for each in outer) and (
            len({each[-1 - common] for each in outer}) == 1
        ):
            common += 1
        divisors = outer[0][len(outer[0]) - common :]
        node = group[0].node
        result.append(
            LossTerm(
                node, group[0].reduces, text, True, 0.0, (samples,), divisors, each=tuple(group)
            )
        )
    order = {id(term.node): place for place, term in enumerate(terms)}
    return sorted(result, key=lambda term: order[id(term.node)])


def _outer(divisors: tuple[Divisor, ...]) -> tuple[Divisor, ...]:
    """Return the divisors of a sum of several terms, without those of one of them."""
    if _JOIN not in divisors:
        return ()
    return tuple(each for each in divisors[divisors.index(_JOIN) :] if each is not _JOIN)


def is_of_one(node: Any, samples: int, dim: int) -> bool:
    """True if a node reduces a single sample, of those in a dimension of the batch."""
    has_samples = False
    for _ in range(_DEEPEST):
        shape = shape_of(node)
        if len(shape) > 1 and shape[0] == 1 and not has_samples:
            return True
        # It may also be a sample with so many elements.
        has_samples |= len(shape) > 1 and shape[0] == samples
        below = [each for each in _inputs(node) if not is_parameter(each)]
        name = name_of(node)
        if not below or (name in ("CatBackward0", "StackBackward0") and len(below) > 1):
            return False  # Of several samples' rows.
        is_one = name in ("SelectBackward0", "UnbindBackward0") and node._saved_dim == dim
        if is_one and shape_of(below[0])[dim : dim + 1] == (samples,):
            return True
        node = below[0]
    return False


def _visited(
    node: Any,
    point: Any,
    divisors: tuple[Divisor, ...],
    states: GraphStates,
    into: LossTerms,
) -> list[tuple[Any, bool, tuple[Divisor, ...]]]:
    """Find the terms at a node, whose output has no dimension of samples. `point` is the highest
    node from which all gradients go there.

    Returns the nodes below that may have terms; True if there is one alone; and the divisor.
    """
    name = name_of(node)
    if states.is_constant(node):
        into.has_constants = True
        return []
    if name in _FUSED and node._saved_reduction:
        into.terms.append(_fused_term(node, point, divisors, states.samples))
        return []
    children = _inputs(node)
    if name in (*_MEANS, *_SUMS) and states.of(children[0]) is _State.SAMPLES:
        into.terms.append(_reduction(node, point, divisors))
        return []
    of_samples = [each for each in children if not states.is_constant(each)]
    are_reduced = all(states.of(each) is _State.REDUCED for each in of_samples)
    if name in _PRODUCTS or name in ("DotBackward0", "VdotBackward0"):
        if are_reduced and len(of_samples) == 1:
            into.note_learned(node, of_samples[0])
            return [(of_samples[0], False, (_JOIN,))]
        if not are_reduced and all(size == 1 for size in shape_of(node)):
            into.terms.append(LossTerm(point, node, "product", True, 0.0, (), divisors))
            return []
        into.unknown.append("product over the batch")
        return []
    if name.startswith(("MulBackward", "DivBackward")):
        if len(of_samples) == 1 and (name[0] == "M" or of_samples[0] is children[0]):
            if states.without_zeros and _is_by_zero(node, name):
                return []
            into.note_learned(node, of_samples[0])
            is_alone = len(children) == 1  # The gradient of a learned weight goes elsewhere.
            return [(of_samples[0], is_alone, _divisor(node, name, len(children)))]
    elif name in (*LINEAR, *_MEANS, *_SUMS) and are_reduced:
        into.has_constants |= len(of_samples) < len(children)
        more: tuple[Divisor, ...] = ()
        if name.startswith(("Add", "Stack", "Cat")):
            more = (_JOIN,)
        elif name in _MEANS:
            shape = shape_of(children[0])
            more = (Divisor(float(math.prod(shape) / math.prod(shape_of(node))), is_of_list=True),)
        return [(each, len(children) == 1, more) for each in of_samples]
    is_hidden = isinstance(node, torch.autograd.function.BackwardCFunction)
    (into.hidden if is_hidden else into.unknown).append(operation(node))
    return []


def _divisor(node: Any, name: str, operands: int) -> tuple[Divisor, ...]:
    """Return the number that a node divides by, if it is one."""
    value = None if operands > 1 else _other_of(node)  # By a parameter, a learned temperature.
    is_tensor = isinstance(value, torch.Tensor)
    if value is None or (is_tensor and value.numel() != 1):
        return ()
    number, is_own = float(value), is_tensor and _is_own(value)
    if name.startswith("Div"):
        return (Divisor(number, is_own),)
    return (Divisor(1 / number, is_own, is_factor=True),) if number else ()


def _other_of(node: Any) -> Any:
    """Return the number or tensor by which a node multiplies or divides its only operand that has a
    gradient."""
    saved = (node._saved_other, getattr(node, "_saved_self", None))
    return next((each for each in saved if each is not None), None)


def _is_by_zero(node: Any, name: str) -> bool:
    value = _other_of(node) if name[0] == "M" and len(_inputs(node)) == 1 else None
    return value is not None and not (
        bool(value.any()) if isinstance(value, torch.Tensor) else value
    )


def _is_own(value: torch.Tensor) -> bool:
    """False for a tensor that stands for a Python number, which never promotes another's type."""
    probe = torch.float16 if value.dtype.is_floating_point else torch.int8
    return torch.result_type(value, torch.tensor(1, dtype=probe, device=value.device)) != probe


def _fused_term(node: Any, point: Any, divisors: tuple[Divisor, ...], samples: int) -> LossTerm:
    name, is_sum = operation(node), node._saved_reduction == 2
    counted = hasattr(node, "_saved_total_weight")
    shape = tuple(node._saved_target.shape) if counted else _shape_below(node)
    numel = math.prod(shape)
    count = float(node._saved_total_weight) if counted and not is_sum else float(numel)
    # One element of each sample is not padding.
    pads = count == numel != samples and len(shape) > 0 and not _selects(node)
    varies = counted and node._saved_weight is not None
    return LossTerm(point, node, name, is_sum, count, shape, divisors, pads, varies)


def _reduction(node: Any, point: Any, divisors: tuple[Divisor, ...]) -> LossTerm:
    shape = shape_of(*node.next_functions[0])
    is_sum = name_of(node) in _SUMS
    dims = dims_of(node, len(shape)) if name_of(node) in _BY_DIM else range(len(shape))
    count = float(math.prod(shape[d] for d in dims))
    name = "sum" if is_sum else "mean"
    pads = len(dims) > 1 and not _selects(node)
    inner = _inner_divisors(node) if is_sum else ()
    return LossTerm(point, node, name, is_sum, count, shape, (*inner, *divisors), pads)


def _inner_divisors(node: Any) -> tuple[Divisor, ...]:
    """Return the numbers that all elements of a sum are divided by before they are added up: taken
    for counts where they follow from the samples, as one outside would be."""
    divisors: tuple[Divisor, ...] = ()
    for below in _below(node):
        name = name_of(below)
        if name == "DivBackward0":
            divisors += _divisor(below, name, len(_inputs(below)))
        elif name not in ("MulBackward0", "NegBackward0", "ViewBackward0", "SqueezeBackward0"):
            break
    return tuple(replace(each, is_tensor=False) for each in divisors)


def _selects(node: Any) -> bool:
    """True if elements are selected, as by a mask, shortly before they are reduced."""
    level = [node]
    for _ in range(8):
        level = [f for each in level for f, _ in each.next_functions if f is not None][:16]
        if any(name_of(f) in ("IndexBackward0", "MaskedSelectBackward0") for f in level):
            return True
    return False


def has_mask(node: Any) -> bool:
    """True if a node reduces elements some of which a mask has made 0, or selected ones."""
    fills = any(name_of(each).startswith("MaskedFill") for each in _below(node))
    return fills or _selects(node) or any(not bool(each.all()) for each in _masks_below(node))


def selects_nothing(node: Any) -> bool:
    """True if a node reduces no element that counts: there are none, or a mask is zero throughout.

    Takes time in proportion to the mask.
    """
    for below in _below(node):
        if not math.prod(shape_of(below)):
            return True
    return any(not each.any() for each in _masks_below(node))


def _below(node: Any) -> Iterator[Any]:
    """Yield the nodes below one that lead to a single other each, the nearest first."""
    for _ in range(_STEPS):
        below = _inputs(node)
        if len(below) != 1:
            return
        node = below[0]
        yield node


def _masks_below(node: Any) -> Iterator[torch.Tensor]:
    """Yield what may be masks of the elements that a node reduces."""
    if hasattr(node, "_saved_ignore_index"):  # A cross entropy leaves labels out by itself.
        left_out = node._saved_ignore_index
        yield node._saved_target != (left_out - 2**64 if left_out >= 2**63 else left_out)
    for below in _below(node):
        saved = [getattr(below, name, None) for name in _MASKS.get(name_of(below), ())]
        yield from (each for each in saved if isinstance(each, torch.Tensor))
