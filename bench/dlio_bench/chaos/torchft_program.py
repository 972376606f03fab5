"""A training under torchft, as torchft's README and its train_ddp.py show it.

    PYTHON -I torchft_program.py supervise FOLDER     # Lighthouse and replica groups of one process
    PYTHON -I torchft_program.py train FOLDER RANK    # one of them

It stands alone, as it runs in an environment that has torchft and torch, and not dlio. FOLDER holds
`settings.json`, which `torchft_job` writes. Each replica group writes

- `rank-<number>-<process>.jsonl`: its committed steps, in the format of `stamps`, with the number
  of torchft's quorum as generation;
- `batches-<number>-<process>.jsonl`: a line for each batch, before its gradients are summed:
  `epoch`, `batch`, `samples`, `step`, `quorum`, and `sums`, false if torchft puts zeros in their
  place, as the group joins. The batch is in the model if it is in the sum and its step was
  committed in this quorum by anyone;
- `position-<number>.json`: where it stands in its share of the data, after each step, as torchft
  recommends to keep it; a group that is started again goes on from there.
"""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import IO, Any, Final, NoReturn, Protocol, TypedDict, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dlio.util.units import counted


class TorchftSettings(TypedDict):
    """Settings of a job."""

    data: str
    """Folder with `pictures.npy`, uint8 (n, 3, h, w), and `labels.npy`, int64 (n,)."""
    model: str
    """File of a model that was scripted."""
    ranks: int
    """Replica groups."""
    batch_size: int
    epochs: int
    pause_s: float
    """Time to sleep in each step."""
    heartbeat_ms: int
    """Time without a heartbeat after which the Lighthouse takes a group as lost."""
    seed: int
    bench: int
    """Process of the bench: the supervisor ends without it."""
    plain: bool
    """Train by torch's DistributedDataParallel, without torchft."""


_FINISHED: Final = "finished"
"""File in the folder of a job whose training has come to its end."""
_ALL_LOST: Final = 3
"""Exit code of a replica group that would begin anew, as nobody has the model any more."""
_MOST_STARTS: Final = 10
"""Replica groups that are started again, with no step between, after which the job has failed."""
_RATE: Final = 0.001
_LATE_S: Final = 10.0
"""Time after the last step in which all replica groups are to end."""
_START_S: Final = 120.0
_GLOO_S: Final = 5.0
_MANAGER_S: Final = 30.0
_POLL_S: Final = 0.01
_PDEATHSIG: Final = 1
_MEAN_AND_DEVIATION: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


RAISE: Final = signal.SIGUSR1
"""Signal on which a rank raises an exception before its next optimizer step."""
EXIT: Final = signal.SIGUSR2
"""Signal on which a rank ends with code 0, wherever it is."""
HANG: Final = signal.SIGRTMIN
"""Signal on which a rank never comes to its next optimizer step, and computes."""
STACKS: Final = signal.SIGQUIT
"""Signal on which a rank writes the stacks of its threads into its job's folder."""


