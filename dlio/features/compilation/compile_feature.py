"""Models that torch compiles: the option, and its exclusions."""

from dataclasses import dataclass
from typing import Annotated

from dlio.train.config import TrainConfig
from dlio.train.feature_spec import FeatureSpec, refuse
from dlio.util.options import CheckedOptions, Option


@dataclass(frozen=True, slots=True)
class CompileOptions(CheckedOptions):
    """The compilation of the model."""

    compile: Annotated[
        bool,
        Option(
            "Compile the model by torch.compile, in the first steps; on a CPU that needs a C++ "
            "compiler."
        ),
    ] = False


class CompileFeature(FeatureSpec):
    """`--compile`."""

    name, order = "compilation", 50
    options = CompileOptions
    hooks = "dlio.features.compilation.compiled_model:CompileHooks"

    def check(self, options: CompileOptions, config: TrainConfig) -> None:
        if options.compile:
            exchange = config.ranks.exchange
            refuse(
                {
                    f"--exchange {exchange}": config.ranks.spec.pairwise,
                    **config.labelled("layerwise"),
                },
                "--compile does not go with {option}, which changes the model between its layers "
                "or in each epoch: leave one of them out",
            )
