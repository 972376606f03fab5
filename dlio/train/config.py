"""The configuration of a training run: records of options that go together."""

from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError
from dlio.train.config_rules import check_together
from dlio.train.names import DEFAULT_OPTIMIZER
from dlio.train.train_options import TrainOptions
from dlio.util.arguments import nearest
from dlio.util.options import from_mapping, options_of
from dlio.util.units import counted
from dlio.util.whole_files import check_writable

_LOCAL: Final = 0.75
"""Default learning rate where an outer optimizer with momentum acts between local steps, over the
usual one, for the same progress."""


@dataclass(frozen=True, slots=True)
class TrainConfig(TrainOptions):
    """A training run. Raises UsageError for options that do not fit together."""

    def __post_init__(self) -> None:
        check_together(self)
        for feature, options in self.each_feature():
            feature.check(options, self)

    def peak_lr(self, ranks: int) -> float:
        """Return the peak learning rate on a number of ranks.

        An outer optimizer multiplies the progress of local steps, whose rate is lower for it.
        """
        from dlio.train.optimizers import usual_lr  # It loads torch.

        if self.optimizer.lr is not None:
            return self.optimizer.lr
        batch = self.batches.batch_size * self.optimizer.accumulate * ranks
        usual = usual_lr(self.optimizer.optimizer or DEFAULT_OPTIMIZER, batch)
        exchange = self.ranks.spec
        if ranks > 1 and exchange.merge in ("outer", "outer-pairs"):
            local = _LOCAL if exchange.momentum else 1.0
            usual *= local * (1 - exchange.momentum) / exchange.rate
        return usual

    def check_ranks(self, ranks: int) -> None:
        """Raise UsageError for options that do not fit the number of ranks."""
        pretended, names = self.ranks.pretend_nodes, self.ranks.node_names
        if pretended is not None and pretended > ranks:
            raise UsageError(
                f"--pretend-nodes {pretended}: give 1 to {ranks}, the number of ranks (-n)"
            )
        if len(names) > ranks:
            raise UsageError(
                f"--nodes {self.ranks.nodes}: give -n with at least "
                f"{counted(len(names), 'rank')}, one "
                "for each node"
            )
        for feature, options in self.active():
            feature.check_ranks(options, ranks)

    def check_run(self) -> None:
        """Raise UsageError before the run when one of its results cannot be written, or when it
        lacks held-out data that an option needs.

        The latter is not checked when the record is made: `dlio train` finds held-out data next to
        the training data.
        """
        if self.callbacks.early_stopping is not None and self.data.val is None:
            raise UsageError("--early-stopping needs --val, too")
        outputs = {
            "--report": self.results.report,
            "--trace": self.results.trace,
            "--trace-out": self.batches.trace_out,
            "--save": self.checkpoints.save,
        }
        for option, path in outputs.items():
            if path is not None:
                check_writable(option, path)


def train_config(source: object, **options: object) -> TrainConfig:
    """Return the configuration of a run, from options by the names of their fields.

    Raises UsageError for an unknown option, and as `TrainConfig`.
    """
    values = {"source": source, **options}
    known = {each.name for each in options_of(TrainConfig)}
    if unknown := [name for name in values if name not in known]:
        raise UsageError(f"{unknown[0]}=: no such option{nearest(unknown[0], known)}")
    return from_mapping(TrainConfig, values)