class StampFile:
    """A rank's file of stamps, in the format of `stamps`, and the faults that the rank makes.

    The bench kills and stops ranks from outside. For an exit or an exception it sends a signal,
    and the rank does the rest. The file stays open until the process ends, which may be by a late
    signal.
    """

    def __init__(self, folder: str, rank: int) -> None:
        name = f"{rank}-{os.getpid()}"
        self._rank = rank
        self._file = open_lines(os.path.join(folder, f"rank-{name}.jsonl"))
        self._stacks: IO[str] = open(  # noqa: SIM115
            os.path.join(folder, f"stacks-{name}.txt"), "w", encoding="utf-8"
        )
        self._fault = 0
        """Signal of a fault to make before the next step; 0 if there is none."""
        faulthandler.register(STACKS, self._stacks, all_threads=True)
        signal.signal(RAISE, self._on_fault)
        signal.signal(HANG, self._on_fault)
        signal.signal(EXIT, lambda _, __: os._exit(0))

    def begin(self, step: int) -> None:
        """Stamp the begin, after `step` optimizer steps of others."""
        self.write({"kind": "begin", "rank": self._rank, "pid": os.getpid(), "step": step})

    def step(self, epoch: int, step: int, generation: int, ranks: int) -> None:
        """Stamp a finished step."""
        where = {"epoch": epoch, "step": step}
        self.write({"kind": "step", **where, "generation": generation, "ranks": ranks})

    def end(self) -> None:
        """Stamp the end."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.write({"kind": "end", "peak_KiB": peak})

    def write(self, line: Mapping[str, object]) -> None:
        """Stamp anything. One write: a rank that is killed leaves whole lines."""
        os.write(self._file, json.dumps({"t": time.monotonic(), **line}).encode() + b"\n")

    def pause(self, seconds: float) -> None:
        """Sleep in the place of a GPU's computing, and make a fault."""
        if seconds:
            time.sleep(seconds)
        if self._fault == RAISE:
            raise RuntimeError("dlio bench chaos: a bug of this rank alone")
        while self._fault == HANG:
            pass

    def _on_fault(self, number: int, frame: FrameType | None) -> None:
        self._fault = number


