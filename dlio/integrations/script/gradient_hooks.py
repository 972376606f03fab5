"""Hooks of a script on the gradients of parameters: they get those of the whole batch.

Autograd calls a hook with the gradient of this rank's part. One that clips, normalises or counts
would do so to each part, which is not what one process does. Called once the mean over all ranks is
in `.grad`, it does the same as there. So does an optimizer's step in such a hook.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dlio.integrations.script.mixed_inputs import REDUCTIONS
from dlio.integrations.script.script_lines import script_line


@dataclass(slots=True)
class _HookCall:
    """A call of a hook that waits for the end of a backward."""

    parameter: torch.Tensor
    hook: Callable[[torch.Tensor], torch.Tensor | None]
    before: torch.Tensor | None
    """What earlier backwards had left in `.grad`."""


class GradientHooks:
    """Has hooks on parameters called at the end of `backward`.

    Args:
        waits: tells of a parameter whether its gradient is a mean over all ranks then.
        part: returns the part of the batch's loss that is this rank's, None if it is not known.
        say: tells the user something.
    """

    def __init__(
        self,
        waits: Callable[[torch.Tensor], bool],
        part: Callable[[], float | None],
        say: Callable[[str], None],
    ) -> None:
        self._waits, self._part, self._say = waits, part, say
        self.is_inside = False
        """True within a backward."""
        self._changes: list[_HookCall] = []
        """Calls of hooks that may change a gradient before it is added to `.grad`."""
        self._after: list[_HookCall] = []
        """Calls of hooks of the sum in `.grad`."""

    def around_register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Tensor.register_hook`."""
        return self._around(original, self._changes)

    def around_register_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Tensor.register_post_accumulate_grad_hook`."""
        return self._around(original, self._after)

    def _around(self, original: Callable[..., Any], calls: list[_HookCall]) -> Callable[..., Any]:
        is_change = calls is self._changes

        @wraps(original)
        def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            if str(getattr(hook, "__module__", "")).startswith(("dlio.", "torch.")):
                return original(tensor, hook)
            if not isinstance(tensor, nn.Parameter):
                return original(tensor, self._scaled(hook) if is_change else hook)

            def waiting(argument: torch.Tensor) -> torch.Tensor | None:
                if not self.is_inside or not self._waits(tensor):
                    result: torch.Tensor | None = hook(argument)
                    return result
                before = tensor.grad
                if is_change and before is not None:
                    before = before.detach().clone()
                calls.append(_HookCall(tensor, hook, before))
                return None

            return original(tensor, waiting)

        return register

    def _scaled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that gets one process's gradient of a tensor of samples."""
        line = script_line()

        def scaled(gradient: torch.Tensor) -> torch.Tensor | None:
            part = self._part() if self.is_inside else None
            if part is None or part == 1:
                result: torch.Tensor | None = hook(gradient)
                return result
            with _Reductions() as reductions:
                result = hook(gradient * part)
            if result is not None and reductions.seen:
                self._say(
                    f"{line}: the hook changes the gradient of samples by a {reductions.seen} of "
                    "it, which is that of each rank's part of a batch: unless it is of each sample "
                    "alone, the training is not one process's"
                )
            return result if result is None or not part else result / part

        return scaled

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Call the hooks of a backward that runs inside the `with` block after it."""
        if self.is_inside:
            yield
            return
        self.is_inside = True
        try:
            yield
            changes, after = self._changes[:], self._after[:]
        finally:
            self.is_inside = False
            self._changes.clear()
            self._after.clear()
        with torch.no_grad():
            for call in changes:
                _change(call)
        for call in after:
            call.hook(call.parameter)


class _Reductions(TorchFunctionMode):
    """Sees whether functions join values of a tensor."""

    seen = ""
    """Name of the latest one that has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in REDUCTIONS:
            self.seen = name
        return func(*args, **(kwargs or {}))


def _change(call: _HookCall) -> None:
    """Call a hook with what a backward has added to `.grad`, and put its result there."""
    total = call.parameter.grad
    if total is None:
        return
    added = total if call.before is None else total - call.before
    result = call.hook(added)
    if result is not None:
        total.copy_(result if call.before is None else call.before + result)
