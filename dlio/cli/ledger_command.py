"""`dlio ledger`: check the trace of a run."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from dlio.data.splits import ReaderChoices, SplitChoice
from dlio.errors import UsageError
from dlio.util.json_output import json_text
from dlio.util.options import Option, check
from dlio.util.printable import print_line
from dlio.util.units import counted

if TYPE_CHECKING:
    from dlio.train.ledger_file import EpochCheck

_WRONG: Final = 1
_NAMED: Final = 5
"""Samples and problems of an epoch that are named, unless JSON is printed."""


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """Options of `dlio ledger`."""

    file: Annotated[
        str, Option("Trace that `dlio train --trace` has written.", positional=True, metavar="FILE")
    ]
    source: Annotated[
        str | None,
        Option("Data set that was trained on; or give --samples.", positional=True, metavar="SRC"),
    ] = None
    split: SplitChoice = None
    reader_option: ReaderChoices = ()
    samples: Annotated[int | None, Option("Number of the data set's samples.", least=1)] = None
    epochs: Annotated[
        int | None,
        Option(
            "Number of epochs that there should be.", least=1, default_text="those in the trace"
        ),
    ] = None
    as_json: Annotated[bool, Option("Print JSON.", name="json")] = False

    def __post_init__(self) -> None:
        check(self)
        if (self.source is None) == (self.samples is None):
            raise UsageError("give the data set that was trained on, or --samples of it")


def command(options: LedgerOptions) -> None:
    """Check that a run trained on every sample exactly once in each epoch.

    Reads the trace of `dlio train --trace`: a line for each rank and step. Names samples that were
    lost or doubled, with their steps and ranks, steps without a line, and lines that were changed
    after they were written. Exit code 1 if there are any, otherwise 0.
    """
    from dlio.train.ledger_file import check_ledger, read_lines

    samples = options.samples or _count(str(options.source), options.split, options.reader_option)
    checked = check_ledger(read_lines(options.file), samples, options.epochs)
    exact = bool(checked) and all(each.exact for each in checked)
    if options.as_json:
        about = {"file": options.file, "samples": samples, "exact": exact}
        epochs = [_as_json(each) for each in checked]
        print(json_text({**about, "epochs": epochs}, indent=2))
    else:
        for each in checked:
            for line in _described(each):
                print_line(line)
        if not checked:
            print_line(f"{options.file}: no line")
        elif exact:
            print_line(
                f"{options.file}: every sample exactly once in {counted(len(checked), 'epoch')}"
            )
    if not exact:
        raise SystemExit(_WRONG)


def _count(source: str, split: str | None, others: tuple[str, ...]) -> int:
    """Return the number of samples of the training data at `source`, or of a split of them."""
    from dlio.cli.train_command import find_parts
    from dlio.data.reader import open_split

    path = source if split else find_parts(source, None, quiet=True)[0]
    with closing(open_split(path, split, others)) as reader:
        return len(reader)


def _as_json(epoch: "EpochCheck") -> dict[str, Any]:
    doubled = [
        {"sample": sample, "lines": [{"step": step, "rank": rank} for step, rank in lines]}
        for sample, lines in epoch.doubled_samples.items()
    ]
    return {**asdict(epoch), "doubled_samples": doubled, "exact": epoch.exact}


def _described(epoch: "EpochCheck") -> list[str]:
    first = (
        f"epoch {epoch.epoch}: {counted(epoch.samples, 'sample')} in "
        f"{counted(epoch.steps, 'step')} on {counted(len(epoch.ranks), 'rank')}"
    )
    if epoch.left_out:
        first += f", {epoch.left_out:,} left out by --skip-samples"
    if epoch.lost or epoch.doubled:
        first += f", {epoch.lost:,} lost, {epoch.doubled:,} doubled"
    lines = [f"{first}, hash {epoch.hash}" if epoch.hash else f"{first}, without hashes"]
    named = [
        f"  sample {sample} twice or more: "
        + ", ".join(f"step {step} on rank {rank}" for step, rank in places)
        for sample, places in epoch.doubled_samples.items()
    ]
    if epoch.lost and not epoch.left_out:
        named = [f"  sample {sample} lost" for sample in epoch.lost_samples] + named
    return lines + _few(named) + _few([f"  {each}" for each in epoch.problems])


def _few(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    more = [f"  and {len(lines) - _NAMED} more (--json names all)"] if len(lines) > _NAMED else []
    return [*lines[:_NAMED], *more]
