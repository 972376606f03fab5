"""The removal of neurons while a network trains: its options and exclusions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from dlio.errors import UsageError
from dlio.train.config import TrainConfig
from dlio.train.config_rules import refuse_spares_and_replay
from dlio.train.feature_spec import FeatureSpec
from dlio.util.extras import how_to_install
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import counted

if TYPE_CHECKING:
    from dlio.train.report import EpochReport

LAYOUT_SUFFIX: Final = ".layout.json"
"""Of the layout of pruned weights, in a file next to theirs."""


@dataclass(frozen=True, slots=True)
class PruningOptions(CheckedOptions):
    """How many neurons are removed."""

    prune: Annotated[
        str,
        Option(
            "apoptosis: remove neurons that the network can do without, while it trains.",
            choices=("off", "apoptosis"),
        ),
    ] = "off"
    prune_tolerance: Annotated[
        float | None,
        Option(
            "Held-out accuracy that pruning may cost.",
            unit="percentage points",
            least=0,
            most=100,
            default_text="0.5",
        ),
    ] = None
    prune_target: Annotated[
        float | None,
        Option(
            "Fraction of the parameters to keep; the others are removed after 12 steps.",
            above=0,
            most=1,
            default_text="as many as the loss needs",
        ),
    ] = None


class PruningFeature(FeatureSpec):
    """`--prune`."""

    name, order = "pruning", 40
    options = PruningOptions
    hooks = "dlio.features.pruning.pruner:PruningHooks"
    epoch_fields: ClassVar[Mapping[str, object]] = {"pruning": None}
    fit_model = "dlio.features.pruning.pruned_file:fit_model"
    files: ClassVar[Mapping[str, str]] = {LAYOUT_SUFFIX: "layout"}

    def check(self, options: PruningOptions, config: TrainConfig) -> None:
        label = self.label(options)
        if label is None:
            for option, value in (
                ("--prune-tolerance", options.prune_tolerance),
                ("--prune-target", options.prune_target),
            ):
                if value is not None:
                    raise UsageError(f"{option} needs --prune apoptosis, too")
            return
        if options.prune_target is not None and options.prune_tolerance is not None:
            raise UsageError(
                "--prune-target does not go with --prune-tolerance: leave one of them out"
            )
        refuse_spares_and_replay(config, {label: True})
        if find_spec("torch_pruning") is None:  # Now, and not when all ranks have their data.
            raise UsageError(
                f"{label} finds layers that depend on each other with torch-pruning, which is not "
                f"installed: {how_to_install('prune')}"
            )

    def check_saved(self, about: Mapping[str, Any], path: str, is_on: bool) -> None:
        pruned = about.get("pruning")
        if pruned is not None and pruned["layout"]["version"] and not is_on:
            raise UsageError(
                f"--resume: {path} holds a pruned model: add --prune apoptosis; with "
                "--prune-tolerance 0 hardly any more is removed"
            )

    def was_cut(self, epoch: "EpochReport") -> bool:
        pruning = epoch.features.get("pruning")
        return pruning is not None and any(each["removed"] for each in pruning["rounds"])

    def sentences(self, epochs: "Sequence[EpochReport]") -> list[str]:
        reports = [each for epoch in epochs if (each := epoch.features.get("pruning"))]
        if not reports or epochs[-1].features.get("pruning") is None:
            return []
        last = reports[-1]
        kinds = _removed_by_kind(reports)
        gone = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "none"
        rounds = sum(len(each["rounds"]) for each in reports)
        undone = sum(each["undone"] for each in reports)
        return [
            f"{last['parameters']:,} of {counted(last['parameters_at_first'], 'parameter')} are "
            f"left, after {counted(rounds, 'round')}, {undone} of them undone in part or whole; "
            "neurons removed: "
            f"{gone}. Statistics took {last['statistics']['share']:.2%} of the time."
        ]

    def progress(self, epoch: "EpochReport") -> str:
        pruning = epoch.features.get("pruning")
        return "" if pruning is None else f", {counted(pruning['parameters'], 'parameter')}"

    def figures(self, epoch: "EpochReport") -> Mapping[str, float]:
        pruning = epoch.features.get("pruning")
        if pruning is None:
            return {}
        removed = _removed_by_kind([pruning])
        return {
            "pruning/parameters": float(pruning["parameters"]),
            "pruning/flops_per_sample": float(pruning["flops_per_sample"]),
            "pruning/rounds": float(len(pruning["rounds"])),
            "pruning/undone": float(pruning["undone"]),
            "pruning/statistics_share": pruning["statistics"]["share"],
            **{f"pruning/removed_{kind}": float(count) for kind, count in removed.items()},
            **{f"parameters/{name}": float(count) for name, count in pruning["layers"].items()},
        }


def _removed_by_kind(reports: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Number of neurons removed in these epochs, by kind."""
    kinds: Counter[str] = Counter()
    for report in reports:
        for each in report["rounds"]:
            kinds.update(each["removed"])
    return kinds
