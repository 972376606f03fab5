"""Ways to write a checkpoint, behind one interface."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.checkpoint.checkpoint_store import Checkpoints, Tensors
from dlio.train.checkpoint.tensor_reader import ignore_no_dist_warning

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
        """Remove what was written."""
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
