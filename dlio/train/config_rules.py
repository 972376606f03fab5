"""Options of a training run that go together, or do not."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from dlio.errors import UsageError
from dlio.exchange.exchange_spec import parse_exchange
from dlio.features.mesh.mesh_axes import parse_sizes
from dlio.plan.block_order import window_of
from dlio.plan.epoch import is_exact
from dlio.train.departure import seconds_until
from dlio.train.ghost_spec import group_size
from dlio.train.train_options import TrainOptions

_OF_ORDER: Final = ("--shuffle", "--source-order")
_NO_NODE: Final = r"^$|^-|[^\w.\-]"
"""Matches a name that is not a host's."""


def check_together(config: TrainOptions) -> None:
    """Raise UsageError for options that need others, or do not go with others."""
    spec = parse_exchange(config.exchange)
    if config.check_weights is not None and not spec.alike:
        raise UsageError(
            f"--check-weights does not go with --exchange {config.exchange}, whose ranks have "
            "different weights: choose one that sums gradients, such as allreduce"
        )
    if window_of(config.source_order) is not None and not is_exact(config.shuffle):
        raise UsageError(
            f"--source-order {config.source_order} goes with --shuffle batch or global"
        )
    if config.prune_tolerance is not None and config.prune == "off":
        raise UsageError("--prune-tolerance needs --prune apoptosis, too")
    if config.prune_target is not None:
        if config.prune == "off":
            raise UsageError("--prune-target needs --prune apoptosis, too")
        if config.prune_tolerance is not None:
            raise UsageError(
                "--prune-target does not go with --prune-tolerance: leave one of them out"
            )
    _check_batch_norm(config)
    _check_task(config)
    _check_mesh(config)
    _check_compile(config)
    _check_mixing(config)
    _check_skipping(config)
    _check_fault_tolerance(config)
    _check_replay(config)
    _check_decoding(config)


def _chosen(options: Mapping[str, bool]) -> str | None:
    """Return the first option that is chosen; None if none is."""
    return next((option for option, is_chosen in options.items() if is_chosen), None)


def _check_batch_norm(config: TrainOptions) -> None:
    group, spec = group_size(config.batch_norm), parse_exchange(config.exchange)
    if group is None and config.batch_norm != "sync":
        return
    unsuitable = {
        f"--exchange {config.exchange}": not spec.alike,
        f"--prune {config.prune}": config.prune != "off",
        f"--fault-tolerance {config.fault_tolerance}": config.fault_tolerance != "off",
    }
    if group is not None:
        unsuitable |= {
            # Groups are summed by all ranks, exactly.
            f"--exchange {config.exchange}": str(spec) != "allreduce",
            f"--shuffle {config.shuffle}": not is_exact(config.shuffle),
            "--balance": config.balance,
            "--replay": config.replay is not None,
        }
    if option := _chosen(unsuitable):
        raise UsageError(
            f"--batch-norm {config.batch_norm} does not go with {option}: leave one of them out"
        )
    if group is not None and config.batch_size % group:
        raise UsageError(
            f"--batch-norm {config.batch_norm}: a rank's batch of {config.batch_size} is not a "
            "multiple of it; give another --batch-size, which is per rank"
        )


def _check_task(config: TrainOptions) -> None:
    if config.ema is not None and config.prune != "off":
        raise UsageError(f"--ema does not go with --prune {config.prune}: leave one of them out")
    if config.layerwise is None:
        return
    if config.task != "autoencode":
        raise UsageError("--layerwise needs --task autoencode, too")
    spec = parse_exchange(config.exchange)
    unsuitable = {
        f"--exchange {config.exchange}": not spec.alike,
        f"--prune {config.prune}": config.prune != "off",
        "--skip-samples": config.skip_samples,
    }
    if option := _chosen(unsuitable):
        raise UsageError(f"{option} does not go with --layerwise: leave one of them out")


def _check_mesh(config: TrainOptions) -> None:
    if config.mesh is None:
        return
    sizes = parse_sizes(config.mesh)
    parts, slabs = sizes.get("model", 1) > 1, sizes.get("space", 1) > 1
    if parts and slabs:
        raise UsageError(
            f"--mesh {config.mesh}: a model cannot have both layers in parts (model=) and samples "
            "in parts (space=): leave one of them out"
        )
    if not parts and not slabs:
        return
    unsuitable = {
        f"--exchange {config.exchange}": not parse_exchange(config.exchange).alike,
        f"--fault-tolerance {config.fault_tolerance}": config.fault_tolerance != "off",
        "--nodes": config.nodes is not None,
        "--pretend-nodes": config.pretend_nodes is not None,
        "--balance": config.balance,
        f"--prune {config.prune}": config.prune != "off",
        "--skip-samples": config.skip_samples,
        "--on-error skip": config.on_error == "skip",
        "--compile": config.compile,
        f"--batch-norm {config.batch_norm}": group_size(config.batch_norm) is not None,
        "--trace": config.trace is not None,
        "--replay": config.replay is not None,
        "--layerwise": parts and config.layerwise is not None,
        "--check-weights": parts and config.check_weights is not None,
        "--precision fp16": parts and config.precision == "fp16",
    }
    if option := _chosen(unsuitable):
        shared = "layers" if parts else "samples"
        raise UsageError(
            f"{option} does not go with --mesh {config.mesh}, whose ranks share {shared}: leave "
            "one of them out"
        )


