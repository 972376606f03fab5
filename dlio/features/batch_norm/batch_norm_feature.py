"""The samples by which batches are normalised: the option `--batch-norm`, and its rules."""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from dlio.errors import UsageError
from dlio.plan.epoch import is_exact
from dlio.train.config import TrainConfig
from dlio.train.feature_spec import FeatureSpec, refuse
from dlio.util.options import Option, check

USUAL: Final = "average"
_MODES: Final = ("local", "average", "sync")
"""Values besides `ghost(SAMPLES)`."""
_USAGE: Final = "choose average, sync, local, or ghost(SAMPLES) such as ghost(16)"
_GHOST: Final = re.compile(r"ghost\((\d+)\)")


def group_size(batch_norm: str) -> int | None:
    """Return the samples of a group of `ghost(SAMPLES)`; None for another mode.

    Raises UsageError for any other text, and for groups of fewer than 2 samples.
    """
    if batch_norm in _MODES:
        return None
    match = _GHOST.fullmatch(batch_norm.strip())
    if match is None:
        raise UsageError(f"--batch-norm {batch_norm}: {_USAGE}")
    if int(match[1]) < 2:
        raise UsageError(f"--batch-norm {batch_norm}: give groups of 2 samples or more")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class BatchNormOptions:
    """The samples by which batches are normalised."""

    batch_norm: Annotated[
        str,
        Option(
            "Statistics of batch normalisation. average: each rank normalises by its own samples, "
            "and the ranks' running statistics are averaged. sync: ranks normalise by the whole "
            "batch, so that results do not depend on the number of ranks and on which sample "
            "comes to which; ranks wait for each other in each such layer. ghost(16): groups of "
            "16 samples are run one by one, and their gradients are summed exactly: with "
            "--shuffle global the weights are the same, bit for bit, on any number of ranks and "
            "nodes. local: rank 0's running statistics are taken.",
            metavar="MODE",
        ),
    ] = USUAL

    def __post_init__(self) -> None:
        check(self)
        group_size(self.batch_norm)


class BatchNormFeature(FeatureSpec):
    """`--batch-norm`."""

    name, order = "batch_norm", 30
    options = BatchNormOptions

    def hooks_of(self, options: BatchNormOptions) -> str:
        if group_size(options.batch_norm) is not None:
            return "dlio.features.batch_norm.ghost_batches:GhostHooks"
        kind = "SyncHooks" if options.batch_norm == "sync" else "LocalHooks"
        return f"dlio.features.batch_norm.sync_batch_norm:{kind}"

    def check(self, options: BatchNormOptions, config: TrainConfig) -> None:
        mode, group = options.batch_norm, group_size(options.batch_norm)
        if group is None and mode != "sync":
            return
        exchange, batches = config.ranks.exchange, config.batches
        spec, tolerance = config.ranks.spec, config.survival.fault_tolerance
        unsuitable = {
            f"--exchange {exchange}": not spec.alike,
            **config.labelled("pruning"),
            f"--fault-tolerance {tolerance}": tolerance != "off",
        }
        if group is not None:
            unsuitable |= {
                # Groups are summed by all ranks, exactly.
                f"--exchange {exchange}": str(spec) != "allreduce",
                f"--shuffle {batches.shuffle}": not is_exact(batches.shuffle),
                **config.labelled("balance"),
                "--replay": config.results.replay is not None,
            }
        refuse(
            unsuitable, f"--batch-norm {mode} does not go with {{option}}: leave one of them out"
        )
        if group is not None and batches.batch_size % group:
            raise UsageError(
                f"--batch-norm {mode}: a rank's batch of {batches.batch_size} is not a "
                "multiple of it; give another --batch-size, which is per rank"
            )

    def begin_process(self, options: BatchNormOptions) -> None:
        if group_size(options.batch_norm) is not None:
            import torch

            torch.set_num_threads(1)  # The rounding of a gradient depends on their number.
