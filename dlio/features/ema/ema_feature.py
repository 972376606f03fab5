"""An exponential moving average of the weights: its option and exclusions."""

from dataclasses import dataclass
from typing import Annotated

from dlio.train.config import TrainConfig
from dlio.train.feature_spec import FeatureSpec, refuse
from dlio.util.options import CheckedOptions, Option


@dataclass(frozen=True, slots=True)
class EmaOptions(CheckedOptions):
    """The average that is evaluated and saved in place of the weights."""

    ema: Annotated[
        float | None,
        Option(
            "Evaluate and save an exponential moving average of the weights, with this decay in "
            "each step, such as 0.999.",
            above=0,
            below=1,
            default_text="the weights themselves",
        ),
    ] = None


class EmaFeature(FeatureSpec):
    """`--ema`."""

    name, order = "ema", 20
    options = EmaOptions
    hooks = "dlio.features.ema.weight_average:EmaHooks"

    def check(self, options: EmaOptions, config: TrainConfig) -> None:
        if options.ema is not None:
            refuse(
                config.labelled("pruning"),
                "--ema does not go with {option}: leave one of them out",
            )
