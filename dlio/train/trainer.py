"""The trainer of `dlio train`: loader -> model -> exchange -> optimizer, the same on every rank."""

import io
import math
import time
import traceback
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import torch

from dlio.comm import Communicator, world
from dlio.comm.planned_membership import plan_world
from dlio.comm.survival.membership import AllLeave, AllPause, RankLeft
from dlio.comm.survival.node_watch import watch_policy
from dlio.comm.survival.recovery import check_survival, recovery_of, uniform
from dlio.errors import DlioError, UsageError
from dlio.exchange.exchange_spec import parse_exchange
from dlio.exchange.nccl.default_group import devices_connected
from dlio.features.pruning.pruned_file import save_layout
from dlio.launch.node.job_starts import start_of
from dlio.loader.dataloader import DataLoader
from dlio.storage.mount import Mount
from dlio.train.callbacks import make_callbacks
from dlio.train.callbacks.weight_guard import WeightGuard
from dlio.train.checkpoint import Checkpoints
from dlio.train.checkpoint.checkpoint_callback import CheckpointCallback
from dlio.train.checkpoint.state import restore
from dlio.train.compute_device import choose_device
from dlio.train.config import TrainConfig
from dlio.train.departure import RESUME_CODE, EndRequests, departure_at
from dlio.train.ghost_spec import group_size
from dlio.train.memory_snapshot.job_restart import JobRestart
from dlio.train.report import RunReport
from dlio.train.run_requests import RunRequest, make_request_channel
from dlio.train.sample_ledger import SampleLedger
from dlio.train.sample_sharing import SampleSharing
from dlio.train.state_transfer import StateTransfer
from dlio.train.tasks.registry import make_task, resolve_config
from dlio.train.training_data import make_loader, open_data
from dlio.train.training_progress import TrainingProgress
from dlio.train.worker import Worker
from dlio.util.child_processes import die
from dlio.util.cores import available_cores
from dlio.util.heap import keep_freed_memory
from dlio.util.whole_files import write_whole


