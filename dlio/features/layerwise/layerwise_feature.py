"""Greedy layer-wise pre-training: the option, and its exclusions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from dlio.errors import UsageError
from dlio.train.config import TrainConfig
from dlio.train.feature_spec import FeatureSpec, refuse
from dlio.util.options import CheckedOptions, Option

if TYPE_CHECKING:
    from dlio.train.report import EpochReport


@dataclass(frozen=True, slots=True)
class LayerwiseOptions(CheckedOptions):
    """The epochs in which a layer is trained alone."""

    layerwise: Annotated[
        int | None,
        Option(
            "Greedy layer-wise pre-training of an autoencoder: train each layer alone for so many "
            "epochs, then all of them in the rest of --epochs.",
            unit="epochs",
            least=1,
            default_text="all layers together",
        ),
    ] = None


class LayerwiseFeature(FeatureSpec):
    """`--layerwise`."""

    name, order = "layerwise", 60
    options = LayerwiseOptions
    hooks = "dlio.features.layerwise.layer_training:LayerwiseHooks"
    fixed_options = ("layerwise",)
    epoch_fields: ClassVar[Mapping[str, object]] = {"layer": None}

    def check(self, options: LayerwiseOptions, config: TrainConfig) -> None:
        if options.layerwise is None:
            return
        if config.model.task != "autoencode":
            raise UsageError("--layerwise needs --task autoencode, too")
        exchange = config.ranks.exchange
        refuse(
            {
                f"--exchange {exchange}": not config.ranks.spec.alike,
                **config.labelled("pruning", "skipping"),
            },
            "{option} does not go with --layerwise: leave one of them out",
        )

    def progress(self, epoch: "EpochReport") -> str:
        layer = epoch.features.get("layer")
        return "" if layer is None else f", layer {layer} alone"
