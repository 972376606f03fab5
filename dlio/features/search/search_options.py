"""The options of `dlio search`, in addition to those of `dlio train`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlio.errors import UsageError
from dlio.train.train_options import DataOptions, TrainOptions
from dlio.util.options import Option, check


@dataclass(frozen=True, slots=True)
class SearchedData(DataOptions):
    """The data of a search; the source may be left out for a script."""

    source: Annotated[
        str,
        Option(
            "Training data, as for `dlio train`; with a script, data that it reads.",
            positional=True,
            metavar="SRC",
        ),
    ] = ""


@dataclass(frozen=True, slots=True)
class SearchedRun(TrainOptions):
    """The options of `dlio train` that all trials have in common."""

    data: SearchedData


@dataclass(frozen=True, slots=True)
class SearchedScript:
    """A script that is searched in place of `dlio train`."""

    script: Annotated[
        tuple[str, ...],
        Option(
            "After --: a script and its arguments, in which {lr} stands for the value of --set "
            "lr=...",
            rest=True,
            after_dashes=True,
            metavar="-- SCRIPT ARGS",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How parameters are searched."""

    space: Annotated[
        tuple[str, ...],
        Option(
            "Parameter to search, an option of `dlio train` or of the model: lr=1e-4..1e-1:log, "
            "batch-size=16,32,64, model.depth=2..5. Repeatable.",
            name="set",
            metavar="NAME=VALUES",
        ),
    ] = ()
    trials: Annotated[
        int | None,
        Option(
            "Number of trials, with those of earlier runs.",
            least=1,
            default_text="20; with --sampler grid, all points",
        ),
    ] = None
    ranks: Annotated[
        int,
        Option("Number of ranks on this machine, which trials share.", short="-n", least=1),
    ] = 1
    ranks_per_trial: Annotated[int, Option("Ranks that each trial trains on.", least=1)] = 1
    cores_per_rank: Annotated[
        int | None,
        Option(
            "Cores that each rank computes on; results may differ in rounding for other numbers.",
            unit="cores",
            least=1,
            default_text="an equal part of this machine's",
        ),
    ] = None
    sampler: Annotated[
        Literal["tpe", "cmaes", "random", "grid"],
        Option(
            "Choice of parameters. tpe: by a model of the results so far. cmaes: CMA-ES, for "
            "ranges of numbers. random: independent of results. grid: all combinations of lists."
        ),
    ] = "tpe"
    lag: Annotated[
        int | None,
        Option(
            "Trial k is chosen by the results of trials up to k - LAG, whatever has ended when it "
            "starts, so that a search can be repeated.",
            unit="trials",
            least=1,
            default_text="twice the trials that run at a time",
        ),
    ] = None
    pruner: Annotated[
        Literal["none", "asha", "hyperband"],
        Option(
            "Ends trials early. asha: after 1, 3, 9, ... epochs, a trial goes on if it is among "
            "the best third of the trials with lower numbers. hyperband: as asha, with a later "
            "first look for some trials."
        ),
    ] = "none"
    first_look: Annotated[
        int, Option("Epochs before the first look of --pruner.", unit="epochs", least=1)
    ] = 1
    reduction: Annotated[
        int, Option("Number of trials of which --pruner lets one go on at each look.", least=2)
    ] = 3
    objective: Annotated[
        tuple[str, ...],
        Option(
            "Metric after the last epoch: val_accuracy, or another of the report. Losses, errors, "
            "seconds and bytes are minimised; NAME:min and NAME:max say it for other names. "
            "Repeatable, for several objectives.",
            metavar="METRIC",
            default_text="val_accuracy; loss without --val",
        ),
    ] = ()
    study: Annotated[
        str,
        Option(
            "Folder of the search. The same command goes on with a search that has ended early.",
            metavar="FOLDER",
        ),
    ] = "search"
    html: Annotated[
        str | None,
        Option("Write plots of the search to this file, a page of its own.", metavar="FILE"),
    ] = None
    as_json: Annotated[
        bool, Option("Print the results as JSON, on the last line of the output.", name="json")
    ] = False

    def __post_init__(self) -> None:
        check(self)
        if self.ranks_per_trial > self.ranks:
            raise UsageError(
                f"--ranks-per-trial {self.ranks_per_trial}: give -n with at least as many ranks"
            )
        if not self.space:
            raise UsageError("--set is missing: name what to search, as in --set lr=1e-4..1e-1:log")
        if self.pruner == "none" and (self.first_look, self.reduction) != (1, 3):
            raise UsageError("--first-look and --reduction need --pruner, too")
        if self.lag is not None and self.sampler in ("random", "grid"):
            raise UsageError(f"--lag: --sampler {self.sampler} does not use results: leave it out")
        if self.pruner != "none" and len(self.objective) > 1:
            raise UsageError("--pruner does not go with several objectives: give one --objective")

    @property
    def at_a_time(self) -> int:
        """Trials that run at a time."""
        return self.ranks // self.ranks_per_trial
