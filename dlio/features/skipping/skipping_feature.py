"""The skipping of samples whose loss has stayed low: its options and exclusions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from dlio.errors import UsageError
from dlio.features.skipping.skip_rule import SHARE
from dlio.train.config import TrainConfig
from dlio.train.config_rules import refuse_mixed, refuse_spares_and_replay
from dlio.train.feature_spec import FeatureSpec
from dlio.util.options import CheckedOptions, Option

if TYPE_CHECKING:
    from dlio.train.report import EpochReport


@dataclass(frozen=True, slots=True)
class SkippingOptions(CheckedOptions):
    """The samples that an epoch leaves out."""

    skip_samples: Annotated[
        bool,
        Option(
            "Leave samples whose loss has stayed low out of epochs; the others are weighted so "
            "that the gradient stays unbiased."
        ),
    ] = False
    skip_share: Annotated[
        float | None,
        Option(
            "Share of each epoch's samples to leave out, easy or not.",
            above=0,
            default_text="the easy samples, up to 0.6",
            needs="skip_samples",
        ),
    ] = None


class SkippingFeature(FeatureSpec):
    """`--skip-samples`."""

    name, order, prefix = "skipping", 70, "skip"
    options = SkippingOptions
    hooks = "dlio.features.skipping.skipping_hooks:SkippingHooks"

    def check(self, options: SkippingOptions, config: TrainConfig) -> None:
        if options.skip_share is not None and options.skip_share > SHARE:
            raise UsageError(
                f"--skip-share {options.skip_share}: give a share above 0, up to {SHARE}"
            )
        if not options.skip_samples:
            return
        epochs, chosen = config.optimizer.epochs, {"--skip-samples": True}
        refuse_mixed(config, chosen)
        if epochs < 3:
            raise UsageError(
                f"--skip-samples with --epochs {epochs}: the first epoch and the last see all "
                "samples; give 3 or more, and 8 to save time"
            )
        refuse_spares_and_replay(config, chosen)

    def check_saved(self, about: Mapping[str, Any], path: str, is_on: bool) -> None:
        if "kept" in about["loader"] and not is_on:
            raise UsageError(
                f"--resume: {path} was written in an epoch that skips samples; add --skip-samples"
            )

    def sentences(self, epochs: "Sequence[EpochReport]") -> list[str]:
        shares = [epoch.skip_share for epoch in epochs]
        if not max(shares):
            return []
        return [
            f"{sum(shares) / len(shares):.0%} of the samples were skipped because their "
            f"losses had stayed low: up to {max(shares):.0%} of an epoch."
        ]

    def progress(self, epoch: "EpochReport") -> str:
        return f", {epoch.skip_share:.0%} of the samples skipped" if epoch.skip_share else ""
