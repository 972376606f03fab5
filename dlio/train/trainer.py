"""The trainer: loader -> model -> exchange -> optimizer, on every rank alike."""

import copy
import io
import math
import os
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlio.comm import Communicator, world
from dlio.dataset import Dataset, open_dataset
from dlio.errors import UsageError
from dlio.files import write_whole
from dlio.loader import DataLoader
from dlio.train.config import TrainConfig
from dlio.train.exchange import Exchange, make_exchange
from dlio.train.exchange.buckets import averaged_state, broadcast_state, consensus_distance
from dlio.train.model import make_model
from dlio.train.progress import Progress
from dlio.train.report import EpochReport, RunReport
from dlio.train.trace import Trace

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, as torchvision's models are trained with."""
_MOMENTUM = 0.9
_WEIGHT_DECAY = 5e-4
_COUNTED = ("bytes", "sent", "messages", "late", "healed", "decoded", "decode_saved_s")
_WARM_UP = 0.15
"""Share of the steps in which the learning rate rises to its peak."""


def train(config: TrainConfig) -> RunReport:
    """Train a model on this process's ranks. Collective.

    Raises DlioError for whatever a user can mend; other ranks are then left waiting, until the
    caller ends them (`dlio.comm.abort`).
    """
    config.check_outputs()
    comm = world()
    with ExitStack() as stack:
        data = stack.enter_context(_open(comm, config.source, config, config.tiers, training=True))
        loader = stack.enter_context(_loader(data, config, training=True))
        if not data.crops:
            held = ", ".join(name for name, _ in data.reader.schema.fields)
            raise UsageError(f"{config.source} holds {held}: training wants images with labels")
        mounted = data.mount(comm, config.pretend_nodes)
        held_out = None
        if config.val is not None:
            val = stack.enter_context(
                _open(comm, config.val, config, mounted.spare_tiers(), training=False)
            )
            if list(val.classes) != list(data.classes):
                raise UsageError(
                    f"{config.val} has other classes than {config.source}: "
                    f"{_differing(val.classes, data.classes)}"
                )
            held_out = stack.enter_context(_loader(val, config, training=False))
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores * mounted.nodes.machines // comm.size))
        run = _Run(config, comm, loader, held_out)
        stack.callback(run.exchange.close)
        report = RunReport(
            dataset={"samples": len(data), "bytes": int(data.reader.sizes.sum())},
            ranks=comm.size,
            nodes=len(mounted.nodes.names),
            tiers=[str(s) for s in (*mounted.tiers, mounted.decoded_spec) if s is not None],
            config=config,
        )
        trace = None
        if config.trace is not None:
            trace = stack.enter_context(Trace(config.trace, comm))
        progress = stack.enter_context(Progress(config.epochs, run.steps, comm.rank, comm.size))
        for epoch in range(config.epochs):
            report.epochs.append(run.epoch(epoch, progress, trace))
            progress.epoch_ends(report.epochs[-1])
        if trace is not None:
            trace.finish()
        if config.save is not None:
            state = averaged_state(run.model, comm)
            if comm.rank == 0:
                # By way of memory: torch's own writer hides that a disk is full.
                packed = io.BytesIO()
                torch.save(state, packed)
                write_whole(config.save, lambda file: file.write(packed.getbuffer()))
        if config.report is not None and comm.rank == 0:
            text = report.to_json().encode()
            write_whole(config.report, lambda file: file.write(text))
    return report


