"""The trainer: loader -> model -> exchange -> optimizer, on every rank alike."""

import io
from contextlib import ExitStack

import torch

from dlio.comm import Communicator, world
from dlio.errors import UsageError
from dlio.train.callbacks import make_callbacks
from dlio.train.checkpoint import Checkpoints
from dlio.train.checkpoint.callback import CheckpointCallback
from dlio.train.checkpoint.state import restore
from dlio.train.config import TrainConfig
from dlio.train.data import difference, make_loader, open_data
from dlio.train.exchange.buckets import averaged_state
from dlio.train.ledger import SampleLedger
from dlio.train.progress import TrainingProgress
from dlio.train.pruning.pruned_file import save_layout
from dlio.train.report import RunReport
from dlio.train.worker import Worker
from dlio.util.cores import available_cores
from dlio.util.files import write_whole


def train(config: TrainConfig) -> RunReport:
    """Train a model on this process's ranks. Collective.

    Raises DlioError for whatever a user can mend; other ranks are then left waiting, until the
    caller ends them (`dlio.comm.abort`).
    """
    config.check_outputs()
    comm = world()
    with ExitStack() as stack:
        checkpoints = None
        if config.checkpoint is not None:
            checkpoints = stack.enter_context(Checkpoints(config.checkpoint, comm, config.keep))
            if comm.rank == 0 and not config.resume and checkpoints.paths():
                raise UsageError(
                    f"--checkpoint {config.checkpoint}: holds checkpoints of another run; --resume "
                    "goes on with it, or name another folder"
                )
        data = stack.enter_context(
            open_data(comm, config.source, config, config.tiers, training=True)
        )
        loader = stack.enter_context(make_loader(data, config, training=True))
        if not data.crops:
            held = ", ".join(name for name, _ in data.reader.schema.fields)
            raise UsageError(f"{config.source} holds {held}: training wants images with labels")
        mounted = data.mount(comm, config.pretend_nodes)
        held_out = None
        if config.val is not None:
            val = stack.enter_context(
                open_data(comm, config.val, config, mounted.spare_tiers(), training=False)
            )
            if list(val.classes) != list(data.classes):
                raise UsageError(
                    f"{config.val} has other classes than {config.source}: "
                    f"{difference(val.classes, data.classes)}"
                )
            held_out = stack.enter_context(make_loader(val, config, training=False))
        cores = available_cores()
        torch.set_num_threads(max(1, cores * mounted.nodes.machines // comm.size))
        run = Worker(config, comm, loader, held_out)
        stack.callback(run.close)
        report = RunReport(
            dataset={"samples": len(data), "bytes": int(data.reader.sizes.sum())},
            ranks=comm.size,
            nodes=len(mounted.nodes.names),
            tiers=[str(s) for s in (*mounted.tiers, mounted.decoded_spec) if s is not None],
            config=config,
        )
        if config.prune != "off" and held_out is None and comm.rank == 0:
            print(
                "without --val nobody sees what pruning costs on held-out data: it goes by the "
                "last batches' loss",
                flush=True,
            )
        callbacks = make_callbacks(config, comm.rank)
        if checkpoints is not None:
            if config.resume:
                report.resumed = _resume(run, checkpoints)
            callbacks.append(CheckpointCallback(run, checkpoints, config.checkpoint_every))
        run.callbacks = [stack.enter_context(callback) for callback in callbacks]
        trace = None
        if config.trace is not None:
            trace = stack.enter_context(SampleLedger(config.trace, comm))
        progress = stack.enter_context(TrainingProgress(config.epochs, run.steps, comm.rank))
        for callback in run.callbacks:
            callback.begins(run)
        for epoch in range(len(run.history), config.epochs):
            progress.epoch_ends(run.epoch(epoch, progress, trace))
            if run.stopped is not None:
                break
        report.epochs, report.stopped = run.history, run.stopped
        if checkpoints is not None:
            checkpoints.wait()
            report.checkpoints = checkpoints.statistics()
        if trace is not None:
            trace.finish()
        _write(config, comm, run, report)
    return report


def _resume(run: Worker, checkpoints: Checkpoints) -> str | None:
    """Go on from the newest checkpoint, if there is one; its path. Collective."""
    found = checkpoints.newest()
    if found is None:
        return None
    restore(run, found)
    if run.comm.rank == 0:
        where = f"epoch {run.epoch_number + 1}, step {run.updates}"
        print(f"resumed from {found.path}: {where}", flush=True)
        before = int(found.about["global_batch"])
        if before != run.global_batch:
            print(
                f"the global batch was {before} samples and is {run.global_batch} now: "
                "--batch-size, which is per rank, can keep it",
                flush=True,
            )
    return found.path


def _write(config: TrainConfig, comm: Communicator, run: Worker, report: RunReport) -> None:
    if config.save is not None:
        state = averaged_state(run.model, comm)
        if comm.rank == 0:
            # By way of memory: torch's own writer hides that a disk is full.
            packed = io.BytesIO()
            torch.save(state, packed)
            write_whole(config.save, lambda file: file.write(packed.getbuffer()))
            save_layout(config.save, run.pruner.apoptosis.layout if run.pruner else None)
    if config.report is not None and comm.rank == 0:
        text = report.to_json().encode()
        write_whole(config.report, lambda file: file.write(text))