def open_lines(path: str) -> int:
    """Open a file to which lines are added."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def main(argv: Sequence[str]) -> int:
    """Run a role; returns the exit code."""
    role, folder, *rest = argv
    os.chdir(folder)
    with open("settings.json", encoding="utf-8") as file:
        settings = cast(TorchftSettings, json.load(file))
    if role == "supervise":
        return _Supervisor(settings).run()
    _die_with_parent()
    return _ReplicaGroup(settings, int(rest[0])).run()


class TorchftSampler(Protocol):
    """The samplers of torch and torchft."""

    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Iterator[int]: ...


class _Supervisor:
    """Starts a Lighthouse and the replica groups, and starts groups again that end."""

    def __init__(self, settings: TorchftSettings) -> None:
        self._settings = settings
        self._environment = dict(os.environ)
        self._groups: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self._newest = 0.0

    def run(self) -> int:
        _die_with_parent()
        if os.getppid() != self._settings["bench"]:
            return 1
        signal.signal(signal.SIGTERM, _end)
        lighthouse = None
        if not self._settings["plain"]:
            from torchft.coordination import LighthouseServer

            # torchft's README, "Running DDP": these values but for the heartbeat, which has its
            # default there.
            lighthouse = LighthouseServer(
                bind="[::]:0",
                min_replicas=1,
                join_timeout_ms=10_000,
                quorum_tick_ms=100,
                heartbeat_timeout_ms=self._settings["heartbeat_ms"],
            )
            self._environment["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        try:
            for rank in range(self._settings["ranks"]):
                self._start(rank)
            return self._watch()
        finally:
            for group in self._groups.values():
                group.kill()
                group.wait()
            if lighthouse is not None:
                lighthouse.shutdown()

    def _start(self, rank: int) -> None:
        self._groups[rank] = subprocess.Popen(
            [sys.executable, "-I", __file__, "train", os.curdir, str(rank)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )

    def _watch(self) -> int:
        while not os.path.exists(_FINISHED):
            for rank, group in self._groups.items():
                if not group.poll():
                    continue  # It runs, or has ended of itself.
                if group.returncode == _ALL_LOST or self._settings["plain"]:
                    return 1
                if self._given_up():
                    print(
                        f"{counted(self._starts, 'start')} in a row made no step", file=sys.stderr
                    )
                    return 1
                self._start(rank)
            if all(group.poll() == 0 for group in self._groups.values()):
                break
            time.sleep(_POLL_S)
        deadline = time.monotonic() + _LATE_S
        for group in self._groups.values():
            # Groups that have not joined again by now, or are stopped, are left out.
            with suppress(subprocess.TimeoutExpired):
                group.wait(max(0.0, deadline - time.monotonic()))
        return 0 if os.path.exists(_FINISHED) else 1

    def _given_up(self) -> bool:
        newest = 0.0
        for rank in self._groups:
            with suppress(FileNotFoundError):
                newest = max(newest, os.stat(f"position-{rank}.json").st_mtime)
        self._starts = 1 if newest > self._newest else self._starts + 1
        self._newest = newest
        return self._starts > _MOST_STARTS


class _ReplicaGroup:
    def __init__(self, settings: TorchftSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._again = os.path.exists(f"ready-{rank}")
        self._at = (0, 0)
        """Epoch, and batch of this group in it."""

    def run(self) -> int:
        settings = self._settings
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings["ranks"]))
        load: Any = torch.jit.load
        self._model: nn.Module = load(settings["model"])
        self._model.train()
        self._sgd = torch.optim.SGD(self._model.parameters(), _RATE, momentum=0.9, nesterov=True)
        self._pictures = torch.from_numpy(np.load(os.path.join(settings["data"], "pictures.npy")))
        self._labels = torch.from_numpy(np.load(os.path.join(settings["data"], "labels.npy")))
        self._dataset = torch.utils.data.TensorDataset(self._pictures, self._labels)
        mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in _MEAN_AND_DEVIATION)
        self._mean, self._deviation = 255 * mean, 255 * deviation
        # Batches of all groups that have all samples once, an epoch.
        share = -(-len(self._labels) // settings["ranks"])
        self._in_epoch = -(-share // settings["batch_size"])
        self._steps = settings["epochs"] * self._in_epoch
        self._stamps = StampFile(os.curdir, self._rank)
        return self._run_plain() if settings["plain"] else self._run_torchft()

    def _run_plain(self) -> int:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DistributedSampler

        settings = self._settings
        timeout = timedelta(seconds=_MANAGER_S)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.path.abspath('store')}",
            rank=self._rank,
            world_size=settings["ranks"],
            timeout=timeout,
        )
        model = DistributedDataParallel(self._model)
        sampler: TorchftSampler = DistributedSampler(
            self._dataset, settings["ranks"], self._rank, seed=settings["seed"]
        )
        self._begin()
        for done in range(self._steps):
            samples = self._batch(sampler)
            self._sgd.zero_grad()
            self._backward(model, samples)
            self._stamps.pause(settings["pause_s"])
            self._sgd.step()
            self._stamps.step(self._at[0], done + 1, 0, settings["ranks"])
            self._advance()
        self._end()
        dist.destroy_process_group()
        return 0

    def _run_torchft(self) -> int:
        from torch._C._distributed_c10d import GradBucket, TCPStore
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
        from torchft.data import DistributedSampler

        settings = self._settings

        class Gloo(ProcessGroupGloo):  # type: ignore[misc]  # torchft may be missing here
            """Tells of quorums, and of the first sum in each step."""

            quorum = -1
            before_sum: Callable[[], None]

            def configure(self, *args: object) -> None:
                self.quorum = cast(int, args[4])
                super().configure(*args)

            def allreduce(self, tensors: object, opts: object) -> object:
                self.before_sum()
                return super().allreduce(tensors, opts)

        group = Gloo(timeout=timedelta(seconds=_GLOO_S))

        class Model(DistributedDataParallel):  # type: ignore[misc]
            """Goes on where a peer is lost within a sum.

            The hook of torchft 0.2.0 fails an assertion then, if gloo sums, and all groups that are
            left end with it. This one does as `Manager.allreduce` promises: the error is kept for
            `should_commit`, and the gradients are not used.
            """

            @staticmethod
            def _comm_hook(
                state: Manager, bucket: GradBucket
            ) -> torch.futures.Future[torch.Tensor]:
                state.allreduce(bucket.buffer()).wait()
                done = torch.futures.Future[torch.Tensor]()
                done.set_result(bucket.buffer())
                return done

        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            timeout=timedelta(seconds=_MANAGER_S),
            # All have the same weights at first, for which torchft advises this.
            init_sync=False,
            replica_id=f"group_{self._rank}",
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            hostname="localhost",
        )
        model = Model(manager, self._model)
        optimizer = Optimizer(manager, self._sgd)
        sampler = DistributedSampler(
            self._dataset,
            replica_rank=self._rank,
            num_replica_groups=settings["ranks"],
            group_rank=0,
            num_replicas=1,
            seed=settings["seed"],
        )
        if self._again:
            with suppress(FileNotFoundError), open(f"position-{self._rank}.json") as file:
                epoch, batch = json.load(file)
                self._at = (epoch, batch)
        self._begin()
        name = f"batches-{self._rank}-{os.getpid()}.jsonl"
        batches = open_lines(name)
        written = False
        samples: list[int] = []

        def note() -> None:
            nonlocal written
            if not written:
                epoch, batch = self._at
                line = {
                    "epoch": epoch,
                    "batch": batch,
                    "samples": self._dealt(samples),
                    "step": manager.current_step() + 1,
                    "quorum": group.quorum,
                    "sums": manager.is_participating(),
                }
                os.write(batches, json.dumps(line).encode() + b"\n")
            written = True

        group.before_sum = note
        while manager.current_step() < self._steps:
            written = False
            samples = self._batch(sampler)
            optimizer.zero_grad()
            self._backward(model, samples)
            self._stamps.pause(settings["pause_s"])
            before = manager.current_step()
            optimizer.step()
            step = manager.current_step()
            if step > before:
                if step == 1 and self._again:
                    print("all replica groups were lost, and the model with them", file=sys.stderr)
                    return _ALL_LOST
                ranks = manager.num_participants()
                self._stamps.step(self._at[0], step, group.quorum, ranks)
            self._advance()
            self._save_position()
        self._end()
        # The threads of torchft would wait for groups that have left before.
        os._exit(0)

    def _batch(self, sampler: TorchftSampler) -> list[int]:
        """Return the samples of this group's next batch."""
        epoch, batch = self._at
        sampler.set_epoch(epoch)
        size = self._settings["batch_size"]
        return list(sampler)[batch * size : (batch + 1) * size]

    def _dealt(self, samples: list[int]) -> list[int]:
        """Leave out samples that the sampler has put in only to give all groups as many."""
        first = self._at[1] * self._settings["batch_size"]
        places = (
            self._rank + self._settings["ranks"] * k for k in range(first, first + len(samples))
        )
        whole = len(self._labels)
        return [each for each, place in zip(samples, places, strict=True) if place < whole]

    def _advance(self) -> None:
        epoch, batch = self._at
        self._at = (epoch, batch + 1) if batch + 1 < self._in_epoch else (epoch + 1, 0)

    def _save_position(self) -> None:
        path = f"position-{self._rank}.json"
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(self._at, file)
        os.replace(f"{path}.new", path)

    def _backward(self, model: nn.Module, samples: list[int]) -> None:
        images = self._pictures[samples].float().sub_(self._mean).div_(self._deviation)
        loss = functional.cross_entropy(model(images), self._labels[samples])
        torch.autograd.backward(loss)

    def _load(self, state: Mapping[str, dict[str, object]]) -> None:
        self._model.load_state_dict(state["model"])
        self._sgd.load_state_dict(state["optimizer"])

    def _state(self) -> dict[str, dict[str, object]]:
        return {"model": self._model.state_dict(), "optimizer": self._sgd.state_dict()}

    def _begin(self) -> None:
        """Stamp the begin; groups that are not started again wait for each other before."""
        open(f"ready-{self._rank}", "w").close()
        deadline = time.monotonic() + _START_S
        others = [f"ready-{rank}" for rank in range(self._settings["ranks"])]
        while not all(map(os.path.exists, others)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all groups were ready in {_START_S:g} s")
            time.sleep(_POLL_S)
        self._stamps.begin(0)

    def _end(self) -> None:
        self._stamps.end()
        open(_FINISHED, "w").close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
