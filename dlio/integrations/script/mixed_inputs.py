"""Samples that a script mixes with others of their batch before a gradient is seen.

Mixup, a standardisation by the batch's own mean, weights that are divided by their sum: on ranks
each part of a batch is mixed with itself, and the training is another one. The calls of torch's
functions are looked at in some steps of a run, from the batch to the network or the loss. What the
network itself mixes is seen in the graph of the loss (see `mixed_samples`).
"""

import itertools
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import wraps
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from dlio.exchange.batch_share import tensors_of
from dlio.exchange.loss_terms import GraphStates, name_of, operation, shape_of
from dlio.integrations.script.batch_origins import original_of, take_mode_off
from dlio.integrations.script.collate_draws import CollateDraws
from dlio.integrations.script.script_lines import script_line

_Order: TypeAlias = tuple[int, ...]
REDUCTIONS: Final = frozenset(
    "mean nanmean sum nansum prod std var std_mean var_mean max min amax amin aminmax median "
    "nanmedian quantile nanquantile norm vector_norm logsumexp any all count_nonzero bincount "
    "histc".split()
)
"""Functions of torch whose result joins values of several samples, or of parts of one."""
_NORMALISES: Final = {
    "softmax": 1,
    "log_softmax": 1,
    "softmin": 1,
    "logcumsumexp": 1,
    "normalize": 2,
}
"""Functions whose results are each made of several values, with the place of their dimension."""
_WEIGHTS: Final = ("sum", "softmax", "softmin")
"""Functions by which weights of samples may add up to 1."""
_PICKS: Final = frozenset(
    "__getitem__ select narrow split chunk unbind tensor_split topk unique masked_select "
    "nonzero".split()
)
"""Functions whose result may have some of the samples alone."""
_CREATES: Final = frozenset(
    "arange zeros ones full empty linspace eye new_zeros new_ones new_full new_empty new_tensor "
    "zeros_like ones_like full_like empty_like cumsum cumprod argmax argmin argsort".split()
)
"""Functions whose result has no value of the samples', or that of no single one."""
_SELECTS: Final = (
    "SelectBackward0",
    "UnbindBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
)
_NODES: Final = 200
"""Nodes back from a number of the network's in which a tensor of all samples is looked for."""
_LEAST: Final = 2


class _Kind(Enum):
    """A way in which the values of a tensor depend on samples."""

    SAMPLES = auto()
    """Each on one sample."""
    STATISTIC = auto()
    """All on all samples of the batch, such as their mean."""
    LOSS = auto()
    """All on what the network makes of all samples, such as a loss that is taken as a number."""
    MIXED = auto()
    """Each on a sample and on others."""
    EARLIER = auto()
    """On samples of batches before, as a queue or a memory bank keeps them."""
    ORDER = auto()
    """All are places of samples, in an order that was drawn."""


_LASTING: Final = (_Kind.SAMPLES, _Kind.STATISTIC, _Kind.MIXED, _Kind.EARLIER)


@dataclass(frozen=True, slots=True)
class _Knowledge:
    """Knowledge of a tensor that was computed from a batch."""

    kind: _Kind
    order: _Order | None = None
    """Places of the samples in their batch; None for 0, 1, 2..."""
    function: str = ""
    """The function of torch that has brought samples together."""
    line: str = ""
    """The place in the user's files that called it."""


