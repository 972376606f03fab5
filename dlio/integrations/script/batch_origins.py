"""The batches that the terms of a loss come from, where several loaders' meet in a step.

A rank whose batch of one loader is a stand-in, or is whole on every rank, does not count its terms
as those of its part of another loader's batch. Calls of torch's functions are followed from the
batches to the loss, in such steps alone.
"""

import os
from collections.abc import Callable, MutableMapping
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from dlio.exchange.batch_share import tensors_of
from dlio.integrations.script.script_assigner import ScriptBatch

_NODES: Final = 2_000
"""Nodes of a term that are looked at."""
_TORCH: Final = os.path.dirname(torch.__file__)
_ORIGINALS: Final[dict[Any, dict[str, Any]]] = {
    torch.Tensor: {**vars(torch._C.TensorBase), **vars(torch.Tensor)},
    **{
        module: dict(vars(module))
        for module in (torch, torch.functional, torch.nn.functional, torch.autograd)
    },
}
"""Attributes of torch before a script has replaced any."""


class BatchOrigins(TorchFunctionMode):
    """Follows batches between `start` and `close`.

    Args:
        batch_of: returns the batch that a tensor of a loader is from.
    """

    def __init__(self, batch_of: Callable[[torch.Tensor], ScriptBatch | None]) -> None:
        super().__init__()
        self._batch_of = batch_of
        self._of_tensor: MutableMapping[torch.Tensor, frozenset[ScriptBatch]]
        self._of_tensor = WeakIdKeyDictionary()
        self._of_node: dict[Any, frozenset[ScriptBatch]] = {}
        self._is_on = False

    def start(self) -> None:
        """Begin to follow the batches of a step."""
        if not self._is_on:
            self._is_on = True
            torch._C._push_on_torch_function_stack(self)

    def close(self) -> None:
        """End, also while modes of the script's own are on."""
        if self._is_on:
            self._is_on = False
            take_mode_off(self)
        self._of_tensor.clear()
        self._of_node.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = original_of(func)(*args, **(kwargs or {}))
        self.passed((args, kwargs or {}), result)
        return result

    def passed(self, inputs: object, result: object) -> None:
        """Note a function that has made a result of inputs."""
        batches: set[ScriptBatch] = set()
        for each in tensors_of(inputs):
            batch = self._batch_of(each)
            batches.update(self._of_tensor.get(each, ()) if batch is None else (batch,))
        if batches:
            for each in tensors_of(result):
                self._of_tensor[each] = frozenset(batches)
                if each.grad_fn is not None:
                    self._of_node[each.grad_fn] = frozenset(batches)

    def of(self, node: Any) -> frozenset[ScriptBatch]:
        """Return the batches that a node of a loss's graph is computed from, as far as is seen."""
        batches: set[ScriptBatch] = set()
        stack, seen = [node], {node}
        while stack and len(seen) < _NODES:
            last = stack.pop()
            if (known := self._of_node.get(last)) is not None:
                batches.update(known)
                continue
            below = [f for f, _ in last.next_functions if f is not None and f not in seen]
            seen.update(below)
            stack += below
        return frozenset(batches)


def take_mode_off(mode: TorchFunctionMode) -> None:
    """Take a mode off torch's stack, wherever it is there."""
    above = []
    while torch._C._len_torch_function_stack():
        if (last := torch._C._pop_torch_function_stack()) is mode:
            break
        above.append(last)
    for each in reversed(above):
        torch._C._push_on_torch_function_stack(each)


def original_of(func: Any) -> Any:
    """Return torch's own function for one that the script, a package or dlio has put into its
    place: torch names the present attribute, which has been called already."""
    code = getattr(func, "__code__", None)
    if code is None or code.co_filename.startswith(_TORCH):
        return func
    for owner, originals in _ORIGINALS.items():
        for name, present in vars(owner).items():
            if present is func:
                return originals.get(name, func)
    return func
