"""`dlio train`: start ranks on this machine and train, or train as a rank that mpirun started."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import ConfigFile, RankOptions
from dlio.data.source import ReadErrors
from dlio.data.splits import TRAIN_FOLDERS, VAL_FOLDERS
from dlio.errors import UsageError
from dlio.launch.command_ranks import has_mpi, on_ranks
from dlio.train.checkpoint_progress import finished_epochs
from dlio.train.config import TrainConfig
from dlio.train.factory import check_name
from dlio.train.names import CALLBACKS
from dlio.train.train_options import MODEL_NAMES, DataOptions
from dlio.util.live_line import LiveLine
from dlio.util.printable import print_line
from dlio.util.units import counted


@with_help(
    "dlio train /data/train --val /data/val -n 2 --epochs 10",
    "dlio train /data --tiers ram:8GiB,/local/scratch:200GiB --device cuda",
    "dlio train /data -n 4 --exchange gossip --checkpoint ckpt --resume",
    "dlio train --config run.yaml --lr 0.1",
    groups={
        "Data": (
            *(
                "source",
                "val",
                "split",
                "val_split",
                "reader_option",
                "task",
                "target",
                "category",
                "mixup",
                "cutmix",
                "replica",
                "batch_size",
                "accumulate",
                "image_size",
                "crop_scale",
            ),
            *("shuffle", "source_order", "on_error", "workers", "decode", "seed"),
        ),
        "Tiers": ("tiers", "pretend_nodes"),
        "Model and optimizer": (
            *(
                "epochs",
                "model",
                "weights",
                "layerwise",
                "optimizer",
                "lr",
                "lr_schedule",
                "momentum",
            ),
            *("weight_decay", "clip", "ema"),
            *("batch_norm", "compile", "precision", "device", "nan", "early_stopping", "callback"),
        ),
        "Ranks": ("ranks", "backend", "nodes", "exchange", "mesh", "balance"),
        "Lost ranks": (
            *("fault_tolerance", "min_ranks", "spares", "on_loss", "hang_after", "evict_slow"),
            *("check_weights", "leave_at"),
        ),
        "Checkpoints and results": (
            *("checkpoint", "checkpoint_every", "checkpoint_minutes", "keep", "resume", "save"),
            *("report", "tensorboard", "summaries", "trace", "trace_out", "replay"),
        ),
        "Less work": (
            *("skip_samples", "skip_share", "prune", "prune_tolerance", "prune_target"),
            "dump_matrices",
        ),
        "Configuration": ("config", "print_config"),
    },
    usual=(
        ("source", "Class folders, a table, packed data, or train/ and val/"),
        ("val", "Held-out data, evaluated after each epoch"),
        ("ranks", "Ranks to start here"),
        ("epochs", "Passes over the data"),
        ("batch_size", "Samples of each rank in a batch"),
        ("image_size", "Side of the square crops in pixels"),
        ("model", "resnet50, vit, module:factory"),
        ("lr", "Peak learning rate"),
        ("tiers", "Caches, such as ram:8GiB,/scratch:200GiB"),
        ("checkpoint", "Write checkpoints here, at the end of each epoch"),
        ("resume", "Go on from the newest checkpoint"),
    ),
)
def command(config: TrainConfig, ranks: RankOptions, file: ConfigFile) -> None:  # noqa: ARG001
    """Train a network on a data set that is cached in a hierarchy of tiers."""
    source, val = parts_of(config.data)
    run(config.replaced(source=source, val=val), ranks.ranks, ranks.backend)


def run(config: TrainConfig, ranks: int | None, backend: str = "auto") -> None:
    """Start `ranks` ranks that train, or train as one of them.

    Raises SystemExit with the exit code of the ranks if they failed.
    """
    starts_again = config.ranks.nodes is not None or config.survival.fault_tolerance == "restart"
    if starts_again and ranks is None:
        option = "--nodes" if config.ranks.nodes is not None else "--fault-tolerance restart"
        raise UsageError(f"{option} needs -n, too: only ranks that dlio starts begin again")
    if starts_again and backend == "torch":
        raise UsageError("--backend torch does not go with --nodes and --fault-tolerance restart")
    if _is_finished(config):
        print_line(
            f"{counted(config.optimizer.epochs, 'epoch')} done in {config.checkpoints.checkpoint}: "
            "there is nothing to train; give more --epochs to go on"
        )
        return
    survival = config.survival
    may_lose_ranks = survival.is_tolerant and config.results.replay is None
    saves = config.checkpoints.checkpoint is not None and config.ranks.nodes is None
    if saves and may_lose_ranks and not starts_again:  # All ranks leave, as only those of MPI can.
        saves = backend != "torch" and has_mpi()
    on_ranks(
        ranks,
        train_rank,
        config,
        check=lambda: _check(config, ranks or 1),
        min_ranks=survival.min_ranks if may_lose_ranks else None,
        spares=survival.spares,
        backend=backend,
        start=partial(_start_again, config) if starts_again else None,
        live=True,
        may_end=saves,
    )


def _is_finished(config: TrainConfig) -> bool:
    """True if a run to resume has no epoch left, and nothing else to write."""
    options, report = config.checkpoints, config.results.report
    if not options.resume or options.checkpoint is None or options.save or report:
        return False
    return finished_epochs(options.checkpoint, config) >= config.optimizer.epochs


def train_rank(config: TrainConfig) -> None:
    """Train as this rank; rank 0 prints the report."""
    from dlio.comm import world
    from dlio.comm.launch_environment import under_mpi, under_torch
    from dlio.comm.survival.membership import RankLeft
    from dlio.util.signals import work_is_done

    # Importing torch takes seconds.
    with LiveLine("starting", shown=not (under_mpi() or under_torch())):
        from dlio.train.trainer import train

    with ExitStack() as lasting:
        try:
            report = train(config, lasting)
        except RankLeft:
            return
        work_is_done()  # The report takes a moment.
        tells = world().rank == 0
    if tells:
        report.print()
        # The loss of a rank may cost a checkpoint, and is told.
        if report.checkpoints and report.checkpoints["lacks_last"] and not report.losses:
            from dlio.train.checkpoint.checkpoint_store import without_last

            said = without_last(report.checkpoints["written"])
            sys.stderr.write(f"dlio: --checkpoint {config.checkpoints.checkpoint}: {said}\n")


def _start_again(
    config: TrainConfig,
    module: str,
    argv: Sequence[str],
    ranks: int,
    own: Mapping[str, str],
    live: LiveLine,
) -> int:
    """Start ranks that are started again where they cannot go on; returns the exit code."""
    from dlio.launch import relaunch

    def progress() -> int:
        """Number of the newest checkpoint."""
        folder = config.checkpoints.checkpoint
        names = os.listdir(folder) if folder is not None and os.path.isdir(folder) else []
        numbers = [name.removeprefix("step-") for name in names if name.startswith("step-")]
        return max((int(number) for number in numbers if number.isdecimal()), default=-1)

    def leftovers(token: str) -> list[str]:
        return [] if config.results.trace is None else [f"{config.results.trace}.{token}.tmp"]

    return relaunch.run(
        relaunch.RestartableJob(
            module,
            tuple(argv),
            ranks,
            own,
            nodes=config.ranks.node_names,
            survives=config.survival.fault_tolerance == "shrink",
            again=config.survival.is_tolerant,
            min_ranks=config.survival.min_ranks,
            progress=progress,
            live=live,
            leftovers=leftovers,
        )
    )


def parts_of(data: DataOptions) -> tuple[str, str | None]:
    """Return (training data, validation data) of a run, of which splits may be chosen."""
    if data.split is None and data.val_split is None:
        return find_parts(data.source, data.val)
    return data.source, data.val or (data.source if data.val_split else None)


def find_parts(source: str, val: str | None, quiet: bool = False) -> tuple[str, str | None]:
    """Return (training data, validation data).

    A source that holds only the folders train/ and val/ is split into these two, and that is
    printed unless `quiet`. Raises SourceError if it cannot be listed.
    """
    if not os.path.isdir(source):
        return source, val
    with ReadErrors(source):
        inside = sorted(entry.name for entry in os.scandir(source) if entry.is_dir())
    train = [name for name in inside if name.lower() in TRAIN_FOLDERS]
    held_out = [name for name in inside if name.lower() in VAL_FOLDERS]
    if len(train) != 1 or len(train) + len(held_out) != len(inside):
        return source, val
    if val is None and held_out:
        # Prefer val to test if both exist.
        val = os.path.join(source, min(held_out, key=lambda n: VAL_FOLDERS.index(n.lower())))
    source = os.path.join(source, train[0])
    if not quiet:
        print_line(f"training on {source}" + (f", held out: {val}" if val else ""))
    return source, val


def _check(config: TrainConfig, ranks: int) -> None:
    """Raise an error for a mistake that can be found before ranks are started, without torch.

    Opens the data sets, which also lists them, so that ranks find the lists in the cache.
    """
    from dlio.data.reader import open_split
    from dlio.storage.tier_spec import choose_tiers

    config.check_ranks(ranks)
    check_name("--model", config.model.model, MODEL_NAMES)
    for callback in config.callbacks.callback:
        check_name("--callback", callback, tuple(CALLBACKS))
    config.check_run()
    choose_tiers(config.data.tiers, 0)
    data = config.data
    for path, split in ((data.source, data.split), (data.val, data.val_split)):
        if path is not None:
            open_split(path, split, data.reader_option).close()
    for path in data.replica:
        open_split(path, data.split, data.reader_option).close()
