"""A model whose ranks end in the middle of a step, at a place that the environment chooses.

`ENDS='{"1": ["kill", 5, 0]}'` ends rank 1 in its fifth forward pass (place -1) or in the backward
that follows, when the gradient of parameter number 0, 1, ... in backward's order is ready. Other
places are in the sums of gradients:

| place | the rank ends |
|---|---|
| `begun` | when it has begun all sums of the step, before it waits for any |
| `first` | when it has the first sum |
| `closed` | when it has all sums |
| `taken` | when it has written them into the gradients |
| `late` | never: it learns of the loss when two others have all sums, and it has none |

Where some ranks had all sums and others lacked some, a file `given-RANK-NUMBER` is written.

Modules that `ALSO_IMPORT` names are imported, too, before the model is made.
"""

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlio.cli.resize import ResizeOptions, join, leave
from dlio.comm import Communicator
from dlio.errors import PeerLost
from dlio.exchange.round_commit import RoundCommit, RoundReport
from dlio.exchange.synchronous_sgd import SynchronousSgd
from dlio.launch.job_folder import PREFIX
from dlio.loader.planned_engine.pipeline import Pipeline
from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport

_LATE_S = 40.0
_RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0")


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    elif how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "exit":
        os._exit(3)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        return  # It leaves when its batch is done.
    elif how == "loop":
        while True:
            time.sleep(0.001)  # Not all the time: other tests want the processor.
    elif how == "held":
        ctypes.PyDLL(None).sleep(600)  # It does not release Python's lock.
    Pipeline.close = _closes  # type: ignore[assignment,method-assign]
    raise RuntimeError("a bug of this rank alone")


def _closes(pipeline: Pipeline) -> None:
    sys.stderr.write("a rank with a bug closes its loader, for which others would wait\n")


class Ending(nn.Module):
    """A model of which some ranks end.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.how, self.step, self.place = json.loads(os.environ.get("ENDS", "{}")).get(
            _RANK, ["", 0, 0]
        )
        self.passes = 0
        parameters = list(reversed(list(self.parameters())))
        _watch_sums(self)
        if self.how and not isinstance(self.place, str) and self.place >= 0:
            parameters[self.place].register_post_accumulate_grad_hook(self._ready)

    def _ready(self, _: torch.Tensor) -> None:
        if self.passes == self.step:
            _end(self.how)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            if self.how and self.place == -1 and self.passes == self.step:
                _end(self.how)
        logits: torch.Tensor = self.layers(images)
        return logits


def _lack(pattern: str) -> None:
    """Fail when two others have all sums; no call of MPI meanwhile lets this rank have them."""
    from dlio.comm.mpi import one_at_a_time

    deadline = time.monotonic() + _LATE_S
    with one_at_a_time:
        while len(list(Path().glob(pattern))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise PeerLost("a loss that this rank sees first")


def _watch_sums(model: Ending) -> None:
    """Have this rank end, or be late, at a place in the sums, and note givings."""
    sum_all, take, reconcile = (
        SynchronousSgd._wait_for_sums,
        SynchronousSgd._take_means,
        RoundCommit.reconcile,
    )
    given: list[int] = []

    def here(*places: str) -> bool:
        return model.place in places and model.passes == model.step

    def waiting(self: SynchronousSgd) -> None:
        if here("late"):
            model.place = 0
            _lack(f"sums-{model.step}-*")
        if here("begun", "first"):
            if model.place == "first":
                self._sums[0].wait()
            _end(model.how)
        sum_all(self)
        if "late" in os.environ.get("ENDS", ""):
            Path(f"sums-{model.passes}-{_RANK}").touch()
        if here("closed"):
            _end(model.how)

    def taking(self: SynchronousSgd) -> None:
        take(self)
        if here("taken"):
            _end(model.how)

    def reconciling(self: RoundCommit, reports: Sequence[RoundReport], comm: Communicator) -> None:
        if len({each.closed for each in reports}) > 1:
            given.append(len(reports))
            Path(f"given-{_RANK}-{len(given)}").touch()
        reconcile(self, reports, comm)

    patched: Any = SynchronousSgd
    patched._wait_for_sums, patched._take_means = waiting, taking
    patched = RoundCommit
    patched.reconcile = reconciling


class Digest(Callback):
    """Writes a digest of the weights of each epoch and rank."""

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in run.model.parameters())
        name = f"weights-{report.epoch}-{_RANK}"
        Path(name).write_text(hashlib.sha256(weights).hexdigest(), encoding="ascii")


class Resize(Callback):
    """Asks for more ranks or fewer after some steps: `RESIZE='{"5": 2, "20": -2}'`."""

    def after_step(self, run: Run) -> None:
        more = json.loads(os.environ.get("RESIZE", "{}")).get(str(run.updates), 0)
        if more and run.comm.rank == 0:
            job = Path(os.environ["DLIO_DONE"]).parent.name.removeprefix(PREFIX)
            (join if more > 0 else leave)(ResizeOptions(job, abs(more)))
            time.sleep(0.5)  # The ranks look at requests a few times in a second.


for name in os.environ.get("ALSO_IMPORT", "").split():
    import_module(name)


class Flip(Callback):
    """Changes a bit of one rank's weights and of its optimizer's state after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        if run.updates == self.step and str(self.rank) == _RANK:
            weights = next(run.model.parameters())
            weights.view(torch.int32)[0, 0] ^= 1
            run.optimizer.state[weights]["momentum_buffer"][0, 0] += 1


class Slow(Callback):
    """Sleeps in each step of one rank."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def after_step(self, run: Run) -> None:
        if str(self.rank) == _RANK:
            time.sleep(self.seconds)


def make(classes: int, image_size: int) -> nn.Module:
    """Make three layers, of which two fill a bucket each."""
    pixels, width = 3 * (image_size // 2) ** 2, 512
    layers = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(pixels, width), nn.Tanh()]
    layers += [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)]
    return Ending(nn.Sequential(*layers))


def make_noisy(classes: int, image_size: int) -> nn.Module:
    """Layers that depend on the order of samples, on the batch and on random numbers."""
    pixels, width = 8 * (image_size // 2) ** 2, 256
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Flatten(), nn.Dropout(0.3), nn.Linear(pixels, width), nn.Tanh()]
    layers += [nn.Dropout(0.5), nn.Linear(width, classes)]
    return Ending(nn.Sequential(*layers))
