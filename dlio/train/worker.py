"""One rank of a training run: its model, optimizer, exchange and loaders, and their steps."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio.loader.dataloader import DataLoader
from dlio.train.balance import Balancer, Clock
from dlio.train.callbacks.base import Callback
from dlio.train.config import TrainConfig
from dlio.train.cut import Cut
from dlio.train.exchange.buckets import averaged_state, consensus_distance
from dlio.train.exchange.distribute import distribute
from dlio.train.ledger import SampleLedger
from dlio.train.model import make_model, normalised
from dlio.train.optimizers import make_optimizer
from dlio.train.precision import Precision
from dlio.train.progress import TrainingProgress
from dlio.train.pruner import Pruner
from dlio.train.pruning.copies import bare_copy
from dlio.train.report import EpochReport
from dlio.train.skipping.rule import EASY, SHARE
from dlio.train.skipping.skipper import SampleSkipper

_COUNTED: Final = ("bytes", "sent", "messages", "late", "healed", "decoded", "decode_saved_s")
_WARM_UP: Final = 0.15
"""Share of the steps in which the learning rate rises to its peak."""


class Worker:
    """What callbacks see of a run. Made on all ranks together; `close` is collective, too."""

    def __init__(
        self,
        config: TrainConfig,
        comm: Communicator,
        loader: DataLoader,
        held_out: DataLoader | None,
    ) -> None:
        self.config, self.comm = config, comm
        self.loader, self.held_out = loader, held_out
        self.device = _device(config.device, comm)
        torch.manual_seed(config.seed)
        classes = len(loader.data.classes) or int(loader.data.reader.labels.max()) + 1
        self.model = make_model(config.model, classes, config.image_size)
        self.model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        # A copy without hooks, which the ranks' mean is evaluated in.
        self._mean_model = copy.deepcopy(self.model) if held_out is not None else None
        trial = copy.deepcopy(self.model) if config.balance else None
        self.optimizer = make_optimizer(
            config.optimizer, self.model, config.momentum, config.weight_decay
        )
        self.exchange = distribute(
            self.model,
            self.optimizer,
            config.exchange,
            seed=config.seed,
            pretend_nodes=config.pretend_nodes,
            follow_steps=False,  # Gradients are clipped when they are final.
        )
        self.precision = Precision(config.precision, self.device)
        self.pruner: Pruner | None = None
        if config.prune == "apoptosis":
            steps = config.epochs * math.ceil(len(loader) / config.accumulate)
            self.pruner = Pruner(
                config, self.model, self.optimizer, self.exchange, self.precision, steps
            )
        clock = Clock(lambda: self.exchange.statistics()["wait_s"], self.device)
        loaders = [loader] if held_out is None else [loader, held_out]
        self._balancer = Balancer(comm, loaders, config.batch_size, clock, config.balance)
        self.skipper: SampleSkipper | None = None
        if config.skip_samples:
            share, easy = (
                config.skip_share or SHARE,
                EASY if config.skip_share is None else math.inf,
            )
            self.skipper = SampleSkipper(loader, config.epochs, share, seed=config.seed, easy=easy)
        # Masks of dropout differ from rank to rank.
        torch.manual_seed((config.seed + comm.rank) % 2**63)
        self.callbacks: Sequence[Callback] = ()
        self.steps = len(loader)
        """Of an epoch of all samples: batches of a rank."""
        self.samples = len(loader.data)
        """Of the epoch, over all ranks."""
        self.global_batch = config.batch_size * comm.size
        self.epoch_number = 0
        self.position = 0
        """Samples of the epoch's order that all ranks have trained on."""
        self.updates = 0
        """Steps of the optimizer since the run began."""
        self.left_out = 0
        """Steps of this epoch that the optimizer was not let do."""
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        """Of this epoch and rank: loss, correct answers, samples; kept on the device."""
        self.last_loss = torch.zeros((), device=self.device)
        """Sum of losses of this rank's last batch."""
        self.gradient_norm: torch.Tensor | None = None
        """Of the last step, before clipping."""
        self.history: list[EpochReport] = []
        self.stopped: str | None = None
        """Why the run ends early, when it does."""
        self._pending = 0
        """Samples of this rank in batches that have been accumulated."""
        self._update_s: list[float] = []
        if trial is not None:
            self._balancer.calibrate(self._trial(trial))

    def stop(self, reason: str) -> None:
        """End the run after this epoch. To be called on all ranks."""
        self.stopped = reason

    def close(self) -> None:
        if self.pruner is not None:
            self.pruner.close()
        if self.skipper is not None:
            self.skipper.close()
        self.exchange.close()

    def epoch(
        self, epoch: int, progress: TrainingProgress, trace: SampleLedger | None
    ) -> EpochReport:
        """Train an epoch, or what is left of it, and evaluate. Collective."""
        loader = self.loader
        self.model.train()
        if self.skipper is None:
            loader.set_epoch(epoch)
        else:
            self.skipper.begin(epoch)
            self.samples, progress.steps = self.skipper.samples, len(loader)
        if self.epoch_number != epoch or not self.position:
            self.epoch_number, self.position, self.left_out = epoch, 0, 0
            self.sums.zero_()
        begun = self.position
        if self.pruner is not None:
            a_step = self.global_batch * self.config.accumulate
            later = self.config.epochs - epoch - 1
            left = math.ceil((self.samples - begun) / a_step)
            self.pruner.apoptosis.expect(left + later * math.ceil(self.samples / a_step))
        self._update_s = []
        before = self.exchange.statistics()
        started = updated = time.perf_counter()
        for step, (images, labels) in enumerate(loader):
            if trace is not None:
                done = begun // self.global_batch
                trace.step(epoch, done + step, loader.last_samples.tolist())
            before_batch = self.position
            with self._balancer.step(len(images)):
                self._batch(images, labels, begun, step)
            trained = self.position - before_batch
            progress.step(epoch, begun // self.global_batch + step, trained, loader.stall_s)
            if not self._pending_batches(begun, step + 1):
                now = time.perf_counter()
                self._update_s.append(now - updated)
                updated = now
        self.exchange.finish()
        self.sums.tolist()  # Waits for the device.
        seconds = time.perf_counter() - started
        after = self.exchange.statistics()
        if trace is not None:
            trace.end_epoch()
        report = self._reported(seconds, {key: after[key] - before[key] for key in before})
        self.history.append(report)
        self.position = 0
        for callback in self.callbacks:
            callback.epoch_ends(self, report)
        return report

    def _batch(self, images: torch.Tensor, labels: torch.Tensor, begun: int, step: int) -> None:
        """Backward of a batch, and the optimizer's step where no other is accumulated first."""
        more = self._pending_batches(begun, step + 1)
        first = begun + (step - step % self.config.accumulate) * self.global_batch
        planned = min(self.config.accumulate * self.global_batch, self.samples - first)
        self._pending += len(images)
        self.exchange.before_backward(self._pending, planned)
        self.exchange.hold(more > 0)
        if len(images):
            self._backward(images, labels, planned)
        else:
            self.last_loss = torch.zeros_like(self.last_loss)
        self.position = min(self.samples, begun + (step + 1) * self.global_batch)
        if not more:
            self._update(first, planned)

    def _backward(self, images: torch.Tensor, labels: torch.Tensor, planned: int) -> None:
        labels = labels.to(self.device, non_blocking=True)
        inputs = normalised(images, self.device)
        if self.pruner is not None:
            self.pruner.saw(inputs, labels)
        with self.precision.casting():
            logits = self.model(inputs)
            losses = cross_entropy(logits, labels, reduction="none")
        correct = logits.argmax(1) == labels
        if self.skipper is not None:
            # Samples that are likely to be skipped count the more where they are not.
            ids = self.loader.last_samples
            weights = self.skipper.weights(ids).to(self.device, non_blocking=True)
            self.skipper.record(losses, ids)
            losses, correct = losses * weights, correct * weights
        total = losses.sum()
        mean = total.div(planned / self.comm.size)
        self.precision.scaler.scale(mean).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.last_loss = total.detach()
            self.sums[0] += self.last_loss
            self.sums[1] += correct.sum()
            self.sums[2] += len(images)

    def _pending_batches(self, begun: int, done: int) -> int:
        """How many batches are still to be accumulated after `done` of this pass."""
        left = math.ceil((self.samples - begun) / self.global_batch) - done
        return min(-done % self.config.accumulate, left)

    @torch.no_grad()
    def _update(self, first: int, planned: int) -> None:
        """A step of the optimizer, with gradients of the samples from position `first` on."""
        config, precision = self.config, self.precision
        self.exchange.before_step()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.comm.size == 1 and self._pending not in (0, planned):
            # Samples that were skipped count nowhere; among ranks the exchange corrects it.
            torch._foreach_mul_(gradients, planned / self._pending)
        if precision.scales and gradients:
            precision.scaler.unscale_(self.optimizer)
        if self.pruner is not None:
            self.pruner.apoptosis.look()
        if gradients and (config.clip is not None or config.nan != "off"):
            self.gradient_norm = get_total_norm(gradients)
            if config.clip is not None:
                clip_grads_with_norm_(self.model.parameters(), config.clip, self.gradient_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(first)
        wanted = [callback.before_step(self) for callback in self.callbacks]
        if not all(wanted):
            self.left_out += 1
            if precision.scales and gradients:
                precision.scaler.update()
        elif gradients or not precision.scales:
            precision.step(self.optimizer)
        self.exchange.after_step()
        self.updates += 1
        self._pending = 0
        if self.pruner is not None and (cuts := self.pruner.step()):
            self.reshaped(cuts)
        for callback in self.callbacks:
            callback.after_step(self)
        self.optimizer.zero_grad(set_to_none=True)

    def reshaped(self, cuts: Sequence[Cut] = ()) -> None:
        """The model has been cut: what is evaluated has its shapes."""
        if self._mean_model is not None:
            self._mean_model = bare_copy(self.model)
        for callback in self.callbacks:
            callback.reshaped(self, cuts)

    def lr(self, first: int) -> float:
        """Linear warm-up, then a cosine down to zero at the last step.

        Args:
            first: position in the epoch of the first sample of the step: so the rate follows the
                samples, on any number of ranks. Where some are skipped, each of the others stands
                for more than one, and the rate is as much larger: `SampleSkipper.lr_factor`.
        """
        samples = len(self.loader.data)
        total = samples * self.config.epochs
        each = samples / self.samples
        done = self.epoch_number * samples + first * each
        batch = self.config.accumulate * self.global_batch * each
        peak, warm = each * self.config.peak_lr(self.comm.size), max(batch, _WARM_UP * total)
        if done < warm:
            return peak * min(1.0, (done + batch) / warm)
        return peak * 0.5 * (1 + math.cos(math.pi * (done - warm) / max(1, total - warm)))

    def _reported(self, seconds: float, exchanged: dict[str, float]) -> EpochReport:
        """The epoch, over all ranks; evaluates. Collective."""
        stats = self.loader.stats()
        mean = averaged_state(self.model, self.comm)
        steps_ms = np.array(self._update_s) * 1000 if self._update_s else np.zeros(1)
        everyone = self.comm.allgather(
            {
                "sums": self.sums.tolist(),
                "seconds": seconds,
                "stall_s": stats["stall_s"],
                "first_batch_s": stats["first_batch_s"],
                "exchange_wait_s": exchanged["wait_s"],
                "exchange_bytes": exchanged["bytes"],
                "step_ms": [float(np.median(steps_ms)), float(np.quantile(steps_ms, 0.95))],
                "left_out": self.left_out,
                "skip_share": 1 - self.samples / len(self.loader.data),
                **{key: stats[key] for key in _COUNTED},
                "skipped": stats["skipped"],
                "notes": stats["notes"],
                **self._balancer.told(),
            }
        )
        self._balancer.agree(everyone)
        accuracy = self._evaluate(mean)
        if self.pruner is not None and accuracy is not None:
            _, correct, samples = np.sum([rank["sums"] for rank in everyone], axis=0).tolist()
            self.pruner.apoptosis.held_out(accuracy, correct / max(1.0, samples))
        return EpochReport.of_ranks(
            self.epoch_number,
            everyone,
            accuracy,
            consensus_distance(self.model, mean, self.comm),
            self.config.peak_lr(self.comm.size),
            None if self.pruner is None else self.pruner.report(),
        )

    def _trial(self, model: torch.nn.Module) -> Callable[[int], None]:
        """Forward and backward of a number of samples, on a copy of the model."""
        shape = (3, self.config.image_size, self.config.image_size)

        def compute(samples: int) -> None:
            images = torch.randint(256, (samples, *shape), dtype=torch.uint8)
            images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.zeros(samples, dtype=torch.int64, device=self.device)
            with self.precision.casting():
                loss = cross_entropy(model.train()(normalised(images, self.device)), labels)
            loss.backward()  # type: ignore[no-untyped-call]

        return compute

    @torch.no_grad()
    def _evaluate(self, mean: dict[str, torch.Tensor]) -> float | None:
        """Accuracy of the ranks' mean model on the held-out data. Collective."""
        if self.held_out is None or self._mean_model is None:
            return None
        self._mean_model.load_state_dict(mean)
        self._mean_model.eval()
        counts = np.zeros(2, np.int64)
        self.held_out.set_epoch(0)
        for images, labels in self.held_out:
            if len(images):
                with self.precision.casting():
                    answers = self._mean_model(normalised(images, self.device)).argmax(1).cpu()
                counts += ((answers == labels).sum().item(), len(labels))
        self.comm.wait([self.comm.iallreduce(counts)], "the accuracy")
        return float(counts[0] / max(1, counts[1]))


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
