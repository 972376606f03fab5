"""Shares of a global batch by the ranks' speed: the option, and its exclusions."""

from dataclasses import dataclass
from typing import Annotated

from dlio.plan.epoch import check_shares
from dlio.train.config import TrainConfig
from dlio.train.config_rules import refuse_spares_and_replay
from dlio.train.feature_spec import FeatureSpec
from dlio.util.options import CheckedOptions, Option


@dataclass(frozen=True, slots=True)
class BalanceOptions(CheckedOptions):
    """The shares that ranks have of a global batch."""

    balance: Annotated[
        bool,
        Option(
            "Give ranks that compute faster more of each global batch; with --shuffle batch or "
            "global."
        ),
    ] = False


class BalanceFeature(FeatureSpec):
    """`--balance`."""

    name, order = "balance", 10
    options = BalanceOptions
    hooks = "dlio.features.balance.rank_balance:BalanceHooks"

    def check(self, options: BalanceOptions, config: TrainConfig) -> None:
        check_shares(config.batches.shuffle, options.balance)
        refuse_spares_and_replay(config, {"--balance": options.balance})
