"""`dlio pack`: write a data set as few large files, in a shuffled order."""

import os
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import ConfigFile, OutputOptions, RankOptions
from dlio.launch.command_ranks import on_ranks
from dlio.util.cores import available_cores
from dlio.util.options import CheckedOptions, Option
from dlio.util.printable import print_line
from dlio.util.units import counted, format_bytes
from dlio_staging.pack_folder import describe, pack, summary
from dlio_staging.pack_plan import PackOptions


@dataclass(frozen=True, slots=True)
class PackArguments(CheckedOptions):
    """The data to pack and where to; options of `dlio pack`."""

    source: Annotated[
        str, Option("Data set of any format: a path or a URL.", positional=True, metavar="SRC")
    ]
    destination: Annotated[str, Option("Folder to write.", positional=True, metavar="DST")]
    processes: Annotated[
        int | None,
        Option(
            "Number of processes that read and write.",
            name="workers",
            least=1,
            default_text="one for each core; with -n divided among the ranks",
        ),
    ] = None
    dry_run: Annotated[bool, Option("Show what would be written, and write nothing.")] = False


@with_help(
    "dlio pack /lustre/imagenet/train packed",
    "dlio pack /lustre/imagenet/train small --resize 256 --quality 90",
    "dlio pack photos tars --format tar --split train=0.9,val=0.1",
    usual=(
        *("source", "destination", "format"),
        ("resize", "Scale images down to this length of the short side, in pixels"),
        *("quality", "compress", "shard_bytes", "split", "source_split", "processes"),
        *("ranks", "dry_run"),
    ),
)
def command(
    packing: PackArguments,
    options: PackOptions,
    ranks: RankOptions,
    output: OutputOptions,
    file: ConfigFile,  # noqa: ARG001 - read before
) -> None:
    """Write a data set as few large files, verified, in a shuffled order.

    DST appears complete, or not at all. After an interruption, the same command continues. Runs
    alone, in ranks of this machine (-n), or by dlio launch, mpirun or srun, where each rank writes
    files of its own.
    """
    output.check_writable()
    here = max(1, available_cores() // (ranks.ranks or 1))
    options = replace(options, workers=packing.processes or here)
    if packing.dry_run:
        _print_plan(packing, options)
        return
    on_ranks(ranks.ranks, pack_rank, packing, options, output, backend=ranks.backend)


def pack_rank(packing: PackArguments, options: PackOptions, output: OutputOptions) -> None:
    """Pack as this rank; rank 0 prints the result."""
    from dlio.comm import world
    from dlio_staging.byte_progress import show_progress

    rank = world().rank
    with show_progress(1, rank == 0, "packing") as show:
        done = pack(packing.source, packing.destination, progress=show, options=options)
    if rank:
        return
    print_line(summary(packing.destination, done))
    places = {"source": packing.source, "destination": packing.destination}
    output.write({**places, **asdict(options), **asdict(done)})


def _print_plan(packing: PackArguments, options: PackOptions) -> None:
    about: dict[str, Any] = describe(packing.source, options)
    for part in about["parts"]:
        print_line(
            f"{os.path.join(packing.destination, part['name'])}: "
            f"{counted(part['samples'], 'sample')}, {format_bytes(part['bytes'])} to read, in "
            f"{counted(part['shards'], 'shard')} of {options.format}"
        )
    print_line("nothing was written")
