"""Ways to write a checkpoint, behind one interface, and the stall of training by each."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import nn

from dlio.comm.comm_protocol import Communicator
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.checkpoint.checkpoint_store import Checkpoints, Tensors
from dlio.train.checkpoint.tensor_reader import ignore_no_dist_warning
from dlio.util.units import counted
from dlio_bench.results.repeats import turns
from dlio_bench.results.report_values import Figure, Ratio
from dlio_bench.results.terminal import advance

_TIMEOUT_S: Final = 1800.0
_BLOCK: Final = 8 << 20


class Method:
    """Writes a rank's tensors below a folder, as checkpoints that have a number."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.makedirs(folder)

    def save(self, number: int, tensors: Tensors) -> None:
        """Begin to write; return when the caller may go on, if not yet change the tensors."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Return when the tensors may be changed."""

    def finish(self) -> None:
        """Return when all is on the disk."""

    def read(self, number: int, tensors: Tensors) -> None:
        """Read a checkpoint into tensors of the same names and shapes."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove all that was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))


class Dlio(Method):
    """`dlio.train.checkpoint`: copies while the next step computes, verified by a checksum."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        # Each rank writes a checkpoint of its own here, as the others do: the shards are equal.
        self._checkpoints = Checkpoints(folder, SingleCommunicator(), keep=99)
        self._checkpoints.__enter__()

    def save(self, number: int, tensors: Tensors) -> None:
        named = {f"all/{name}": tensor for name, tensor in tensors.items()}
        self._checkpoints.save(number, named, {}, named.keys())

    def before_update(self) -> None:
        self._checkpoints.copied()

    def finish(self) -> None:
        self._checkpoints.wait()
        if self._checkpoints.failures:
            raise UsageError(f"{self._folder}: {self._checkpoints.failures[-1]}")

    def read(self, number: int, tensors: Tensors) -> None:
        stored = self._checkpoints.newest()
        if stored is None:
            raise UsageError(f"{self._folder}: no intact checkpoint")
        for name, tensor in stored.read("all/").items():
            tensors[name].copy_(tensor)

    def close(self) -> None:
        self._checkpoints.__exit__(None, None, None)
        super().close()


class DcpSave(Method):
    """torch.distributed.checkpoint's `save`, which returns when all is written."""

    def save(self, number: int, tensors: Tensors) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        ignore_no_dist_warning()
        save(dict(tensors), checkpoint_id=self._path(number), no_dist=True)

    def read(self, number: int, tensors: Tensors) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        ignore_no_dist_warning()
        load(dict(tensors), checkpoint_id=self._path(number), no_dist=True)


