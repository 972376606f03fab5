"""Rules among the options that belong to no feature; for others see `dlio.train.feature_spec`."""

import re
from collections.abc import Mapping
from typing import Final

from dlio.errors import UsageError
from dlio.plan.block_order import window_of
from dlio.plan.epoch import check_mode, is_exact
from dlio.train.feature_spec import refuse
from dlio.train.train_options import OptimizerOptions, TrainOptions

_OF_ORDER: Final = ("--shuffle", "--source-order")
_MOMENTUM: Final = OptimizerOptions().momentum
_NO_NODE: Final = r"^$|^-|[^\w.\-]"
"""Matches a name that is not a host's."""

_NOT_REPLAYED: Final = (
    "{option} does not go with --replay: its weights depend on more than the batches that the "
    "trace has"
)
_NOT_WITH_SPARES: Final = "{option} does not go with --spares yet: leave one of them out"
"""Messages for `refuse`."""


def check_together(config: TrainOptions) -> None:
    """Raise UsageError for options that need others, or do not go with others."""
    batches, spec = config.batches, config.ranks.spec
    check_mode(batches.shuffle)
    if config.callbacks.check_weights is not None and not spec.alike:
        raise UsageError(
            f"--check-weights does not go with --exchange {config.ranks.exchange}, whose ranks "
            "have different weights: choose one that sums gradients, such as allreduce"
        )
    if window_of(batches.source_order) is not None and not is_exact(batches.shuffle):
        raise UsageError(
            f"--source-order {batches.source_order} goes with --shuffle batch or global"
        )
    tolerance = config.survival.fault_tolerance
    refuse_mixed(
        config,
        {
            "--replay": config.results.replay is not None,
            f"--fault-tolerance {tolerance}": tolerance != "off",
        },
    )
    steps = config.optimizer
    if steps.momentum != _MOMENTUM and steps.optimizer in ("adagrad", "adam", "adamw"):
        raise UsageError(
            f"--momentum does not go with --optimizer {steps.optimizer}, which has none: leave one "
            "of them out"
        )
    _check_nodes(config)
    _check_fault_tolerance(config)
    _check_replay(config)
    _check_decoding(config)


def refuse_mixed(config: TrainOptions, chosen: Mapping[str, bool]) -> None:
    """Raise UsageError for --mixup or --cutmix with the first option that is chosen."""
    for option, alpha in (("--mixup", config.data.mixup), ("--cutmix", config.data.cutmix)):
        if alpha is not None:
            refuse(
                chosen,
                f"{option} does not go with {{option}}: an image is mixed with the one before it "
                "in the batch; leave one of them out",
            )


def refuse_spares_and_replay(config: TrainOptions, chosen: Mapping[str, bool]) -> None:
    """Raise UsageError for --spares or --replay with the first option that is chosen."""
    if config.survival.spares:
        refuse(chosen, _NOT_WITH_SPARES)
    if config.results.replay is not None:
        refuse(chosen, _NOT_REPLAYED)


def _check_decoding(config: TrainOptions) -> None:
    tiers = config.data.tiers
    if config.batches.decode == "device":
        refuse(
            {
                f"--tiers {tiers}": ":decoded" in (tiers or ""),
                "--replay": config.results.replay is not None,
            },
            "--decode device does not go with {option}, whose samples the CPU decodes: leave one "
            "of them out",
        )


def _check_replay(config: TrainOptions) -> None:
    if config.results.replay is not None:
        ranks = config.ranks
        refuse(
            {
                f"--exchange {ranks.exchange}": ranks.spec.ranks_differ,
                "--checkpoint": config.checkpoints.checkpoint is not None,
            },
            _NOT_REPLAYED,
        )


def _check_nodes(config: TrainOptions) -> None:
    names, survival, batches = config.ranks.node_names, config.survival, config.batches
    if len(set(names)) < len(names) or any(re.search(_NO_NODE, name) for name in names):
        raise UsageError(
            f"--nodes {config.ranks.nodes}: give names of nodes, each once, such as a,b,c"
        )
    if survival.fault_tolerance == "restart" and config.checkpoints.checkpoint is None:
        raise UsageError("--fault-tolerance restart needs --checkpoint, too")
    unsuitable = {
        "--spares": survival.spares > 0,
        "--leave-at": survival.leave_at is not None,
        "--replay": config.results.replay is not None,
        f"--shuffle {batches.shuffle}": not is_exact(batches.shuffle),
        f"--source-order {batches.source_order}": window_of(batches.source_order) is not None,
    }
    if names:
        refuse(unsuitable, "{option} does not go with --nodes yet: leave one of them out")
    elif survival.fault_tolerance == "restart":
        refuse(
            {each: on for each, on in unsuitable.items() if not each.startswith(_OF_ORDER)},
            "{option} does not go with --fault-tolerance restart yet: leave one of them out",
        )


def _check_fault_tolerance(config: TrainOptions) -> None:
    survival, ranks = config.survival, config.ranks
    if survival.fault_tolerance == "off":
        refuse(
            {
                "--min-ranks": survival.min_ranks > 1,
                "--on-loss": survival.on_loss != "keep",
                "--spares": survival.spares > 0,
                "--leave-at": survival.leave_at is not None,
                "--hang-after": survival.hang_after is not None,
                "--evict-slow": survival.evict_slow,
            },
            "{option} needs --fault-tolerance shrink, too",
        )
    elif config.checkpoints.checkpoint_minutes is not None:
        raise UsageError(
            f"--checkpoint-minutes does not go with --fault-tolerance {survival.fault_tolerance} "
            "yet: give --checkpoint-every"
        )
    elif ranks.spec.fragments > 1:
        raise UsageError(
            f"--exchange {ranks.exchange} does not go with --fault-tolerance: what a lost rank "
            "did is in some fragments and not in others; leave the fragments out"
        )
    survival.seconds_left()
    shuffle = config.batches.shuffle
    if survival.spares:
        refuse({f"--shuffle {shuffle}": not is_exact(shuffle)}, _NOT_WITH_SPARES)
