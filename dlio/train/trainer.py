"""The trainer of `dlio train`: loader -> model -> exchange -> optimizer, the same on every rank."""

import io
import math
import time
import traceback
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from dlio.comm import Communicator, world
from dlio.comm.planned_membership import PlannedMembership, planned_world
from dlio.comm.survival.membership import AllLeave, AllPause, RankLeft
from dlio.comm.survival.node_watch import watch_policy
from dlio.comm.survival.recovery import check_survival, once_on_rank_0, recovery_of, uniform
from dlio.errors import DlioError, UsageError
from dlio.exchange.nccl import devices_connected
from dlio.launch.node.job_starts import start_of
from dlio.loader.dataloader import DataLoader
from dlio.train.callbacks import make_callbacks
from dlio.train.checkpoint.state import restore
from dlio.train.compute_device import channels_last, choose_device
from dlio.train.config import TrainConfig
from dlio.train.departure import EndRequests, departure_at
from dlio.train.feature_hooks import layout_of
from dlio.train.memory_snapshot.job_restart import JobRestart
from dlio.train.report import RunReport
from dlio.train.run_requests import RunRequest, make_request_channel
from dlio.train.sample_ledger import SampleLedger
from dlio.train.state_transfer import StateTransfer
from dlio.train.tasks.registry import make_task, resolve_config
from dlio.train.tasks.task_base import TrainingTask
from dlio.train.training_data import RunData
from dlio.train.training_progress import TrainingProgress
from dlio.train.weights import load_weights
from dlio.train.worker import Worker
from dlio.util.child_processes import die
from dlio.util.cores import available_cores
from dlio.util.heap import keep_freed_memory
from dlio.util.signals import RESUME_CODE
from dlio.util.units import counted
from dlio.util.whole_files import write_whole

if TYPE_CHECKING:  # See `dlio.train.checkpoint`.
    from dlio.train.checkpoint.checkpoint_callback import CheckpointCallback
    from dlio.train.checkpoint.checkpoint_store import Checkpoints


def train(config: TrainConfig, lasting: ExitStack | None = None) -> RunReport:
    """Train a model on the ranks of this job. Collective.

    A replay has a `world()` of its own, until `lasting` is closed if one is given.

    Raises DlioError for errors that a user can fix. Other ranks may then wait for this one; the
    caller ends them with `dlio.comm.abort`.
    """
    config.check_run()
    with ExitStack() as stack:
        planned = None
        if config.results.replay is not None:
            planned = (lasting or stack).enter_context(planned_world())
        run = TrainingRun(config, stack, planned)
        run.open()
        run.build()
        run.restore()
        run.train()
        run.finish()
    return run.report


