"""One rank of a training run: its model, optimizer, exchange and loaders, and their steps."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from dlio.comm import Communicator
from dlio.comm.single import SingleCommunicator
from dlio.comm.survival.recovery import MeasuredLoss, recovery_of, uniform
from dlio.exchange.buckets import averaged_state, consensus_distance
from dlio.exchange.cut import TensorCut
from dlio.exchange.distribute import connect
from dlio.loader.assignment.assigner import BatchAssigner, EpochWire
from dlio.loader.contract import BatchData
from dlio.loader.dataloader import DataLoader
from dlio.plan.epoch import is_exact
from dlio.plan.rank_shares import RankShares
from dlio.train.callbacks.callback_base import Callback
from dlio.train.compute_device import Precision
from dlio.train.config import TrainConfig
from dlio.train.evaluator import Evaluator
from dlio.train.feature_hooks import ActiveFeatures
from dlio.train.learning_rate import learning_rate
from dlio.train.names import DEFAULT_OPTIMIZER
from dlio.train.optimizers import make_optimizer
from dlio.train.rank_layout import RankLayout
from dlio.train.replay import Replay
from dlio.train.report import EpochReport, RankEpoch
from dlio.train.sample_ledger import SampleLedger
from dlio.train.step_clock import StepClock
from dlio.train.tasks.task_base import TrainingTask, batch_size
from dlio.train.training_progress import TrainingProgress


class RunPosition(TypedDict):
    """Where a run is, between two batches, for a rank that joins; as JSON types."""

    step: tuple[int, int, int | None, int]
    said: tuple[int, int]
    """Numbers of losses and of changes that have been shown."""
    assigner: EpochWire


class Worker:
    """One rank of a run, which callbacks see as `Run`, and features as `FeatureRun`, which say more
    of its attributes.

    All ranks construct it together; `close` is collective too. Samples are weighted so that the
    mean over ranks of the gradients is the gradient of the global batch's mean loss.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: RankLayout,
        device: torch.device,
        task: TrainingTask,
        model: nn.Module,
        loader: DataLoader,
        held_out: DataLoader | None,
        begun: int | None = None,
        is_found: bool = False,
    ) -> None:
        """The model has its first weights, on the device; this rank's parts of it.

        If the ranks were started again, they were `begun` when the job began: the global batch
        stays. If a state is restored next, `is_found`, the ranks' models need not be alike.
        """
        self.config, self.loader, self.held_out = config, loader, held_out
        self.comm: Communicator = layout.comm
        self.layout, self.device, self.is_found = layout, device, is_found
        self.task, self.model, comm, seed = task, model, layout.comm, config.data.seed
        self._convert = layout.converter(task, loader.data)
        self.precision = Precision(config.model.precision, device)
        self._evaluator: Evaluator | None = None
        if held_out is not None:
            self._evaluator = Evaluator(self.model, task, held_out, self.precision, layout)
        self.features = ActiveFeatures(config, self)
        steps = config.optimizer
        self.optimizer = make_optimizer(
            steps.optimizer or DEFAULT_OPTIMIZER, self.model, steps.momentum, steps.weight_decay
        )
        # Features that sum gradients leave the exchange one rank alone.
        summing = self.features.summing
        self._replicas = layout.replicas if summing is None else SingleCommunicator()
        self.exchange = connect(
            self.model,
            self.optimizer,
            config.ranks.spec,
            seed=seed,
            pretend_nodes=config.ranks.pretend_nodes if summing is None else None,
            are_alike=is_found,
            follow_steps=False,  # Gradients are clipped when they are final.
            comm=self._replicas,
        )
        self._statistics = (summing or self.exchange).statistics
        self.clock = StepClock(lambda: self._statistics()["wait_s"], self.device)
        for each in self.features.hooks:
            each.connected(self, len(loader))
        self._together = self.features.together
        """True if ranks compute each pass together, also on empty batches."""
        self._called = self.features.wrapped(self.model)
        """The model, or its compiled form."""
        loaders = [loader] if held_out is None else [loader, held_out]
        per_rank = config.batches.batch_size
        # Dropout masks have to differ between ranks.
        torch.manual_seed((seed + layout.data.rank) % 2**63)
        self.callbacks: Sequence[Callback] = ()
        self.before_update: Callable[[], object] = lambda: None
        """Called before parameters and the optimizer's state change."""
        self.samples = len(loader.data)
        spares = config.survival.spares
        self._ranks = layout.replicas.size
        """Ranks at the beginning, with spares, that average their gradients."""
        self.recovery = recovery_of(comm)
        shrinks = config.survival.on_loss == "shrink"
        if begun is None or shrinks or not is_exact(config.batches.shuffle):
            begun = layout.data.size - spares
        global_batch = per_rank * begun
        if begun != layout.data.size - spares:
            for each_loader in loaders:
                each_loader.regroup(range(comm.size), comm.rank, global_batch)
        self.steps = math.ceil(self.samples / global_batch)
        """Batches per rank in an epoch of all samples."""
        self._assigner: BatchAssigner | Replay
        if config.results.replay is None:
            self._assigner = BatchAssigner(
                loaders,
                self.recovery,
                global_batch,
                per_rank=per_rank if shrinks else None,
                updates=lambda: self.updates,
            )
        else:
            assert self.recovery is not None
            trace = config.results.replay
            self._assigner = Replay(trace, loaders, self.recovery, global_batch)
        self._losses_told = self._changes_told = 0
        self.earlier_losses: list[MeasuredLoss] = []
        """Losses before the ranks were started again."""
        self.earlier_changes: list[MeasuredLoss] = []
        self.epoch_number = 0
        self.position = 0
        self.updates: int = 0
        self.left_out = 0
        """Optimizer steps left out in this epoch."""
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        """Sums of loss, correct answers and samples of this epoch and rank; on the device."""
        self.last_loss = torch.zeros((), device=self.device)
        self.gradient_norm: torch.Tensor | None = None
        self.history: list[EpochReport] = []
        self.stopped: str | None = None
        """Reason why the run ends early."""
        self._pending = self._step = self.finished = 0
        """Samples of this rank in batches that have been accumulated, batches in this epoch, and
        times that the exchange was finished in it."""
        self._first: int | None = None
        """Position of the epoch's order where the optimizer step under way begins."""
        self._planned = 0
        """Samples of that step, over all ranks."""
        self._joins = False
        """True on a rank that has joined an epoch, until it begins."""
        self._update_s: list[float] = []
        for each in self.features.hooks:
            each.begin(self)

    @property
    def global_batch(self) -> int:
        """Samples of one batch, over all ranks."""
        return self._assigner.usual_batch

    @property
    def shares(self) -> RankShares:
        """The samples that each rank takes of a whole step."""
        ranks, chosen = self.layout.data.size, self.loader.shares
        if chosen is None or len(chosen) != ranks:  # They may be those of ranks before a loss.
            return RankShares.of(self.global_batch, ranks)
        return RankShares(tuple(chosen))

    @property
    def peak_lr(self) -> float:
        """Peak learning rate: that of as many ranks as the global batch is for."""
        return self.config.peak_lr(self.global_batch // self.config.batches.batch_size)

    @property
    def losses(self) -> Sequence[MeasuredLoss]:
        """Losses of ranks since the run began."""
        return [*self.earlier_losses, *(self.recovery.losses if self.recovery else ())]

    @property
    def changes(self) -> Sequence[MeasuredLoss]:
        """Ranks that joined or left on purpose since the run began."""
        return [*self.earlier_changes, *(self.recovery.changes if self.recovery else ())]

    @property
    def assigner(self) -> BatchAssigner:
        """The batches of this rank, dealt by formula."""
        assert isinstance(self._assigner, BatchAssigner)
        return self._assigner

    def stop(self, reason: str) -> None:
        """End the run after this epoch. Call it on all ranks."""
        self.stopped = reason

    def close(self) -> None:
        """Close the features, the batches and the exchange. Collective."""
        for each in self.features.hooks:
            each.close()
        self._assigner.close()
        self.exchange.close()

    def epoch(
        self, epoch: int, progress: TrainingProgress, ledger: SampleLedger | None
    ) -> EpochReport:
        """Train an epoch, or the rest of it after resuming, and evaluate. Collective."""
        self._begin_epoch(epoch, progress)
        before = self._statistics()
        started = time.perf_counter()
        uniform(self.comm, lambda: self._train(progress, ledger))
        self._assigner.end_epoch()
        self.sums.tolist()  # Waits for the device.
        seconds = time.perf_counter() - started
        for each in self.features.hooks:
            each.end_epoch(self)
        after = self._statistics()
        if ledger is not None:
            ledger.end_epoch(self._assigner.of_lost, len(self.loader.data) - self.samples)
        exchanged = {key: after[key] - before[key] for key in before}
        report = self._report(seconds, exchanged)
        self._tell_losses(progress)
        self.history.append(report)
        self.position = 0
        for callback in self.callbacks:
            callback.epoch_ends(self, report)
        return report

    def rest(self, ranks: int) -> None:
        """Have only the first ranks train. Collective; see `Recovery.stand_by`."""
        assert self.recovery is not None
        self.assigner.prepare()
        self.recovery.stand_by(ranks)

    def tell_place(self) -> RunPosition:
        """Return where the run is, between two batches."""
        return {
            "step": (self._step, self.finished, self._first, self._planned),
            "said": (self._losses_told, self._changes_told),
            "assigner": self.assigner.tell_epoch(),
        }

    def follow_place(self, place: RunPosition) -> None:
        """Go on where another rank is, whose state was restored."""
        self._step, self.finished, self._first, self._planned = place["step"]
        self._losses_told, self._changes_told = place["said"]
        self.assigner.follow_epoch(place["assigner"])
        self._joins = True

    def _train(self, progress: TrainingProgress, ledger: SampleLedger | None) -> None:
        """Train on all batches of the epoch, or on those that are left after a loss."""
        epoch, more = self.epoch_number, True
        updated = time.perf_counter()
        while more:
            more = False
            batches = self._assigner.batches()  # An error in the body does not close them.
            for batch in batches:
                more = True
                done = self._assigner.step
                if ledger is not None:
                    ranks = len(self._assigner.members) or self._ranks
                    samples = self.loader.last_samples.tolist()
                    ledger.step(epoch, done, samples, self.updates, ranks, self.finished)
                before_batch = self.position
                count = batch_size(batch)
                with self.clock.step(count):
                    self._batch(batch, count)
                self._tell_losses(progress)
                self._step += 1
                progress.step(epoch, done, self.position - before_batch, self.loader.stall_s)
                if not self._pending_batches(self._step):
                    now = time.perf_counter()
                    self._update_s.append(now - updated)
                    updated = now
            self.exchange.finish()
            self.finished += 1

    def _begin_epoch(self, epoch: int, progress: TrainingProgress) -> None:
        """Choose the epoch's samples, and reset its counters unless it is being resumed."""
        self.model.train()
        self.features.prepare(self.model, epoch)
        self._assigner.begin_epoch(epoch)
        chosen = self.features.choose_samples(epoch)
        if chosen is None:
            self.loader.set_epoch(epoch)
        else:
            self.samples, progress.steps = chosen, len(self.loader)
        if self.epoch_number != epoch or not self.position:
            self.epoch_number, self.position, self.left_out = epoch, 0, 0
            self.sums.zero_()
        for each in self.features.hooks:
            each.begin_epoch(self, epoch)
        self._update_s = []
        if not self._joins:
            self._step, self.finished, self._first = 0, 0, None
        self._joins = False

    def _batch(self, batch: BatchData, count: int) -> None:
        """Run backward on a batch of `count` samples, and an optimizer step if it is the last of
        those that accumulate."""
        more = self._pending_batches(self._step + 1)
        if self._first is None:
            self._first = self.position
            planned = min(
                self.config.optimizer.accumulate * self.global_batch, self.samples - self._first
            )
            # Samples that come again: their number does not matter.
            self._planned = planned if planned > 0 else self.global_batch
        first, planned = self._first, self._planned
        self._pending += count
        self.exchange.before_backward(self._pending, planned)
        self.exchange.hold(more > 0)
        self.last_loss = torch.zeros_like(self.last_loss)
        if count or self._together:
            self._backward(*self._convert(batch, self.device), planned)
        self.position = self._assigner.position
        if not more:
            self._first = None
            self._update(min(first, self.samples), planned)

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor, planned: int) -> None:
        """Accumulate gradients and sums of inputs and targets, both of shape (n, ...).

        `planned` are the samples of the optimizer step, over all ranks.
        """
        ids = self.loader.last_samples
        summing = self.features.summing
        if summing is None:
            # Where ranks step on their own samples, those that share them now have more of them.
            alone = self.recovery is not None and not self.exchange.alike
            ranks = len(self._assigner.members) if alone else self._ranks
            self._pass(inputs, targets, ids, planned / ranks)
            return
        of_batch = min(self.global_batch, self.samples - self.position)
        for part in summing.groups(len(inputs), of_batch):
            summing.begin_group(self, part, of_batch)
            self._pass(inputs[part], targets[part], ids[part], planned)
            summing.end_group(part.stop - part.start)

    def _pass(
        self, inputs: torch.Tensor, targets: torch.Tensor, ids: npt.NDArray[np.int64], over: float
    ) -> None:
        """Run forward and backward on samples: on the sum of their losses, divided by `over`."""
        for each in self.features.hooks:
            each.before_forward(inputs, targets)
        with self.precision.casting():
            outputs = self._called(inputs)
            losses = self.task.objective.losses(outputs, targets)
        with torch.no_grad():
            correct = self.task.objective.correct(outputs, targets)
        for each in self.features.hooks:
            if (weights := each.weigh(losses, ids)) is not None:
                losses, correct = losses * weights, correct * weights
        total = losses.sum()
        torch.autograd.backward(self.precision.scaler.scale(total.div(over)))
        with torch.no_grad():
            self.last_loss += total
            if self.layout.counts:
                self.sums[0] += total
                self.sums[1] += correct.sum()
                self.sums[2] += len(inputs)

    def _pending_batches(self, done: int) -> int:
        """Number of batches to accumulate before the next optimizer step, after `done` batches."""
        return min(-done % self.config.optimizer.accumulate, self._assigner.left())

    @torch.no_grad()
    def _update(self, first: int, planned: int) -> None:
        """Step the optimizer with gradients of `planned` samples from position `first` on."""
        precision, clip = self.precision, self.config.optimizer.clip
        self.exchange.before_step()
        for each in self.features.hooks:
            each.before_step(planned)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # Layers that are left as they are get no decay, either.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self._ranks == 1 and self.features.summing is None and self._pending not in (0, planned):
            # Unreadable samples do not count; with several ranks the exchange corrects for them.
            torch._foreach_mul_(gradients, planned / self._pending)
        if precision.scales and gradients:
            precision.scaler.unscale_(self.optimizer)
        for each in self.features.hooks:
            each.gradients_final()
        if gradients and (clip is not None or self.config.callbacks.nan != "off"):
            self.gradient_norm = self.layout.gradient_norm(self.model)
            if clip is not None:
                clip_grads_with_norm_(self.model.parameters(), clip, self.gradient_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(first)
        self.before_update()
        wanted = [callback.before_step(self) for callback in self.callbacks]
        if not all(wanted):
            self.left_out += 1
            if precision.scales and gradients:
                precision.scaler.update()
        elif gradients or not precision.scales:
            precision.step(self.optimizer)
        self.exchange.after_step()
        self.updates += 1
        for each in self.features.hooks:
            each.after_update(self.updates)
        self._pending = 0
        for each in self.features.hooks:
            each.after_step(self)
        for callback in self.callbacks:
            callback.after_step(self)
        self.optimizer.zero_grad(set_to_none=True)

    def _tell_losses(self, progress: TrainingProgress) -> None:
        if self.recovery is None:
            return
        losses, changes = self.recovery.losses, self.recovery.changes
        for change in (*losses[self._losses_told :], *changes[self._changes_told :]):
            progress.lost(self.comm.rank, change)
        self._losses_told, self._changes_told = len(losses), len(changes)

    def reshaped(self, cuts: Sequence[TensorCut] = ()) -> None:
        """Adapt the evaluator and the callbacks after the model was cut."""
        if self._evaluator is not None:
            self._evaluator.reshape(self.model)
        for callback in self.callbacks:
            callback.reshaped(self, cuts)

    def lr(self, first: int) -> float:
        """Learning rate of the step that begins at position `first` of the epoch's order.

        In an epoch that skips samples, the others stand for more than one each, and the rate grows
        by the same factor: see `SampleSkipper.lr_factor`.
        """
        samples = len(self.loader.data)
        each = samples / self.samples
        span = self.features.span(self.epoch_number) or range(self.config.optimizer.epochs)
        return learning_rate(
            peak=each * self.peak_lr,
            done=(self.epoch_number - span.start) * samples + first * each,
            batch=self.config.optimizer.accumulate * self.global_batch * each,
            total=samples * len(span),
            schedule=self.config.optimizer.lr_schedule,
        )

    def _report(self, seconds: float, exchanged: dict[str, float]) -> EpochReport:
        """Evaluate, and combine the measurements of all ranks. Collective."""
        steps_ms = np.array(self._update_s or [0.0]) * 1000
        mine: RankEpoch = {
            "share": self.shares.counts[self.layout.data.rank],
            "computed_per_s": self.clock.rate(),
            "sums": self.sums.tolist(),
            "seconds": seconds,
            "loader": self._assigner.stats(),
            "exchange_wait_s": exchanged["wait_s"],
            "exchange_bytes": exchanged["bytes"],
            "step_ms": np.quantile(steps_ms, (0.5, 0.95)).tolist(),
            "left_out": self.left_out,
            "skip_share": 1 - self.samples / len(self.loader.data),
            "features": {name: each.measure() for name, each in self.features.by_prefix.items()},
        }
        self.clock.steps = []
        everyone, metrics, distance = uniform(self.comm, lambda: self._compared(mine))
        accuracy = metrics.get("accuracy")
        for each in self.features.hooks:
            each.compared(self, everyone, accuracy)
        report = EpochReport.of_ranks(
            self.epoch_number,
            everyone,
            accuracy,
            distance,
            self.peak_lr,
            self.samples if self.recovery or self.earlier_losses else 0,
        )
        return replace(
            report,
            accuracy=report.accuracy if self.task.objective.has_accuracy else None,
            task=self.task.name,
            metrics=metrics,
            watch=self.task.objective.watch,
            features=self.features.report(),
        )

    def _compared(self, mine: RankEpoch) -> tuple[list[RankEpoch], dict[str, float | None], float]:
        """Return (measurements of all ranks, held-out metrics, distance of the ranks' weights).

        Collective; changes nothing.
        """
        self._assigner.regroup()
        mean = self._mean_of(self.model)
        everyone = self.comm.allgather(mine)
        metrics: dict[str, float | None] = {}
        if self._evaluator is not None:
            evaluated = self.features.evaluated(self.model)
            state = mean if evaluated is self.model else self._mean_of(evaluated)
            prepare = partial(self.features.prepare, epoch=self.epoch_number)
            metrics = self._evaluator.metrics(state, self.device, prepare)
        return everyone, metrics, consensus_distance(self.model, mean, self.comm)

    def mean_state(self) -> dict[str, torch.Tensor]:
        """Return the state dict to save: the mean over ranks of the weights, or of their average
        over steps. Collective."""
        mean = self._mean_of(self.features.evaluated(self.model))
        return {name: self.layout.whole(name, value) for name, value in mean.items()}

    def _mean_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the mean over ranks of a model's state dict, on the host. Collective."""
        # Running statistics are averages over batches, so the mean over ranks of the last ones is
        # the running average of the ranks' means: nothing has to be sent in the steps between.
        mean = averaged_state(model, self._replicas)
        for each in self.features.hooks:
            each.averaged(model, mean, self._replicas)
        return mean