def train(config: TrainConfig) -> RunReport:
    """Train a model on the ranks of this job. Collective.

    Raises DlioError for errors that a user can fix. Other ranks may then wait for this one; the
    caller ends them with `dlio.comm.abort`.
    """
    config.check_run()
    began = time.time()
    planned = None if config.replay is None else plan_world()
    comm = world()
    start = start_of()
    resuming = None if start is None else JobRestart(start, began)
    is_again = resuming is not None and resuming.is_again
    if planned is None:
        check_survival(comm, config.fault_tolerance, config.min_ranks)
    with ExitStack() as stack:
        checkpoints = saving = requests = None
        if config.checkpoint is not None:
            if recovery_of(comm) is None:  # Otherwise a rank leaves alone; see `departure_at`.
                requests = stack.enter_context(EndRequests())
            checkpoints = stack.enter_context(Checkpoints(config.checkpoint, comm, config.keep))
            if comm.rank == 0 and not (config.resume or is_again) and checkpoints.paths():
                raise UsageError(
                    f"--checkpoint {config.checkpoint}: holds checkpoints of another run; add "
                    "--resume to continue it, or name another folder"
                )
        sharing = stack.enter_context(SampleSharing(config, comm))
        data = stack.enter_context(
            open_data(comm, config.source, config, config.tiers, True, sharing)
        )
        config = resolve_config(config, data, sharing.schema(data))
        device = choose_device(config.device, comm)
        stack.enter_context(devices_connected(comm, device))
        loader = stack.enter_context(make_loader(data, config, True, sharing.mesh, device))
        mounted = data.mount(sharing.data, config.pretend_nodes)
        sharing.check_order(mounted)
        held_out = _open_held_out(stack, config, comm, mounted, sharing)
        task = make_task(config, data, comm, sharing.schema(data))
        cores = available_cores()
        threads = max(1, cores * sharing.machines(mounted) // comm.size)
        # The rounding of a gradient depends on the number of threads.
        torch.set_num_threads(threads if group_size(config.batch_norm) is None else 1)
        keep_freed_memory()
        is_found = False
        if resuming is not None:
            resuming.end_phase("open")
            is_found = resuming.find(comm)
            resuming.end_phase("read")
        begun = None if start is None else start.begun
        run = Worker(config, comm, loader, held_out, task, begun, is_found, sharing)
        stack.callback(run.close)
        if run.recovery is not None:
            nodes = [mounted.nodes.names[node] for node in mounted.nodes.node_of]
            run.recovery.describe(nodes, lambda: (run.epoch_number, run.updates))
            if start is not None:
                run.recovery.numbers = start.ranks
        report = RunReport(
            dataset={"samples": len(data), "bytes": sharing.payload_bytes(data)},
            ranks=comm.size if start is None else start.begun,
            nodes=len(mounted.nodes.names),
            tiers=[str(s) for s in mounted.all_tiers],
            config=config,
            notes=list(task.notes),
        )
        if config.prune != "off" and held_out is None and comm.rank == 0:
            print(
                "without --val, pruning cannot check held-out accuracy: it relies on the loss of "
                "the last batches",
                flush=True,
            )
        policy = watch_policy()
        policy.hang_after_s = math.inf if config.hang_after == 0 else config.hang_after
        policy.evicts_slow = config.evict_slow
        callbacks = make_callbacks(config, comm.rank)
        if resuming is not None:
            resuming.end_phase("model")
            if is_found:
                resuming.restore(run)
            resuming.end_phase("restore")
        if checkpoints is not None:
            if (config.resume or is_again) and not is_found:
                report.resumed = _resume(run, checkpoints)
            wishes = None
            if requests is not None:
                wishes = make_request_channel(comm, parse_exchange(config.exchange))
                stack.callback(wishes.close)
                requests.ask = partial(wishes.wish, RunRequest.END)
            saving = CheckpointCallback(
                run, checkpoints, config.checkpoint_every, config.checkpoint_minutes, wishes
            )
            callbacks.append(saving)
        ledger = None
        if config.trace is not None:
            if resuming is None:
                ledger = SampleLedger(config.trace, comm)
            else:
                ledger = resuming.open_ledger(run, config.trace)
            stack.enter_context(ledger)
        copies = None
        if resuming is not None:
            resuming.note_losses(run)
            if (copies := resuming.snapshots(run)) is not None:
                copies.ledger = ledger
                callbacks.append(copies)
        run.callbacks = [stack.enter_context(callback) for callback in callbacks]
        try:
            _epochs(stack, config, comm, run, ledger)
        except AllPause:
            assert resuming is not None
            assert copies is not None
            resuming.pause(run, copies)
        except AllLeave:
            _end_early(run, checkpoints, saving)
        except Exception as error:
            _die_of_bug(run, error)
            raise
        report.epochs, report.stopped = run.history, run.stopped
        report.notes += sharing.parts.notes
        report.losses = list(run.losses)
        report.changes = list(run.changes)
        report.restored = [
            each for guard in callbacks if isinstance(guard, WeightGuard) for each in guard.restored
        ]
        if checkpoints is not None:
            checkpoints.wait()
            report.checkpoints = checkpoints.statistics()
        _write(config, comm, run, report)
        if planned is not None:
            planned.end()
    return report


def _die_of_bug(run: Worker, error: Exception) -> None:
    """End a rank that has a bug before it closes anything, which may wait for the other ranks: if
    these can go on without it, they shall not wait for it."""
    if (
        run.recovery is not None
        and run.comm.size > 1
        and not isinstance(error, DlioError | RankLeft)
    ):
        traceback.print_exception(error)
        die()


def _open_held_out(
    stack: ExitStack,
    config: TrainConfig,
    comm: Communicator,
    mounted: Mount,
    sharing: SampleSharing,
) -> DataLoader | None:
    """Open the loader of --val in the tiers' spare room."""
    if config.val is None:
        return None
    val = stack.enter_context(
        open_data(comm, config.val, config, mounted.spare_tiers(), False, sharing)
    )
    device = choose_device(config.device, comm)
    return stack.enter_context(make_loader(val, config, False, sharing.mesh, device))


def _epochs(
    stack: ExitStack,
    config: TrainConfig,
    comm: Communicator,
    run: Worker,
    ledger: SampleLedger | None,
) -> None:
    """Train the remaining epochs, until the last one or until a callback stops the run."""
    progress = stack.enter_context(TrainingProgress(config.epochs, run.steps, comm.rank))
    for callback in run.callbacks:
        callback.begins(run)
    elastic = None if run.recovery is None else run.recovery.elastic
    stack.enter_context(departure_at(elastic, config.leave_at))
    if run.recovery is not None and config.spares:
        joining = StateTransfer(run, run.recovery, ledger)
        stack.callback(joining.close)
        run.rest(comm.size - config.spares)
    for epoch in range(len(run.history), config.epochs):
        progress.epoch_ends(run.epoch(epoch, progress, ledger))
        if run.stopped is not None:
            break
    if ledger is not None:
        ledger.finish()
    uniform(comm, comm.barrier)  # Nobody leaves while others need it.
    if run.recovery is not None:
        run.recovery.end()


def _end_early(
    run: Worker, checkpoints: Checkpoints | None, saving: CheckpointCallback | None
) -> NoReturn:
    """Write a last checkpoint, as all ranks have been told to leave. Collective."""
    said, failed = "no checkpoint is written without --checkpoint", 0
    if checkpoints is not None and saving is not None:
        failed = len(checkpoints.failures)
        saving.save(run)
        checkpoints.wait()
        failed = len(checkpoints.failures) - failed
        said = f"go on with --resume from {checkpoints.folder}"
        if failed:
            said = "the last checkpoint was not written; --resume goes on from an older one"
    if run.comm.rank == 0:
        where = f"epoch {run.epoch_number + 1}, step {run.updates}"
        print(f"told to end at {where}: {said}", flush=True)
    raise SystemExit(1 if failed else RESUME_CODE)


def _resume(run: Worker, checkpoints: Checkpoints) -> str | None:
    """Restore the newest checkpoint and return its path; None if there is none. Collective."""
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        return None
    restore(run, checkpoint)
    if run.comm.rank == 0:
        where = f"epoch {run.epoch_number + 1}, step {run.updates}"
        print(f"resumed from {checkpoint.path}: {where}", flush=True)
        before = checkpoint.about["global_batch"]
        if before != run.global_batch:
            print(
                f"the global batch was {before} samples and is {run.global_batch} now: adjust "
                "--batch-size, which is per rank, to keep it",
                flush=True,
            )
    return checkpoint.path


def _write(config: TrainConfig, comm: Communicator, run: Worker, report: RunReport) -> None:
    """Write the weights (--save) and the report (--report) on rank 0. Collective."""
    if config.save is not None:
        state = uniform(comm, run.mean_state)
        if comm.rank == 0:
            # Serialise to memory first: torch's own writer hides errors of a full disk.
            packed = io.BytesIO()
            torch.save(state, packed)
            write_whole(config.save, lambda file: file.write(packed.getbuffer()))
            save_layout(config.save, run.pruner.apoptosis.layout if run.pruner else None)

    def write() -> None:
        if config.report is not None and comm.rank == 0:
            text = report.to_json().encode()
            write_whole(config.report, lambda file: file.write(text))
        comm.barrier()  # If rank 0 is lost before it has written, the next one writes.

    uniform(comm, write)
