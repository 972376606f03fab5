"""`dlio bench train`: training as a whole."""

import pkgutil
from dataclasses import asdict

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions
from dlio.data.reader import open_reader
from dlio_bench.results.envelope import begin, finish, save
from dlio_bench.results.report_values import Results
from dlio_bench.results.terminal import show_notes
from dlio_bench.training.training_options import CASES, TrainingBenchOptions


@with_help(
    usual=(
        ("case", "scaling, checkpoint, ettr or script. Repeatable"),
        *("data", "networks", "exchanges", "ranks", "forecast", "scaling", "repeats"),
        "report",
    ),
)
def command(options: TrainingBenchOptions, output: OutputOptions) -> None:
    """Measure training as a whole on ranks of this machine, and forecast it for more.

    Steps of networks of the field with each exchange on 1, 2 and 4 ranks, and a forecast for up to
    1,024 from those of one and two ranks and from measured links, marked as such. The case
    checkpoint measures how long checkpoints stop the steps, next to those of
    torch.distributed.checkpoint; the case ettr the share of time that counts while ranks are
    killed; the case script what `dlio run` adds to the steps of a script.
    """
    if options.data is not None:
        open_reader(options.data).close()  # What is wrong with it is said before ranks start.
    started = begin(output)
    results = Results(
        "train",
        settings=asdict(options),
        seeds={"seed": options.seed},
        paths=() if options.data is None else (options.data,),
    )
    for name in options.case:
        pkgutil.resolve_name(CASES[name])(options, results)
        save(output, results, started)
    show_notes([f"note: {note}" for note in results.notes])
    finish(output, results, started)