def _check_compile(config: TrainOptions) -> None:
    if not config.compile:
        return
    unsuitable = {
        f"--exchange {config.exchange}": parse_exchange(config.exchange).pairwise,
        "--layerwise": config.layerwise is not None,
    }
    if option := _chosen(unsuitable):
        raise UsageError(
            f"--compile does not go with {option}, which changes the model between its layers "
            "or in each epoch: leave one of them out"
        )


def _check_mixing(config: TrainOptions) -> None:
    for option, alpha in (("--mixup", config.mixup), ("--cutmix", config.cutmix)):
        unsuitable = {
            "--skip-samples": config.skip_samples,
            "--replay": config.replay is not None,
            f"--fault-tolerance {config.fault_tolerance}": config.fault_tolerance != "off",
        }
        if alpha is not None and (other := _chosen(unsuitable)):
            raise UsageError(
                f"{option} does not go with {other}: an image is mixed with the one before it in "
                "the batch; leave one of them out"
            )


def _check_decoding(config: TrainOptions) -> None:
    if config.decode == "cpu":
        return
    unsuitable = {
        f"--tiers {config.tiers}": ":decoded" in (config.tiers or ""),
        "--replay": config.replay is not None,
    }
    if option := _chosen(unsuitable):
        raise UsageError(
            f"--decode device does not go with {option}, whose samples the CPU decodes: leave one "
            "of them out"
        )


def _check_replay(config: TrainOptions) -> None:
    if config.replay is None:
        return
    unsuitable = {
        f"--exchange {config.exchange}": parse_exchange(config.exchange).ranks_differ,
        "--checkpoint": config.checkpoint is not None,
        "--balance": config.balance,
        f"--prune {config.prune}": config.prune != "off",
        "--skip-samples": config.skip_samples,
    }
    if option := _chosen(unsuitable):
        raise UsageError(
            f"{option} does not go with --replay: its weights depend on more than the "
            "batches that the trace has"
        )


def _check_nodes(config: TrainOptions) -> None:
    names = config.node_names
    if len(set(names)) < len(names) or any(re.search(_NO_NODE, name) for name in names):
        raise UsageError(f"--nodes {config.nodes}: give names of nodes, each once, such as a,b,c")
    if config.fault_tolerance == "restart" and config.checkpoint is None:
        raise UsageError("--fault-tolerance restart needs --checkpoint, too")
    unsuitable = {
        "--spares": config.spares > 0,
        "--leave-at": config.leave_at is not None,
        "--replay": config.replay is not None,
        f"--shuffle {config.shuffle}": not is_exact(config.shuffle),
        f"--source-order {config.source_order}": window_of(config.source_order) is not None,
    }
    again = config.fault_tolerance == "restart"
    for option, chosen in unsuitable.items():
        if chosen and (names or (again and not option.startswith(_OF_ORDER))):
            chief = "--nodes" if names else "--fault-tolerance restart"
            raise UsageError(f"{option} does not go with {chief} yet: leave one of them out")


def _check_fault_tolerance(config: TrainOptions) -> None:
    _check_nodes(config)
    if config.fault_tolerance == "off":
        for option, chosen in (
            ("--min-ranks", config.min_ranks > 1),
            ("--on-loss", config.on_loss != "keep"),
            ("--spares", config.spares > 0),
            ("--leave-at", config.leave_at is not None),
            ("--hang-after", config.hang_after is not None),
            ("--evict-slow", config.evict_slow),
        ):
            if chosen:
                raise UsageError(f"{option} needs --fault-tolerance shrink, too")
    elif config.checkpoint_minutes is not None:
        raise UsageError(
            f"--checkpoint-minutes does not go with --fault-tolerance {config.fault_tolerance} "
            "yet: give --checkpoint-every"
        )
    elif parse_exchange(config.exchange).fragments > 1:
        raise UsageError(
            f"--exchange {config.exchange} does not go with --fault-tolerance: what a lost rank "
            "did is in some fragments and not in others; leave the fragments out"
        )
    if config.leave_at is not None:
        seconds_until(config.leave_at, datetime.now())
    unsuitable = {
        f"--prune {config.prune}": config.prune != "off",
        "--skip-samples": config.skip_samples,
        "--balance": config.balance,
        f"--shuffle {config.shuffle}": not is_exact(config.shuffle),
    }
    for option, chosen in unsuitable.items():
        if chosen and config.spares:
            raise UsageError(f"{option} does not go with --spares yet: leave one of them out")


def _check_skipping(config: TrainOptions) -> None:
    from dlio.features.skipping.skip_rule import SHARE

    if config.skip_share is not None and config.skip_share > SHARE:
        raise UsageError(f"--skip-share {config.skip_share}: give a share above 0, up to {SHARE}")
    if config.skip_samples and config.epochs < 3:
        raise UsageError(
            f"--skip-samples with --epochs {config.epochs}: the first epoch and the last see all "
            "samples; give 3 or more, and 8 to save time"
        )
