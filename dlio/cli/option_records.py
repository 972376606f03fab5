"""Records of options that several commands share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlio.util.json_output import json_text
from dlio.util.options import CheckedOptions, Option
from dlio.util.whole_files import check_writable, write_json


@dataclass(frozen=True, slots=True)
class RankOptions(CheckedOptions):
    """The ranks that a command starts."""

    ranks: Annotated[
        int | None,
        Option(
            "Number of ranks to start on this machine.",
            short="-n",
            least=1,
            default_text="one, or the ranks that mpirun or srun started",
        ),
    ] = None
    backend: Annotated[
        Literal["auto", "mpi", "torch"],
        Option(
            "Library by which the ranks of -n communicate. mpi: MPI, under mpirun. torch: "
            "torch.distributed, without MPI. auto: MPI if it is installed."
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Options from a YAML file; the command line overrides it."""

    config: Annotated[
        str | None,
        Option(
            "Read options from this YAML file; options of the command line override it.",
            metavar="FILE",
        ),
    ] = None
    print_config: Annotated[
        bool,
        Option("Print all options as YAML, which --config reads back, and exit."),
    ] = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Destinations of a command's results, in addition to the terminal."""

    report: Annotated[
        str | None, Option("Write the results as JSON to this file.", metavar="FILE")
    ] = None
    as_json: Annotated[
        bool, Option("Print the results as JSON, on the last line of the output.", name="json")
    ] = False

    def check_writable(self) -> None:
        """Raise UsageError if the report cannot be written. Call it before the work starts."""
        if self.report is not None:
            check_writable("--report", self.report)

    def write(self, results: object) -> None:
        """Write the results to their destinations, as JSON."""
        if self.report is not None:
            write_json(self.report, results)
        if self.as_json:
            print(json_text(results), flush=True)
