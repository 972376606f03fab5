"""Calls of modules and functions that a script has given to `torch.compile`.

A graph has the operations of its first run, and no hook of a module runs inside it: such a call is
prepared as a whole, and draws its random numbers from a state of the rank. The modes that look at
torch's functions are off meanwhile, as the graph would be another one with them, and note the call
as one function.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dlio.integrations.script.batch_origins import BatchOrigins
from dlio.integrations.script.mixed_inputs import MixedInputs

_Call: TypeAlias = Callable[..., Any]
_LOOKS = (BatchOrigins, MixedInputs)


def around_compile(
    original: _Call,
    known: Callable[[], object],
    prepare: Callable[[nn.Module, tuple[Any, ...]], None],
    inside: Callable[[_Call], _Call],
) -> _Call:
    """Wrap `torch.compile`.

    Args:
        known: called before anything is compiled, so that the compiler knows torch's functions.
        prepare: called with each module of a compiled call, and the call's arguments.
        inside: wraps a function that draws random numbers by itself.
    """

    def prepared(call: _Call, modules: Sequence[nn.Module]) -> _Call:
        within = inside(call)

        @wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(*args, **options)  # Part of another graph.
            inputs = (*args, *options.values())
            for module in (*modules, *(each for each in inputs if isinstance(each, nn.Module))):
                for part in module.modules():
                    prepare(part, inputs)
            modes = _take_modes()
            others = [each for each in modes if not isinstance(each, _LOOKS)]
            _put_modes(others)
            try:
                result = within(*args, **options)
            finally:
                for _ in others:
                    torch._C._pop_torch_function_stack()
                _put_modes(modes)
            for mode in modes:
                if isinstance(mode, _LOOKS):
                    mode.passed(inputs, result)
            return result

        return run

    @wraps(original)
    def compiled(model: Any = None, **options: Any) -> Any:
        if options.get("disable") or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return original(model, **options)  # Which compiles nothing.
        if model is None:
            return lambda each: compiled(each, **options)
        known()
        made = original(model, **options)
        modules = list(_modules_of(model))
        if isinstance(made, nn.Module):
            # The hooks are dlio's, and a call of the module made by the compiler changes nothing.
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)`", UserWarning)
            made.forward = prepared(made.forward, modules)
            return made
        return prepared(made, modules)

    return compiled


def _take_modes() -> list[TorchFunctionMode]:
    """Take all modes off torch's stack, and return them from the bottom up."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]


def _put_modes(modes: Sequence[TorchFunctionMode]) -> None:
    for each in modes:
        torch._C._push_on_torch_function_stack(each)


def _modules_of(call: Any) -> Iterator[nn.Module]:
    """Yield the modules on which a function computes, besides its arguments."""
    if isinstance(call, nn.Module):
        yield call
        return
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module):
        yield owner
    elif inspect.isfunction(call):
        names = inspect.getclosurevars(call)
        for each in (*names.nonlocals.values(), *names.globals.values()):
            if isinstance(each, nn.Module):
                yield each