class DcpAsync(DcpSave):
    """torch.distributed.checkpoint's `async_save`, which returns when all is copied."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._future: Future[Any] | None = None

    def save(self, number: int, tensors: Tensors) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        ignore_no_dist_warning()
        future = async_save(dict(tensors), checkpoint_id=self._path(number), no_dist=True)
        assert isinstance(future, Future)
        self._future = future

    def finish(self) -> None:
        if self._future is not None:
            self._future.result(_TIMEOUT_S)
            self._future = None


class Dd(Method):
    """`dd conv=fsync` of as many zeros: the most that one stream of writes gets."""

    def save(self, number: int, tensors: Tensors) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        self._dd("if=/dev/zero", f"of={self._path(number)}", f"count={size}", "conv=fsync")

    def read(self, number: int, tensors: Tensors) -> None:
        self._dd(f"if={self._path(number)}", "of=/dev/null")

    @staticmethod
    def _dd(*words: str) -> None:
        flags = ["iflag=count_bytes"] if any(word.startswith("count") for word in words) else []
        command = ["dd", *words, f"bs={_BLOCK}", *flags, "status=none"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise UsageError(f"{' '.join(command)}: {done.stderr.strip()}")


METHODS: Final[Mapping[str, Callable[[str], Method]]] = {
    "dlio": Dlio,
    "dcp save": DcpSave,
    "dcp async_save": DcpAsync,
    "dd": Dd,
}


def random_state(size: int, seed: int, tensor_bytes: int = 64 << 20) -> dict[str, torch.Tensor]:
    """Return float32 tensors of random values with `size` bytes in all, rounded up to 4."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    left = -(-size // 4)
    while left > 0:
        count = min(left, tensor_bytes // 4)
        tensors[f"tensor{len(tensors)}"] = torch.randn(count, generator=generator)
        left -= count
    return tensors


# A training loop on this processor that checkpoints interrupt


STALLING: Final = ("dlio", "dcp async_save", "dcp save")
"""Methods whose stalls are measured."""
_WARM_UP: Final = 3
_LAYERS: Final = 4


@dataclass(frozen=True, slots=True)
class Stall:
    """One checkpoint of a method during training; seconds."""

    method: str
    blocked_s: float
    """Time in which training could not go on, because of calls."""
    slower_s: float
    """Time that the steps until the next checkpoint took beyond as many plain ones, calls and the
    work of other threads included."""
    step_s: float
    """Median time of a plain step, before this checkpoint."""
    steps: int
    """Steps that were looked at."""


class TrainingLoop(Protocol):
    """A training loop."""

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Train on a batch; return the seconds that `before_update` took."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors, not copied; they change only after `before_update`."""


class StallTraining:
    """A multilayer perceptron with AdamW; its state is the parameters and both moments."""

    def __init__(self, state_bytes: int, batch_size: int) -> None:
        width = max(8, int((state_bytes / (3 * 4 * _LAYERS)) ** 0.5))
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self._net = nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-4)
        self._batch = torch.randn(batch_size, width)
        self.step()

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Train on a batch; return the seconds that `before_update` took."""
        self._net(self._batch).square().mean().backward()
        began = time.perf_counter()
        before_update()
        blocked_s = time.perf_counter() - began
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return blocked_s

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and the optimizer's state, not copied."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._net.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{key}"] = value
        return tensors


def measure_stalls(
    folder: str,
    methods: tuple[str, ...],
    training: TrainingLoop,
    steps: int,
    repeats: int,
    comm: Communicator,
) -> list[Stall]:
    """Return the stalls of each method's checkpoints, the methods in turn.

    Before each checkpoint `steps` plain steps are timed, and `steps` after it.
    """
    for _ in range(_WARM_UP):
        training.step()
    running: dict[str, Method] = {
        name: METHODS[name](os.path.join(folder, f"stall-{k}-{comm.rank}"))
        for k, name in enumerate(methods)
    }
    stalls = []
    try:
        for repeat, name in turns(running, repeats + 1):
            stall = _one(name, running[name], training, steps, repeat + 1, comm)
            advance()
            if repeat:  # The first allocates memory, and does not count.
                stalls.append(stall)
    finally:
        for method in running.values():
            method.close()
    return stalls


def _one(
    name: str, method: Method, training: TrainingLoop, steps: int, number: int, comm: Communicator
) -> Stall:
    plain = []
    for _ in range(steps):
        began = time.perf_counter()
        training.step()
        plain.append(time.perf_counter() - began)
    comm.barrier()
    began = time.perf_counter()
    method.save(number, training.tensors())
    blocked_s = time.perf_counter() - began
    for _ in range(steps):
        blocked_s += training.step(method.before_update)
    total_s = time.perf_counter() - began
    method.finish()
    step_s = median(plain)
    return Stall(name, blocked_s, total_s - sum(plain), step_s, steps)


def stall_figures(
    stalls: Sequence[Stall], every: int, common: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Figure], list[Ratio]]:
    """Return milliseconds of each method's stall, its share of `every` steps, and ratios to DCP's;
    all have some labels in common."""
    figures, blocked = [], {}
    for name in dict.fromkeys(each.method for each in stalls):
        mine = [each for each in stalls if each.method == name]
        labels = {**common, "method": name}
        blocked[name] = tuple(1e3 * each.blocked_s for each in mine)
        share = tuple(100 * each.blocked_s / (every * each.step_s) for each in mine)
        slower = tuple(1e3 * each.slower_s for each in mine)
        steps = tuple(1e3 * each.step_s for each in mine)
        figures += [
            Figure("blocked", "ms", blocked[name], labels, "lower"),
            Figure(f"blocked, of {counted(every, 'step')}", "%", share, labels, "lower"),
            Figure("slower", "ms", slower, labels, "lower"),
            Figure("plain step", "ms", steps, labels, "lower"),
        ]
    ratios = [
        Ratio(
            f"blocked, dlio / {name}",
            tuple(a / b for a, b in zip(blocked["dlio"], values, strict=True)),
            dict(common),
            better="lower",
        )
        for name, values in blocked.items()
        if name != "dlio"
    ]
    return figures, ratios
