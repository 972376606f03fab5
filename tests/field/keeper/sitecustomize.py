"""Save the tensors that a script has trained, without a change of the script.

Python imports a module of this name, if it is on its path, before a program. Parameters and buffers
are kept from the moment on that a module registers them, in their order, and saved when the process
ends, to `$FIELD_KEEPS/RANK.pt`. `$FIELD_SEED` seeds Python, NumPy and torch at the start, as `dlio
run` does, and `$FIELD_RESEED` seeds all generators again at the first forward pass.
"""

import atexit
import importlib.abc
import importlib.machinery
import os
import random
import sys
from collections.abc import Callable
from typing import Any, cast

_KEPT: dict[str, Any] = {}
"""Parameters and buffers, by their number and name."""


class _ModuleWatch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function as soon as a module is imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        self._loader, spec.loader = spec.loader, self
        return cast(importlib.machinery.ModuleSpec, spec)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self._then(module)


def _hook(module: Any) -> None:
    """Install the hooks of torch's modules."""
    module.register_module_parameter_registration_hook(_keeper("parameter"))
    module.register_module_buffer_registration_hook(_keeper("buffer"))
    if "FIELD_RESEED" in os.environ:

        def begins(*_: object) -> None:
            handle.remove()
            _seed(int(os.environ["FIELD_RESEED"]))
            sys.modules["torch"].manual_seed(int(os.environ["FIELD_RESEED"]))

        handle = module.register_module_forward_pre_hook(begins)
    atexit.register(_save, os.getpid())


def _keeper(kind: str) -> Callable[[object, str, object], None]:
    def keep(module: object, name: str, tensor: object) -> None:
        if tensor is not None:
            _KEPT[f"{kind} {len(_KEPT)} {type(module).__name__}.{name}"] = tensor

    return keep


def _seed(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - scripts draw from the global generator


def _save(process: int) -> None:
    import torch

    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    tensors = {name: each.detach().cpu() for name, each in _KEPT.items() if not each.is_meta}
    if tensors and os.getpid() == process:
        torch.save(tensors, f"{os.environ['FIELD_KEEPS']}/{rank}.pt")


if "FIELD_KEEPS" in os.environ:
    _ModuleWatch("torch.nn.modules.module", _hook)
if "FIELD_SEED" in os.environ:
    _seed(int(os.environ["FIELD_SEED"]))
    _ModuleWatch("torch", lambda torch: torch.manual_seed(int(os.environ["FIELD_SEED"])))
