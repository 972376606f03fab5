"""Agreement of the ranks of a job on the data set that they share, and on its order."""

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Final

from dlio.comm import Communicator
from dlio.data.reader_contract import Reader, data_bytes
from dlio.errors import UsageError, redact
from dlio.util.units import counted, format_bytes

_SHOWN: Final = 4
"""Maximum number of different data sets that an error names."""


def check_same_data(reader: Reader, comm: Communicator) -> None:
    """Compare the data sets of all ranks, before any of them uses it. Collective.

    Ranks whose data sets differ would take samples of one by the order of another.

    Raises UsageError on all ranks if they differ; it names the ranks and the difference.
    """
    if comm.size == 1:
        return
    holds = f"{reader.format}, {counted(len(reader), 'sample')}, {format_bytes(data_bytes(reader))}"
    own = [reader.fingerprint, redact(reader.path), holds]
    ranks: dict[str, list[int]] = {}
    shown: dict[str, str] = {}
    kinds = set()
    for rank, (fingerprint, path, text) in enumerate(comm.allgather(own)):
        ranks.setdefault(fingerprint, []).append(rank)
        shown.setdefault(fingerprint, f"{path} ({text})")
        kinds.add(text)
    if len(ranks) == 1:
        return
    parts = [f"{_ranks(ranks[each])} {shown[each]}" for each in list(ranks)[:_SHOWN]]
    if len(ranks) > _SHOWN:
        parts.append(f"and {len(ranks) - _SHOWN} more")
    remedy = "give all ranks the same path"
    if len(kinds) == 1:
        remedy = (
            "other files or times of change, or other parts of them: give all ranks one folder, or "
            "copies of what `dlio pack` writes"
        )
    raise UsageError(f"the ranks' data sets differ: {'; '.join(parts)}: {remedy}")


def check_same_order(own: Mapping[str, object], comm: Communicator) -> None:
    """Compare the facts that an order follows from on all ranks. Collective.

    Ranks that differ in one would take some samples twice, and others not at all. They are by the
    names of options.

    Raises UsageError on all ranks if they differ; it names the first difference.
    """
    if comm.size == 1:
        return
    gathered = comm.allgather({name: str(value) for name, value in own.items()})
    for name in own:
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(gathered):
            ranks.setdefault(facts.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            parts = [f"{_ranks(ranks[each])} {shorten(each, 60)}" for each in list(ranks)[:_SHOWN]]
            raise UsageError(
                f"the ranks' loaders differ in {name}: {'; '.join(parts)}: give all ranks the same "
                "arguments, epoch and state, or each a sampler of its own"
            )


def _ranks(numbers: Sequence[int]) -> str:
    """Return `rank 3 has`, or `ranks 0 to 2 and 5 have`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]} has"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    *head, last = texts
    return f"ranks {', '.join(head)} and {last} have" if head else f"ranks {last} have"
