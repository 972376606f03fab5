"""`dlio eval`: metrics of saved weights on a data set, on any number of ranks."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions, RankOptions
from dlio.data.splits import ReaderChoices, SplitChoice
from dlio.launch.command_ranks import on_ranks
from dlio.train.config import TrainConfig, train_config
from dlio.train.factory import check_name
from dlio.train.feature_spec import evaluation_records
from dlio.train.names import DEFAULT_MODEL, TASK_NAMES
from dlio.train.train_options import MIN_IMAGE_SIZE, MODEL_NAMES
from dlio.util.options import RECORDS, CheckedOptions, Option, as_mapping
from dlio.util.printable import print_line


@dataclass(frozen=True, slots=True)
class EvalOptions(CheckedOptions):
    """The options of `dlio eval`."""

    source: Annotated[
        str, Option("Data set to evaluate on; a table or images.", positional=True, metavar="SRC")
    ]
    weights: Annotated[str, Option("Weights that `dlio train --save` has written.", metavar="FILE")]
    task: Annotated[
        str | None,
        Option(
            "Task that the weights were trained for.",
            choices=TASK_NAMES,
            default_text="found by the data",
        ),
    ] = None
    target: Annotated[
        str | None,
        Option("Column of a table to predict.", metavar="COLUMN", default_text="as in training"),
    ] = None
    split: SplitChoice = None
    reader_option: ReaderChoices = ()
    model: Annotated[
        str, Option("Model that the weights are of, as for `dlio train`.", metavar="MODEL")
    ] = DEFAULT_MODEL
    image_size: Annotated[
        int, Option("Side of the square crops.", unit="pixels", least=MIN_IMAGE_SIZE)
    ] = 64
    batch_size: Annotated[
        int, Option("Samples of each rank in one batch.", unit="samples", least=1)
    ] = 64
    precision: Annotated[
        str, Option("Number format of forward passes.", choices=("fp32", "bf16", "fp16"))
    ] = "fp32"
    device: Annotated[
        str, Option("Device to evaluate on: auto, cpu, cuda or cuda:N.", metavar="DEVICE")
    ] = "auto"
    workers: Annotated[int, Option("Decode threads of each rank.", unit="threads", least=1)] = 2
    features: tuple[object, ...] = field(
        default_factory=lambda: tuple(record() for record in evaluation_records()),
        metadata={RECORDS: evaluation_records},
    )
    """One record for each feature that takes part in evaluations."""


@with_help(
    "dlio eval /data/val --weights weights.pt -n 2",
    "dlio eval test.csv --weights table.pt --json",
    usual=(
        *("source", "weights", "split", "model", "target"),
        *("image_size", "batch_size", "device", "ranks", "as_json"),
    ),
)
def command(options: EvalOptions, ranks: RankOptions, output: OutputOptions) -> None:
    """Evaluate saved weights: accuracy, AUC, RMSE, IoU or the task's loss."""
    output.check_writable()
    check_name("--model", options.model, MODEL_NAMES)
    on_ranks(
        ranks.ranks,
        evaluate_rank,
        options,
        output,
        check=partial(_check, options, ranks.ranks or 1),
        backend=ranks.backend,
    )


def evaluate_rank(options: EvalOptions, output: OutputOptions) -> None:
    """Evaluate as this rank; rank 0 prints the metrics."""
    from dlio.comm import world
    from dlio.train.evaluation import evaluate

    report = evaluate(_config(options))
    if world().rank:
        return
    print_line(report.sentence())
    output.write(asdict(report))


def _config(options: EvalOptions) -> TrainConfig:
    """Return the configuration of a run with the same options."""
    return train_config(**as_mapping(options), tiers="none")  # Each sample is read once.


def _check(options: EvalOptions, ranks: int) -> None:
    """Raise an error for a mistake that can be found before ranks are started."""
    from dlio.data.reader import open_split

    _config(options).check_ranks(ranks)
    open_split(options.source, options.split, options.reader_option).close()
