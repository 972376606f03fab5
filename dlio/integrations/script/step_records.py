"""Records of a script's first optimizer steps, for `dlio run --check`, in one process or a rank.

A record is a folder: `rank0.json` has losses, learning rates, printed lines and names,
`rank0-step3.npz` the gradients and weights of a step. Nothing is pickled.
"""

import contextlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dlio.util.input_files import open_input, read_json
from dlio.util.whole_files import write_json

Array: TypeAlias = npt.NDArray[np.float64]
_SAMPLED: Final = 1 << 16
"""Elements of a tensor that are kept at most: of a larger one each n-th is."""


class EnoughSteps(BaseException):
    """Ends the script after the last step to check. Handlers of the script's for errors do not see
    it."""


@dataclass(slots=True)
class StepRecord:
    """Facts about one optimizer step, after it."""

    optimizer: int
    """Number of the optimizer, by its first step."""
    rates: list[float]
    """Learning rates, one for each group of parameters."""
    losses: int
    """Number of backward passes so far."""
    randoms: int
    """Checksum of torch's random state."""


@dataclass(slots=True)
class ScriptRecord:
    """Facts about one process's first steps; arrays are in files next to it, by step."""

    folder: str = ""
    rank: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    """Values passed to backward; None for those that are not one number."""
    weights: list[float] = field(default_factory=list)
    """Number of this rank's samples in each of them, or 1."""
    printed: str = ""
    names: dict[str, str] = field(default_factory=dict)
    """Name of each parameter, by `optimizer/number`."""
    traits: list[str] = field(default_factory=list)
    """Parts of the training that make ranks differ from one process: `dropout`, `batch norm` ..."""
    complete: bool = False
    """True if the script ran to its end, or to the last step to check."""

    def arrays(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step, counted from 0: `gradient/0/3`, `weight/0/3`, and, when the
        optimizer steps for the first time, `start/0/3`."""
        path = f"{self.folder}/rank{self.rank}-step{step}.npz"
        with open_input(path) as stored, np.load(stored, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    def save(self) -> None:
        """Write the record."""
        values = {
            "steps": [[s.optimizer, s.rates, s.losses, s.randoms] for s in self.steps],
            "losses": self.losses,
            "weights": self.weights,
            "printed": self.printed,
            "names": self.names,
            "traits": self.traits,
            "complete": self.complete,
        }
        write_json(f"{self.folder}/rank{self.rank}.json", values)


def load_record(folder: str, rank: int) -> ScriptRecord | None:
    """Return a process's record, None if it has left none."""
    try:
        values: Any = read_json(f"{folder}/rank{rank}.json")
    except FileNotFoundError:
        return None
    values["steps"] = [StepRecord(*each) for each in values["steps"]]
    return ScriptRecord(folder, rank, **values)


@contextlib.contextmanager
def recorded(record: ScriptRecord, most: int, weight: Callable[[], float]) -> Iterator[None]:
    """Record the steps of the script that runs inside the `with` block; end it after `most`.

    Args:
        weight: returns the number of this rank's samples in the batch that it computes on.
    """
    recorder = _Recorder(record, most, weight)
    before, backward = sys.stdout, torch.autograd.backward
    if record.rank == 0:
        sys.stdout = recorder.output
    torch.autograd.backward = recorder.backward(backward)
    hooks: list[Any] = [
        register_optimizer_step_pre_hook(recorder.before_step),
        register_optimizer_step_post_hook(recorder.after_step),
        register_module_forward_pre_hook(recorder.forward),
        register_module_parameter_registration_hook(recorder.parameter_made),
        register_module_module_registration_hook(recorder.module_made),
    ]
    try:
        yield
        record.complete = True
    except EnoughSteps:
        record.complete = True
    finally:
        for hook in hooks:
            hook.remove()
        sys.stdout, torch.autograd.backward = before, backward
        record.printed = recorder.output.getvalue()
        record.save()


class _Recorder:
    """Hooks into torch that fill a record."""

    def __init__(self, record: ScriptRecord, most: int, weight: Callable[[], float]) -> None:
        self._record, self._most, self._weight = record, most, weight
        self.output = io.StringIO()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._starts: dict[str, Array] = {}
        self._names: dict[torch.Tensor, tuple[nn.Module, str]] = {}
        self._parents: WeakKeyDictionary[nn.Module, tuple[nn.Module, str]] = WeakKeyDictionary()

    def backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def run(tensors: Any, *args: Any, **options: Any) -> None:
            first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            weight, value = self._weight(), None
            original(tensors, *args, **options)
            # Only now: on the ranks it has become the loss of the whole batch, where it can.
            if isinstance(first, torch.Tensor) and first.numel() == 1:
                value = float(first.detach())
            self._record.losses.append(value)
            self._record.weights.append(weight)

        return run

    def parameter_made(self, module: nn.Module, name: str, parameter: object) -> None:
        if isinstance(parameter, torch.Tensor):
            self._names.setdefault(parameter, (module, name))

    def module_made(self, module: nn.Module, name: str, part: object) -> None:
        if isinstance(part, nn.Module):
            self._parents[part] = (module, name)

    def forward(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self._trait("half")
        if not module.training or not torch.is_grad_enabled():
            return
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            self._trait("batch norm")
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rate: object = module.p
        else:
            rate = getattr(module, "dropout", None)  # As in attention and recurrent networks.
        if isinstance(rate, float) and rate > 0:
            self._trait("dropout")

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        for key, parameter in self._parameters(optimizer):
            if key not in self._record.names:
                self._record.names[key] = self._name(parameter, key)
                self._starts[f"start/{key}"] = _kept(parameter)
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    self._trait("half")

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        record = self._record
        arrays, self._starts = self._starts, {}
        for key, parameter in self._parameters(optimizer):
            arrays[f"weight/{key}"] = _kept(parameter)
            gradient = parameter.grad if record.rank == 0 else None
            if gradient is not None:
                arrays[f"gradient/{key}"] = _kept(gradient)
        place = f"{record.folder}/rank{record.rank}-step{len(record.steps)}.npz"
        cast(Any, np.savez)(place, **arrays)
        rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr")]
        randoms = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        number = self._optimizers.index(optimizer)
        record.steps.append(StepRecord(number, rates, len(record.losses), randoms))
        if len(record.steps) >= self._most:
            raise EnoughSteps

    def _parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        number, place = self._optimizers.index(optimizer), 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield f"{number}/{place}", parameter
                place += 1

    def _name(self, parameter: torch.Tensor, key: str) -> str:
        number, place = key.split("/")
        if parameter not in self._names:
            return f"parameter {place} of optimizer {number}"
        module, name = self._names[parameter]
        while module in self._parents:
            module, part = self._parents[module]
            name = f"{part}.{name}"
        return name

    def _trait(self, name: str) -> None:
        if name not in self._record.traits:
            self._record.traits.append(name)


def _kept(tensor: torch.Tensor) -> Array:
    """Return a tensor's elements, of a large one a part, evenly taken; shape (at most 65,536,)."""
    flat = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.reshape(-1)
    flat = flat[:: max(1, -(-flat.numel() // _SAMPLED))]
    values: Array = flat.to("cpu", torch.float64).numpy().copy()
    return values