class TrainingRun:
    """One rank's part in a run, phase by phase: `open`, `build`, `restore`, `train`, `finish`.

    Each phase is collective, and uses the results of those before; `open` settles the values of the
    configuration that depend on the data. `stack` closes all that they open, the last first.
    """

    def __init__(
        self, config: TrainConfig, stack: ExitStack, planned: PlannedMembership | None
    ) -> None:
        began = time.time()
        self._config, self._stack, self._planned = config, stack, planned
        self._comm = world()
        self._restart = JobRestart(start_of(), began)
        survival = config.survival
        if survival.spares >= self._comm.size:
            raise UsageError(
                f"--spares {survival.spares} with {counted(self._comm.size, 'rank')}: start more "
                "by -n, or give fewer spares"
            )
        if self._planned is None:
            check_survival(self._comm, survival.fault_tolerance, survival.min_ranks)

    def open(self) -> None:
        """Open the folder of checkpoints and the data, and settle values that depend on it."""
        config, comm, stack = self._config, self._comm, self._stack
        self._end_requests: EndRequests | None = None
        self._checkpoints = self._open_checkpoints()
        self._layout = layout = stack.enter_context(layout_of(config, comm))
        sources, options = RunData(config, layout), config.data
        data = stack.enter_context(sources.open(options.source, options.tiers, True, options.split))
        self._data = data
        self._config = config = resolve_config(config, data, layout.schema(data))
        self._device = device = choose_device(config.model.device, comm)
        stack.enter_context(devices_connected(comm, device))
        self._loader = stack.enter_context(sources.loader(data, True, device))
        self._mounted = data.mount(layout.data, config.ranks.pretend_nodes)
        layout.check_order(self._mounted)
        self._held_out: DataLoader | None = None
        if options.val is not None:
            spare = self._mounted.spare_tiers()
            val = stack.enter_context(sources.open(options.val, spare, False, options.val_split))
            self._held_out = stack.enter_context(sources.loader(val, False, device))
            # Now, while all ranks are there: at the first evaluation some may be lost.
            val.mount(layout.data, config.ranks.pretend_nodes)

    def _open_checkpoints(self) -> "Checkpoints | None":
        options, comm = self._config.checkpoints, self._comm
        if options.checkpoint is None:
            return None
        from dlio.train.checkpoint.checkpoint_store import Checkpoints

        if recovery_of(comm) is None:  # Otherwise a rank leaves alone; see `departure_at`.
            self._end_requests = self._stack.enter_context(EndRequests())
        checkpoints = self._stack.enter_context(Checkpoints(options.checkpoint, comm, options.keep))
        if comm.rank == 0 and not self._resumes and checkpoints.paths():
            raise UsageError(
                f"--checkpoint {options.checkpoint}: holds checkpoints of another run; add "
                "--resume to continue it, or name another folder"
            )
        return checkpoints

    @property
    def _resumes(self) -> bool:
        """True if the run continues from a checkpoint, if there is one."""
        return self._config.checkpoints.resume or self._restart.is_again

    def build(self) -> None:
        """Make the task, the model and all that trains it."""
        config, comm, mounted, layout = self._config, self._comm, self._mounted, self._layout
        task = make_task(config, self._data, comm, layout.schema(self._data))
        machines = layout.machines(mounted)
        torch.set_num_threads(max(1, available_cores() * machines // comm.size))
        for feature, options in config.active():
            feature.begin_process(options)
        keep_freed_memory()
        self._restart.end_phase("open")
        self._is_found = self._restart.find(comm)
        self._restart.end_phase("read")
        begun = self._restart.begun
        self._run = run = Worker(
            config,
            layout,
            self._device,
            task,
            self._make_model(task),
            self._loader,
            self._held_out,
            begun,
            self._is_found,
        )
        self._stack.callback(run.close)
        if run.recovery is not None:
            nodes = [mounted.nodes.names[node] for node in mounted.nodes.node_of]
            run.recovery.describe(nodes, lambda: (run.epoch_number, run.updates))
            self._restart.describe(run.recovery)
        self.report = RunReport(
            dataset={"samples": len(self._data), "bytes": layout.payload_bytes(self._data)},
            ranks=comm.size if begun is None else begun,
            nodes=len(mounted.nodes.names),
            tiers=[str(s) for s in mounted.all_tiers],
            config=config,
            notes=list(task.notes),
        )
        if run.global_batch > len(self._data):
            self.report.notes.append(
                f"--batch-size asks for {counted(run.global_batch, 'sample')} of all ranks in a "
                f"step, and there are {len(self._data):,}: each epoch is one step, with the "
                "learning rate of the larger batch"
            )
        policy, hang_after = watch_policy(), config.survival.hang_after
        policy.hang_after_s = math.inf if hang_after == 0 else hang_after
        policy.evicts_slow = config.survival.evict_slow
        self._callbacks = make_callbacks(config.callbacks, comm.rank)
        self._restart.end_phase("model")

    def _make_model(self, task: TrainingTask) -> nn.Module:
        """Make the model on its device, with the weights of --weights."""
        torch.manual_seed(self._config.data.seed)
        model = channels_last(task.make_model()).to(self._device)
        if (weights := self._config.model.weights) is not None and not self._is_found:
            load_weights(weights, model, self._comm.rank)
        self._layout.cut_layers(model)
        return model

    def restore(self) -> None:
        """Continue from a copy in memory or a checkpoint, if there is one, and begin to save."""
        run, restart, stack = self._run, self._restart, self._stack
        if self._is_found:
            restart.restore(run)
        restart.end_phase("restore")
        self._saving: CheckpointCallback | None = None
        if self._checkpoints is not None:
            if self._resumes and not self._is_found:
                self.report.resumed = _resume(run, self._checkpoints)
            self._saving = self._save_regularly(self._checkpoints)
            self._callbacks.append(self._saving)
        self._ledger: SampleLedger | None = None
        if (trace := run.config.results.trace) is not None:
            self._ledger = stack.enter_context(restart.open_ledger(run, trace))
        restart.note_losses(run)
        self._snapshots = restart.snapshots(run, self._ledger)
        if self._snapshots is not None:
            self._callbacks.append(self._snapshots)
        run.callbacks = [stack.enter_context(callback) for callback in self._callbacks]

    def _save_regularly(self, checkpoints: "Checkpoints") -> "CheckpointCallback":
        from dlio.train.checkpoint.checkpoint_callback import CheckpointCallback

        run, requests = self._run, None
        if self._end_requests is not None:
            requests = make_request_channel(run.comm, run.config.ranks.spec)
            self._stack.callback(requests.close)
            self._end_requests.ask = partial(requests.wish, RunRequest.END)
        return CheckpointCallback(run, checkpoints, requests)

    def train(self) -> None:
        """Train the remaining epochs, or until the ranks are told to pause or to leave."""
        try:
            self._epochs()
        except AllPause:
            assert self._snapshots is not None
            self._restart.pause(self._run, self._snapshots)
        except AllLeave:
            self._end_early()
        except Exception as error:
            _die_of_bug(self._run, error)
            raise

    def _epochs(self) -> None:
        run, comm, stack = self._run, self._comm, self._stack
        survival = run.config.survival
        progress = stack.enter_context(TrainingProgress(run))
        for callback in run.callbacks:
            callback.begins(run)
        elastic = None if run.recovery is None else run.recovery.elastic
        stack.enter_context(departure_at(elastic, survival.seconds_left()))
        if run.recovery is not None and survival.spares:
            transfer = StateTransfer(run, run.recovery, self._ledger)
            stack.callback(transfer.close)
            run.rest(comm.size - survival.spares)
        for epoch in range(len(run.history), run.config.optimizer.epochs):
            progress.epoch_ends(run.epoch(epoch, progress, self._ledger))
            if run.stopped is not None:
                break
        if self._ledger is not None:
            self._ledger.finish()
        uniform(comm, comm.barrier)  # Nobody leaves while others need it.
        if run.recovery is not None:
            run.recovery.end()

    def _end_early(self) -> NoReturn:
        """Write a last checkpoint, as all ranks have been told to leave. Collective."""
        run, checkpoints = self._run, self._checkpoints
        said, failed = "no checkpoint is written without --checkpoint", 0
        if checkpoints is not None and self._saving is not None:
            failed = len(checkpoints.failures)
            self._saving.save(run)
            checkpoints.wait()
            failed = len(checkpoints.failures) - failed
            said = f"go on with --resume from {checkpoints.folder}"
            if failed:
                from dlio.train.checkpoint.checkpoint_store import without_last

                said = without_last(checkpoints.written)
        if run.comm.rank == 0:
            where = f"epoch {run.epoch_number + 1}, step {run.updates}"
            print(f"told to end at {where}: {said}", flush=True)
        uniform(run.comm, run.comm.barrier)  # The first that ends may end the others.
        raise SystemExit(1 if failed else RESUME_CODE)

    def finish(self) -> None:
        """Complete the report, and write the weights (--save) and the report (--report)."""
        run, report = self._run, self.report
        report.epochs, report.stopped = run.history, run.stopped
        report.notes += self._layout.notes
        report.losses, report.changes = list(run.losses), list(run.changes)
        for callback in self._callbacks:
            callback.add_results(report)
        if self._checkpoints is not None:
            self._checkpoints.wait()
            report.checkpoints = self._checkpoints.statistics()
        if (path := run.config.checkpoints.save) is not None:
            self._save_weights(path)
        _write_report(self._comm, report)
        if self._planned is not None:
            self._planned.end()

    def _save_weights(self, path: str) -> None:
        state = uniform(self._comm, self._run.mean_state)
        if self._comm.rank:
            return
        # Serialise to memory first: torch's own writer hides errors of a full disk.
        packed = io.BytesIO()
        torch.save(state, packed)
        write_whole(path, lambda file: file.write(packed.getbuffer()))
        self._run.features.save(path)


def _write_report(comm: Communicator, report: RunReport) -> None:
    """Write the report on rank 0. Collective."""

    def write() -> None:
        if (path := report.config.results.report) is not None:
            text = report.to_json().encode()
            write_whole(path, lambda file: file.write(text))

    uniform(comm, once_on_rank_0(comm, write))  # If it is lost before, the next rank 0 writes.


def _die_of_bug(run: Worker, error: Exception) -> None:
    """End a rank that has a bug before it closes anything, which may wait for the other ranks: if
    these can go on without it, they shall not wait for it."""
    survives = run.recovery is not None and run.comm.size > 1
    if survives and not isinstance(error, DlioError | RankLeft):
        traceback.print_exception(error)
        die()


def _resume(run: Worker, checkpoints: "Checkpoints") -> str | None:
    """Restore the newest checkpoint and return its path; None if there is none. Collective."""
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        return None
    restore(run, checkpoint)
    if run.comm.rank == 0:
        where = f"epoch {run.epoch_number + 1}, step {run.updates}"
        print(f"resumed from {checkpoint.path}: {where}", flush=True)
        if sharing := checkpoints.sharing():
            print(sharing, flush=True)
        planned, epochs = checkpoint.about.get("planned_epochs"), run.config.optimizer.epochs
        if planned not in (None, epochs):
            print(
                f"the run was to have {counted(planned, 'epoch')} and is to have {epochs} now: "
                "from here on, the learning rate is that of a run of "
                f"{counted(epochs, 'epoch')} at the same step",
                flush=True,
            )
        before = checkpoint.about["global_batch"]
        if before != run.global_batch:
            print(
                f"the global batch was {counted(before, 'sample')} and is {run.global_batch} now: "
                "adjust --batch-size, which is per rank, to keep it",
                flush=True,
            )
    return checkpoint.path
