"""The samples by which batches are normalised: the option `--batch-norm`, and its rules."""

from dataclasses import dataclass
from typing import Annotated

from dlio.errors import UsageError
from dlio.exchange.exchange_spec import parse_exchange
from dlio.features.batch_norm.ghost_spec import group_size
from dlio.plan.epoch import is_exact
from dlio.train.config import TrainConfig
from dlio.train.feature_spec import FeatureSpec, labelled, refuse
from dlio.util.options import Option, check

USUAL = "average"


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

    def label(self, options: BatchNormOptions) -> str | None:
        return None if options.batch_norm == USUAL else f"--batch-norm {options.batch_norm}"

    def check(self, options: BatchNormOptions, config: TrainConfig) -> None:
        mode, group = options.batch_norm, group_size(options.batch_norm)
        if group is None and mode != "sync":
            return
        exchange, batches = config.ranks.exchange, config.batches
        spec, tolerance = parse_exchange(exchange), config.survival.fault_tolerance
        unsuitable = {
            f"--exchange {exchange}": not spec.alike,
            **labelled(config, "pruning"),
            f"--fault-tolerance {tolerance}": tolerance != "off",
        }
        if group is not None:
            unsuitable |= {
                # Groups are summed by all ranks, exactly.
                f"--exchange {exchange}": str(spec) != "allreduce",
                f"--shuffle {batches.shuffle}": not is_exact(batches.shuffle),
                **labelled(config, "balance"),
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