class _Run:
    """One rank's model, optimizer, exchange and loaders."""

    def __init__(
        self,
        config: TrainConfig,
        comm: Communicator,
        loader: DataLoader,
        held_out: DataLoader | None,
    ) -> None:
        self._config = config
        self._comm = comm
        self._loader = loader
        self._held_out = held_out
        self._device = _device(config.device, comm)
        torch.manual_seed(config.seed)
        classes = len(loader.data.classes) or int(loader.data.reader.labels.max()) + 1
        self.model = make_model(config.model, classes, config.image_size)
        self.model.to(self._device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        broadcast_state(self.model, comm)
        # A copy without hooks, which the ranks' mean is evaluated in.
        self._mean_model = copy.deepcopy(self.model)
        self.exchange: Exchange = make_exchange(
            config.exchange, self.model, comm, config.seed, config.pretend_nodes
        )
        self._optimizer = _optimizer(self.model)
        self.steps = len(loader)
        self._global_batch = config.batch_size * comm.size
        self._mean = torch.tensor(_MEAN, device=self._device).view(1, 3, 1, 1) * 255
        self._std = torch.tensor(_STD, device=self._device).view(1, 3, 1, 1) * 255

    def epoch(self, epoch: int, progress: Progress, trace: Trace | None) -> EpochReport:
        """Train one epoch and evaluate. Collective."""
        config, loader = self._config, self._loader
        self.model.train()
        loader.set_epoch(epoch)
        before = self.exchange.statistics()
        # Sums over samples: loss, correct, count; kept on the device until the epoch's end.
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        started = time.perf_counter()
        for step, (images, labels) in enumerate(loader):
            if trace is not None:
                trace.step(epoch, step, loader.last_samples.tolist())
            planned = min(self._global_batch, len(loader.data) - step * self._global_batch)
            if self._comm.size == 1:
                planned = len(images)  # Skipped samples count nowhere; no exchange corrects it.
            sums += self._step(epoch * self.steps + step, images, labels, planned)
            progress.step(epoch, step, len(images), loader.stall_s)
        self.exchange.finish()
        totals = sums.tolist()  # Waits for the device.
        seconds = time.perf_counter() - started
        stats = loader.stats()
        after = self.exchange.statistics()
        if trace is not None:
            trace.end_epoch()
        mean = averaged_state(self.model, self._comm)
        everyone = self._comm.allgather(
            {
                "sums": totals,
                "seconds": seconds,
                "stall_s": stats["stall_s"],
                "first_batch_s": stats["first_batch_s"],
                "exchange_wait_s": after["wait_s"] - before["wait_s"],
                "exchange_bytes": after["bytes"] - before["bytes"],
                **{key: stats[key] for key in _COUNTED},
                "skipped": stats["skipped"],
                "notes": stats["notes"],
            }
        )
        return EpochReport.of_ranks(
            epoch,
            everyone,
            self._evaluate(mean),
            consensus_distance(self.model, mean, self._comm),
            config.peak_lr(self._comm.size),
        )

    def _step(
        self, number: int, images: torch.Tensor, labels: torch.Tensor, planned: int
    ) -> torch.Tensor:
        """One step; returns this rank's sums of loss, correct answers and samples."""
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        self.exchange.before_backward(len(images), planned)
        self._optimizer.zero_grad(set_to_none=True)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr(number)
        if len(images):
            labels = labels.to(self._device, non_blocking=True)
            logits = self.model(self._normalised(images))
            losses = cross_entropy(logits, labels, reduction="sum")
            losses.div(planned / self._comm.size).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                sums[0] = losses
                sums[1] = (logits.argmax(1) == labels).sum()
                sums[2] = len(images)
        self.exchange.before_step()
        self._optimizer.step()
        self.exchange.after_step()
        return sums

    @torch.no_grad()
    def _evaluate(self, mean: dict[str, torch.Tensor]) -> float | None:
        """Accuracy of the ranks' mean model on the held-out data. Collective."""
        if self._held_out is None:
            return None
        self._mean_model.load_state_dict(mean)
        self._mean_model.eval()
        counts = np.zeros(2, np.int64)
        self._held_out.set_epoch(0)
        for images, labels in self._held_out:
            if len(images):
                answers = self._mean_model(self._normalised(images)).argmax(1).cpu()
                counts += ((answers == labels).sum().item(), len(labels))
        self._comm.wait([self._comm.iallreduce(counts)], "the accuracy")
        return float(counts[0] / max(1, counts[1]))

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        # images: uint8 (n, 3, size, size), channels last -> float32, likewise
        moved = images.to(self._device, non_blocking=True).float()
        return moved.sub_(self._mean).div_(self._std)

    def _lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to zero at the last step."""
        steps = self.steps * self._config.epochs
        peak = self._config.peak_lr(self._comm.size)
        warm = max(1, round(_WARM_UP * steps))
        if step < warm:
            return peak * (step + 1) / warm
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    """SGD with Nesterov's momentum; no weight decay on biases and batch norms."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    free = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": _WEIGHT_DECAY},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.0, momentum=_MOMENTUM, nesterov=True)


def _open(
    comm: Communicator, path: str, config: TrainConfig, tiers: Any, training: bool
) -> Dataset:
    """Open a data set; rank 0 first, so that the others find its listing in the cache."""
    options: dict[str, Any] = {
        "tiers": tiers,
        "image_size": config.image_size,
        "train": training,
        "seed": config.seed,
        "on_error": config.on_error,
        "replicas": config.replica if training else (),
    }
    if comm.rank == 0:
        data = open_dataset(path, **options)
        comm.barrier()
        return data
    comm.barrier()
    return open_dataset(path, **options)


def _loader(data: Dataset, config: TrainConfig, training: bool) -> DataLoader:
    return DataLoader(
        data,
        config.batch_size,
        training,
        num_workers=config.workers,
        mode=config.shuffle,
        source_order=config.source_order if training else "sample",
        pretend_nodes=config.pretend_nodes,
        pin_memory=torch.cuda.is_available(),
        trace=config.trace_out if training else None,
    )


def _device(name: str, comm: Communicator) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
        name = f"cuda:{comm.rank % torch.cuda.device_count()}"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: choose auto, cpu or cuda")
    return torch.device(name)


def _differing(one: Any, other: Any) -> str:
    names = sorted(set(one) ^ set(other))
    return f"{len(names)} differ, such as {names[:3]}" if names else "in another order"