class MixedInputs(TorchFunctionMode):
    """Looks at torch's functions while the script computes on a batch, between `start` and `close`.

    Args:
        say: tells the user something.
        draws: what functions that make batches draw is noted there.
    """

    def __init__(self, say: Callable[[str], None], draws: CollateDraws | None = None) -> None:
        super().__init__()
        self._say, self._draws = say, draws or CollateDraws()
        self._states: MutableMapping[torch.Tensor, _Knowledge] = WeakIdKeyDictionary()
        self._moved_outputs: MutableMapping[torch.Tensor, _Knowledge] = WeakIdKeyDictionary()
        """Tensors of the network whose samples are in another order."""
        self._earlier: MutableMapping[torch.Tensor, _Knowledge] = WeakIdKeyDictionary()
        """Tensors made of samples of earlier batches, but for these themselves."""
        self._batch: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        self._earlier_line = ""
        """The line where earlier samples meet a gradient in this batch."""
        self._meets = False
        """True once samples of this batch meet a gradient."""
        self._met: Callable[[], None] = lambda: None
        self._samples = self._likely_dim = 0
        self._rows: set[int] = set()
        self._is_on = self._has_told = False
        self.requires_gradient: Callable[[], None] = lambda: None
        """Called where the script has a tensor other than a parameter require a gradient."""
        self._has_told_compiled = False

    def start(
        self,
        tensors: Sequence[torch.Tensor],
        samples: int,
        dim: int = 0,
        rows: Collection[int] = (),
        met: Callable[[], None] = lambda: None,
    ) -> bool:
        """Begin with the tensors of this rank's part of a batch.

        Returns False if another batch is looked at, or this one has too few samples.

        Args:
            dim: the dimension of samples where several have that size.
            rows: numbers of rows that all samples together have, such as of boxes.
            met: called where the samples, or values made of them, meet a gradient.
        """
        if self._is_on or samples < _LEAST:
            return False
        self._likely_dim, self._rows = dim, {samples, *rows}
        self._samples, self._is_on, self._has_told, self._met = samples, True, False, met
        self._earlier_line, self._meets = "", False
        self._states.update(self._earlier)
        self._states.update(dict.fromkeys(tensors, _Knowledge(_Kind.SAMPLES)))
        self._batch.update(dict.fromkeys(tensors, True))
        torch._C._push_on_torch_function_stack(self)
        return True

    def knows_order(self, order: torch.Tensor) -> None:
        """Note a random order of this rank's samples: some of it are a choice of samples."""
        if self._is_on:
            self._states[order] = _Knowledge(_Kind.ORDER)

    def close(self) -> None:
        """End, also while modes of the script's own are on."""
        if not self._is_on:
            return
        self._is_on = False
        take_mode_off(self)
        # A script that takes batches ahead computes on the earlier one alone.
        if self._earlier_line and self._meets:
            self._say(
                f"{self._earlier_line}: values of samples of earlier batches, as in a queue or a "
                "memory bank, meet those of this one there, and each rank has kept those of its "
                "parts alone: the training is not one process's"
            )
        for tensor, state in self._states.items():
            if state.kind in _LASTING and tensor not in self._batch:
                self._earlier[tensor] = _Knowledge(_Kind.EARLIER)
        self._batch.clear()
        self._states.clear()
        self._moved_outputs.clear()

    def around_collate(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that makes a batch of samples, which may mix them: it is looked at in its
        1st, 2nd, 4th, 8th call and so on."""
        calls = itertools.count(1)
        texts: list[str] = []

        def say_once(text: str) -> None:  # Each batch may draw on other lines.
            if not texts:
                texts.append(text)
                self._say(text)

        @wraps(collate)
        def run(samples: Any) -> Any:
            if next(calls).bit_count() != 1 or not isinstance(samples, list):
                return collate(samples)
            watch = MixedInputs(self._say)  # Of this thread.
            watch.start((), len(samples))
            try:
                with self._draws.watched(len(samples), say_once):
                    batch = collate(samples)
                watch._meets_gradient(list(tensors_of(batch)))
            finally:
                watch.close()
            return batch

        return run

    def passed(self, inputs: object, result: object) -> None:
        """Note a compiled function that has made a result of inputs: its own calls are not seen."""
        given, results = list(tensors_of(inputs)), list(tensors_of(result))
        has_gradient = any(each.requires_grad for each in results)
        if not self._has_told_compiled and (has_gradient or any(x in self._states for x in given)):
            self._has_told_compiled = True
            self._say(
                f"{script_line()}: samples of a batch that meet inside a compiled function, as in "
                "mixup, a contrastive loss or a mean over the batch, are not seen, and each rank "
                "has its part of the batch alone: start the script once with TORCHDYNAMO_DISABLE=1 "
                "to be told of them"
            )
        if has_gradient and not any(each.requires_grad for each in given):
            self._meets_gradient(given)
        else:
            self._called("", (inputs,), {}, result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = original_of(func)
        result = func(*args, **(kwargs or {}))
        if (kwargs and kwargs.get("requires_grad")) or _sets_requires_grad(func):
            self.requires_gradient()
        if torch._C._functorch.peek_interpreter_stack() is None:
            self._called(getattr(func, "__name__", ""), args, kwargs or {}, result)
        return result

    def _called(self, name: str, args: Any, options: dict[str, Any], result: Any) -> None:
        inputs = list(tensors_of((args, options)))
        results = list(tensors_of(args[0] if name == "__setitem__" else result))
        if not results:
            return
        known = [state for x in inputs if (state := self._states.get(x)) is not None]
        if name == "stack" and len(inputs) == self._samples and not known:
            known = [_Knowledge(_Kind.SAMPLES)]  # Of samples that are made a batch.
        if any(x.requires_grad for x in inputs):
            if torch.is_grad_enabled() and results[0].requires_grad:
                adds = name.strip("_") in ("add", "sub", "radd", "rsub", "iadd", "isub")
                weights = [options.get(each) for each in ("weight", "pos_weight")]
                self._meets_gradient(inputs, weights, adds)
                self._orders_meet(inputs, args, options, results, name)
                return
            known += self._detached(name, inputs, results)
        if not known or name.strip("_") in _CREATES:
            return
        state = self._combined(name, args, options, known, results)
        for each in results[:1] if name == "sort" else results:  # And not its indices.
            if state is None or each.requires_grad:
                self._states.pop(each, None)
            else:
                self._states[each] = state

    def _detached(
        self, name: str, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[_Knowledge]:
        """Return knowledge of a network's values that are taken as numbers: some for each sample,
        or some for all of them."""
        if results[0].requires_grad:
            return []
        known = []
        for x in inputs:
            if x.grad_fn is None or x in self._states:
                continue
            if not self._rows.isdisjoint(x.shape[:2]) and not self._is_of_parameters(x):
                known.append(_Knowledge(_Kind.SAMPLES))
            elif _joins_samples(x.grad_fn, self._samples):
                known.append(_Knowledge(_Kind.LOSS, None, operation(x.grad_fn), script_line()))
        if name == "grad" and any(self._samples in each.shape[:2] for each in results):
            return [_Knowledge(_Kind.SAMPLES)]  # Of a loss by its samples.
        return known

    def _is_of_parameters(self, x: torch.Tensor) -> bool:
        return x.grad_fn is None or GraphStates(self._samples).is_constant(x.grad_fn)

    def _meets_gradient(
        self,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[object] = (),
        adds: bool = False,
    ) -> None:
        """Tell of inputs of a function that has a gradient. `adds` if it adds them up, so that a
        single number is without effect."""
        for each in inputs:
            state = self._states.get(each)
            # A single number may be the divisor of a mean, which counts (see `loss_terms`).
            is_many = each.numel() > 1 or any(each is weight for weight in weights)
            if state is None or (adds and each.numel() == 1):
                continue
            if state.kind is _Kind.EARLIER:
                self._earlier_line = self._earlier_line or script_line()
            self._meets |= state.kind is _Kind.SAMPLES
            if state.kind in (_Kind.SAMPLES, _Kind.MIXED):
                self._met()
            is_statistic = state.kind is _Kind.STATISTIC and is_many
            if is_statistic or state.kind in (_Kind.MIXED, _Kind.LOSS):
                self._tell(state.function, state.line)

    def _tell(self, function: str, line: str) -> None:
        self._has_told = True
        # Else nothing tells that the gradient is as many times as large as there are ranks.
        remedy = (
            ". If it makes weights of losses that add up to 1, the sum of these is too large "
            "by the number of ranks: divide the sum of weighted losses by that of the weights"
        )
        self._say(
            f"{line}: samples of a batch meet there ({function} over the batch) before the "
            "network or the loss takes them, and each rank has its part of the batch alone: the "
            f"training is not quite that of one process{remedy if function in _WEIGHTS else ''}"
        )

    def _orders_meet(
        self,
        inputs: Sequence[torch.Tensor],
        args: Any,
        options: dict[str, Any],
        results: Sequence[torch.Tensor],
        name: str,
    ) -> None:
        """Follow the order of samples in tensors of the network, and tell of two that meet."""
        orders: dict[_Order | None, bool] = {}
        for x in inputs:
            state = self._states.get(x, self._moved_outputs.get(x))
            if state is not None and state.kind is _Kind.SAMPLES:
                orders[state.order] = True
            elif x.grad_fn is not None and self._samples in x.shape[:1]:
                orders.setdefault(None, False)
        plain = name.strip("_")
        if len(orders) > 1:
            others = [x for x in inputs if x not in self._states and x not in self._moved_outputs]
            is_sample = orders.get(None) or not all(map(self._is_of_parameters, others))
            if is_sample and not self._has_told:
                self._tell("samples in another order", script_line())
                return
        order = next((each for each in orders if each is not None), None)
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if order is None and tensor is not None and (tensor.grad_fn or tensor in self._states):
            order = self._moved(plain, tensor, args, options, results)
        if order is not None and self._samples in results[0].shape[:2]:
            self._moved_outputs[results[0]] = _Knowledge(_Kind.SAMPLES, order, plain)

    def _combined(
        self,
        name: str,
        args: Any,
        options: dict[str, Any],
        known: Sequence[_Knowledge],
        results: Sequence[torch.Tensor],
    ) -> _Knowledge | None:
        """Return what the results of a function depend on; None for nothing of this batch."""
        if all(state.kind is _Kind.ORDER for state in known):
            if self._samples in results[0].shape[:2]:
                return known[0]
            return _Knowledge(_Kind.MIXED, None, "a random choice", script_line())
        known = [state for state in known if state.kind is not _Kind.ORDER]
        earlier = [state for state in known if state.kind is _Kind.EARLIER]
        if earlier:
            return earlier[0]
        for kind in (_Kind.MIXED, _Kind.LOSS, _Kind.STATISTIC):
            of_kind = [state for state in known if state.kind is kind]
            if of_kind:
                first = of_kind[0]
                has_samples = any(state.kind is _Kind.SAMPLES for state in known)
                is_same = kind is _Kind.MIXED or not has_samples
                return (
                    first if is_same else _Knowledge(_Kind.MIXED, None, first.function, first.line)
                )
        plain = name.strip("_")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and plain in REDUCTIONS and self._reduces(tensor, args, options):
            return _Knowledge(_Kind.STATISTIC, None, plain, script_line())
        if tensor is not None and plain in _NORMALISES:
            place = _NORMALISES[plain]
            dim = options.get("dim", args[place] if len(args) > place else None)
            if dim is None:  # As torch chooses.
                dim = 1 if plain == "normalize" else int(tensor.ndim not in (0, 1, 3))
            if tensor.ndim and dim % tensor.ndim == self._dim(tensor.shape):
                return _Knowledge(_Kind.MIXED, None, plain, script_line())
        orders = {state.order for state in known}
        if len(orders) > 1:
            moved = next(state for state in known if state.order is not None)
            return _Knowledge(_Kind.MIXED, None, moved.function, script_line())
        if tensor is not None and tensor in self._states:
            order = self._moved(plain, tensor, args, options, results)
            if order is not None:
                return _Knowledge(_Kind.SAMPLES, order, plain.replace("getitem", "an index"))
        has_samples = all(self._samples in each.shape[:2] for each in results)
        return known[0] if has_samples or name not in _PICKS else None

    def _dim(self, shape: Sequence[int]) -> int | None:
        """Return the dimension of samples; None if it cannot be told."""
        dims = [dim for dim, size in enumerate(shape[:2]) if size == self._samples]
        if len(dims) > 1:
            return self._likely_dim
        return dims[0] if dims else None

    def _reduces(self, first: torch.Tensor, args: Any, options: dict[str, Any]) -> bool:
        dims = options.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(dims, torch.Tensor):
            return False  # The larger one of two.
        if dims is None or dims == () or not isinstance(dims, int | tuple | list):
            return True
        dim = self._dim(first.shape)
        every = [dims] if isinstance(dims, int) else dims
        return dim is not None and dim in [each % first.ndim for each in every]

    def _moved(
        self,
        name: str,
        first: torch.Tensor,
        args: Any,
        options: dict[str, Any],
        results: Sequence[torch.Tensor],
    ) -> _Order | None:
        """Return the order of samples after a function that changes it; None for one that does
        not."""
        dim = self._dim(first.shape)
        if dim is None:
            return None
        places = torch.arange(self._samples)
        if name == "flip":
            dims = options.get("dims", args[1:])
            flat = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
            moved = places.flip(0) if dim in [each % first.ndim for each in flat] else places
        elif name == "roll":
            shifts = options.get("shifts", args[1] if len(args) > 1 else 1)
            dims = options.get("dims", args[2] if len(args) > 2 else ())
            pairs = zip(_several(shifts), _several(dims), strict=False)
            shift = [by for by, each in pairs if each % first.ndim == dim]
            if not _several(dims) and first.ndim == 1:
                shift = _several(shifts)
            moved = places.roll(shift[0], 0) if shift else places
        elif name == "sort" and first.ndim == 1:
            moved = results[-1]
        elif name in ("getitem", "index_select"):
            index = _only_index(args[-1] if name == "index_select" else args[1], dim)
            moved = places if index is None or len(index) != self._samples else index
        else:
            return None
        is_known = moved.device.type != "meta" and not torch.equal(moved.cpu(), places)
        return tuple(moved.tolist()) if is_known else None


def _sets_requires_grad(func: Any) -> bool:
    return getattr(func, "__self__", None) is torch.Tensor.requires_grad


def _several(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _as_tensor(key: Any) -> Any:
    """Return a key as it is, or a tensor for an array or a list of numbers."""
    is_list = isinstance(key, list) and all(isinstance(each, int) for each in key)
    is_array = isinstance(key, np.ndarray) and key.dtype.kind == "i"
    return torch.as_tensor(key, dtype=torch.int64) if is_list or is_array else key


def _only_index(key: Any, dim: int) -> torch.Tensor | None:
    """Return the tensor that alone selects among samples; None for another key."""
    keys = [_as_tensor(each) for each in (key if isinstance(key, tuple) else [key])]
    place = keys[dim] if len(keys) > dim and not any(each is Ellipsis for each in keys) else None
    is_index = isinstance(place, torch.Tensor) and place.dtype == torch.int64 and place.ndim == 1
    return place if is_index else None


def _joins_samples(node: Any, samples: int) -> bool:
    """True if a value without a dimension of samples is made of a tensor that has one."""
    stack, seen = [node], {node}
    while stack and len(seen) < _NODES:
        last = stack.pop()
        if samples in shape_of(last)[:2]:
            if not GraphStates(samples).is_constant(last):
                return True
        elif name_of(last) not in (*_SELECTS, "AccumulateGrad"):
            below = [f for f, _ in last.next_functions if f is not None and f not in seen]
            seen.update(below)
            stack += below
    return False
