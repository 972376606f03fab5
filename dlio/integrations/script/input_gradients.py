"""Gradients of samples and of what a network makes of them: one process's, as far as is known.

A rank's loss is the mean over its part of a batch. What autograd leaves in an input, such as that
of an adversarial sample, is therefore larger than in one process, by the inverse of that part;
ranks average those of parameters alone. Here they become the part's share of the batch's loss.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dlio.exchange.distribute import OF_SAMPLES
from dlio.exchange.loss_terms import GraphStates, name_of
from dlio.integrations.script.script_lines import script_line
from dlio.integrations.script.share import ScriptContext

_NODES: Final = 20_000
"""Most nodes of a graph among which such tensors are looked for."""
_INPUT_AT: Final = {
    "MmBackward0": 0,
    "BmmBackward0": 0,
    "LinearBackward0": 0,
    "AddmmBackward0": 1,
    "BaddbmmBackward0": 1,
    "ConvolutionBackward0": 0,
    "MkldnnRnnLayerBackward0": 0,
    "NativeBatchNormBackward0": 0,
    "NativeGroupNormBackward0": 0,
    "NativeLayerNormBackward0": 0,
}
"""Places of a network's values, not of its weights, among the inputs of operations."""
_LEVELS: Final = 8
"""Operations from a tensor to the first of these, such as the addition of a change."""


class InputGradients:
    """Scales the gradients that a backward leaves in tensors that are not parameters.

    Args:
        exchanged: returns the parameters whose gradients ranks average.
    """

    def __init__(
        self, context: ScriptContext, exchanged: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self._context, self._exchanged = context, exchanged
        self.is_used = False
        """True once some tensor has required a gradient that is not a parameter: graphs are
        searched from then on."""
        self._kept: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        """Results of operations that keep their gradients."""

    def around_requiring(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Tensor.requires_grad_`."""

        @wraps(original)
        def requires(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.is_used |= not isinstance(tensor, nn.Parameter)
            return original(tensor, *args, **options)

        return requires

    def around_retaining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Tensor.retain_grad`."""

        @wraps(original)
        def retain(tensor: torch.Tensor) -> Any:
            if tensor.grad_fn is not None:
                self.is_used = self._kept[tensor] = True
            return original(tensor)

        return retain

    def require(self) -> None:
        """Note that some tensor requires a gradient, and is not a parameter."""
        self.is_used = True

    def computes_on(self, inputs: Sequence[object]) -> None:
        """Note the inputs of a module."""
        if not self.is_used:
            for x in inputs:  # Called for each module: no generator.
                if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf:
                    self.is_used |= not isinstance(x, nn.Parameter)

    def is_of_samples(self, tensor: torch.Tensor, roots: Sequence[torch.Tensor] = ()) -> bool:
        """True if a tensor has a part for each sample of this rank's, and is none of parameters.

        One that is as large as a parameter may be a copy of it: what is computed on it, up to
        `roots`, decides, or, before anything is, whether it has a parameter's values.
        """
        size = next((len(at) for at, _ in self._context.places() if len(at) in tensor.shape[:2]), 0)
        if not size or hasattr(tensor, "_dlio_place"):
            return False
        if tensor.grad_fn is not None:
            return not GraphStates(size).is_constant(tensor.grad_fn)
        if getattr(tensor, OF_SAMPLES, False):
            return True
        alike = [each for each in self._exchanged() if tensor.shape == each.shape]
        if alike and roots:
            return _enters_as_samples(tensor, roots)
        return not any(each is tensor or torch.equal(each, tensor) for each in alike)

    @contextmanager
    def backward(self, roots: Sequence[torch.Tensor], keeps_graph: bool) -> Iterator[None]:
        """Scale the gradients that a backward within the `with` statement adds."""
        context = self._context
        if not self.is_used or context.lead is None or context.aside:
            yield
            return
        tensors = [*self._leaves(roots), *(each for each in self._kept if each.requires_grad)]
        before = [each.grad if keeps_graph else _copy(each.grad) for each in tensors]
        of_samples = {each: self.is_of_samples(each, roots) for each in tensors}
        yield
        with torch.set_grad_enabled(keeps_graph):
            for tensor, old in zip(tensors, before, strict=True):
                if (new := tensor.grad) is not None and new is not old:
                    self._scale(tensor, old, new, keeps_graph, of_samples[tensor])

    def _scale(
        self,
        tensor: torch.Tensor,
        old: torch.Tensor | None,
        new: torch.Tensor,
        keeps_graph: bool,
        is_of_samples: bool,
    ) -> None:
        part = self._context.part
        if part is None or not is_of_samples:
            self._context.say(
                f"{script_line()}: the gradient that backward leaves there in a tensor of shape "
                f"{tuple(tensor.shape)}, which no optimizer of the script has, is that of the loss "
                "of each rank's part of a batch: it is not one process's"
            )
        elif part != 1:
            scaled = new * part if old is None else old + (new - old) * part
            if keeps_graph:
                tensor.grad = scaled
            else:
                new.copy_(scaled)

    def _leaves(self, roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        exchanged = {id(each) for each in self._exchanged()}
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(stack)
        while stack and len(seen) < _NODES:
            node: Any = stack.pop()
            if name_of(node) == "AccumulateGrad":
                leaf = node.variable
                if id(leaf) not in exchanged and not _is_of_module(leaf):
                    yield leaf
            below = [f for f, _ in node.next_functions if f is not None and f not in seen]
            seen.update(below)
            stack += below


def _enters_as_samples(leaf: torch.Tensor, roots: Sequence[torch.Tensor]) -> bool:
    """True if a leaf of a graph is the left factor of the first product that has it, or the input
    of a layer, and not its weight."""
    above: dict[Any, list[tuple[Any, int]]] = {}
    nodes = [getattr(root, "grad_fn", None) for root in roots]  # Not of edges of graphs.
    stack: list[Any] = [node for node in nodes if node is not None]
    seen, start = set(stack), None
    while stack and len(seen) < _NODES:
        node = stack.pop()
        if name_of(node) == "AccumulateGrad" and node.variable is leaf:
            start = node
        for place, (below, _) in enumerate(node.next_functions):
            if below is not None:
                above.setdefault(below, []).append((node, place))
                if below not in seen:
                    seen.add(below)
                    stack.append(below)
    level = [start]
    for _ in range(_LEVELS):
        uses = [use for node in level for use in above.get(node, ())]
        known = [(_INPUT_AT.get(name_of(node)), place) for node, place in uses]
        if entered := [place == at for at, place in known if at is not None]:
            return all(entered)
        level = [node for node, _ in uses]
    return False


def _is_of_module(tensor: torch.Tensor) -> bool:
    # Modules' parameters that no optimizer has are compared among the ranks (see `guard`).
    return isinstance(tensor, nn.Parameter) and hasattr(tensor, "_dlio_place")


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()
