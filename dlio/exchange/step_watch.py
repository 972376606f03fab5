"""Notices that ranks of `dlio.distribute` no longer have one model, at no message of its own.

Each rank keeps a digest of the learning rates of its steps, and of its weights after the 1st, 2nd,
4th, 8th step and so on. It travels with the gradients, and so does the number of steps, as numbers
whose sums tell if all ranks have the same ones; only where they have not, ranks compare them.
"""

import atexit
import logging
import math
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Final

import torch
import xxhash

from dlio.comm import Communicator
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.errors import UsageError
from dlio.exchange.buckets import Named, broadcast_tensors
from dlio.exchange.step_rows import StepRows
from dlio.util.printable import log_line
from dlio.util.units import counted

EXACT_BITS: Final = 24
"""Whole numbers of so many bits are exact in float32."""
ROUNDING: Final = 1e-4
"""Differences of weights, by their size, that are taken for rounding."""
_PACKAGES: Final = tuple(
    os.path.dirname(path) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__), os.__file__)
)
"""Folders of torch, dlio and Python."""
PARTS: Final = 2
"""Parts of a digest that travel with a sum of gradients."""
_OF_STEPS: Final = 3
"""Numbers that tell whether ranks average gradients of the same step."""
_NAMED_RANKS: Final = 3
"""Other ranks whose steps the error of a deadline names."""


class StepWatch:
    """The steps of this rank's optimizers. It says once, by rank 0, that ranks have parted.

    Args:
        named: returns the parameters that all ranks have alike, in the same order, with names.
    """

    count = _OF_STEPS + 2 * PARTS + 4

    def __init__(self, comm: Communicator, named: Callable[[], Named]) -> None:
        self._comm, self._named = comm, named
        self._rows = StepRows(comm)
        self._rows.write("no step")
        self._bits = bits_of_parts(comm.size)
        self._digest = self._steps = 0
        self._rates: dict[int, list[float]] = {}
        """Learning rates of each optimizer's latest step, by the optimizers' order."""
        self._order: dict[int, int] = {}
        self._sums: list[list[float]] = []
        """Sums over ranks that were not looked at yet."""
        self._has_told = False
        self._counted = ("", "")
        """A line of the script, and the elements that its loss counts, for the next sums."""
        self._has_told_counts = self._has_told_batches = False
        self.batch = 0
        """Number of the batch of the next sum, in its pass, from 1; 0 if unknown."""
        self._averages = 0
        """Sums of gradients that this rank has begun."""
        self._ends = recovery_of(comm) is None
        self._has_ended = False
        atexit.register(self._end)

    def begin_backward(self, batch: int) -> None:
        """Note that a backward of a batch begins, of which the sums of each exchange tell."""
        self.batch, self._counted = batch, ("", "")

    def count_elements(self, line: str, counts: str) -> None:
        """Note how many elements the means of a loss of a line count, by the rank's weight."""
        self._counted = (line, counts) if counts else ("", "")

    def depart(self, into: torch.Tensor, factor: float) -> None:
        parts, steps = parts_of(self._digest, self._bits), self._steps & (1 << self._bits) - 1
        line, counts = self._counted
        elements = parts_of(zlib.crc32(counts.encode()) if line else 0, self._bits)[:2]
        batch = parts_of(self.batch, self._bits)[:2]
        values = [1, steps, steps * steps, *parts, *elements, *batch]
        self._averages += 1
        into.copy_(torch.tensor(values, dtype=into.dtype))

    def arrive(self, sums: torch.Tensor, factor: torch.Tensor | float) -> None:
        """Learn the sums of what departed.

        Raises UsageError if ranks have averaged gradients of different steps. Collective then.
        """
        numbers = sums.tolist()
        if not are_same(numbers[:_OF_STEPS]):
            raise UsageError(uniform(self._comm, self._steps_apart))
        if not self._has_told:
            self._sums.append([numbers[0], *numbers[_OF_STEPS:-4]])
        if not (self._has_told_counts or are_same([numbers[0], *numbers[-4:-2]])):
            self._tell_counts()
        if not (self._has_told_batches or are_same([numbers[0], *numbers[-2:]])):
            self._tell_batches()

    def _tell_counts(self) -> None:
        """Say if the means of a loss count other numbers of elements on each rank. Collective."""
        everyone: list[list[str]] = uniform(
            self._comm, lambda: self._comm.allgather(list(self._counted))
        )
        lines, counts = zip(*everyone, strict=True)
        if len(set(lines)) > 1:
            return  # Ranks take other ways through the script.
        self._has_told_counts = True
        if self._comm.rank == 0:
            other = next(rank for rank, theirs in enumerate(counts) if theirs != counts[0])
            log_line(
                logging.WARNING,
                "distribute: %s: a mean of the loss counts %s elements on rank 0 and %s on rank "
                "%s, for the same weight, as of tokens, masks or batches of other sizes: the mean "
                "over ranks is not quite the gradient of one process; give weigh() the "
                "number of elements before each backward",
                lines[0],
                counts[0],
                counts[other],
                other,
            )

    def _tell_batches(self) -> None:
        """Say that ranks average gradients of different batches. Collective."""
        self._has_told_batches = True
        mine = f"batch {self.batch} at{line_of_script()}" if self.batch else "none"
        everyone: list[str] = uniform(self._comm, lambda: self._comm.allgather(mine))
        if self._comm.rank == 0:
            other = next((k for k, theirs in enumerate(everyone) if theirs != everyone[0]), 0)
            log_line(
                logging.WARNING,
                "distribute: rank 0 averages gradients of %s and rank %s those of %s: a rank that "
                "skips a batch (continue) before backward takes no part in its step, and its later "
                "batches meet others of the other ranks; have all ranks skip it, or give it the "
                "weight 0 (weigh) or a loss times 0",
                everyone[0],
                other,
                everyone[other],
            )

    def _end(self) -> None:
        """Let ranks that wait for this one know that they do so in vain."""
        # Python sets it where an exception ends the script.
        self.end_by(getattr(sys, "last_value", None))

    def end_by(self, error: BaseException | None) -> None:
        """Let ranks that wait for this one know that it has ended, by an exception or not."""
        if error is not None and not self._has_ended:
            lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
            places = [
                f" at {os.path.basename(frame.f_code.co_filename)}:{line}"
                for frame, line in traceback.walk_tb(error.__traceback__)
                if not frame.f_code.co_filename.startswith(_PACKAGES)
            ]
            self._rows.end(self._averages, f"{lines[0]}{''.join(places[-1:])}")
        elif not self._has_ended:
            self._rows.end(self._averages)
        self._has_ended = True

    def in_vain(self) -> str:
        """Tell why this rank waits for gradients that nobody sends; empty while they may come."""
        ends = self._rows.ends() if self._ends else {}
        least, rank = min(((made, rank) for rank, (made, _) in ends.items()), default=(0, 0))
        if not ends or least >= self._averages:
            return ""
        has_ended = f"rank {rank} has ended after {counted(least, 'average')} of gradients"
        if why := ends[rank][1]:
            return f"{has_ended}, by {why}"
        return f"{has_ended}. {self.position()}"

    def _steps_apart(self) -> str:
        """Tell that ranks have averaged gradients of different steps. Collective."""
        mine = f"in step {self._steps + 1}, at{line_of_script()}"
        everyone: list[str] = self._comm.allgather(mine)
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        return (
            f"the ranks average gradients of different steps: rank 0 is {everyone[0]}, rank "
            f"{other} {everyone[other]}. Ranks have to call backward equally often in each step, "
            "but for calls while the exchange is held"
        )

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that an optimizer has made."""
        self._steps += 1
        self._rows.write(f"{counted(self._steps, 'step')}, the latest at{line_of_script()}")
        if self._has_told:
            return
        number = self._order.setdefault(id(optimizer), len(self._order))
        rates = [float(group.get("lr", 0) or 0) for group in optimizer.param_groups]
        self._rates[number] = rates
        self._digest = zlib.crc32(f"{number} {rates}".encode(), self._digest)
        if self._steps & (self._steps - 1) == 0:
            weights = digest_of(tensor for _, tensor in self._named())
            self._digest = zlib.crc32(weights.to_bytes(8, "little"), self._digest)

    def position(self) -> str:
        """Tell how far this rank has come."""
        rows = self._rows.read()
        mine = rows.get(self._comm.rank)
        theirs = [f"; rank {k} has made {row}" for k, row in rows.items() if row != mine]
        return (
            f"Rank {self._comm.rank} has made {counted(self._steps, 'step')} of its optimizers and "
            f"waits at{line_of_script()}{''.join(theirs[:_NAMED_RANKS])}: ranks that call "
            "backward or step another number of times, as with loaders of unlike lengths, wait "
            "for each other so"
        )

    def close(self) -> None:
        """Tell other ranks that this one goes no further."""
        atexit.unregister(self._end)
        self._end()
        self._rows.close()

    def check(self) -> None:
        """Say if ranks have parted, as the sums that have arrived tell. Collective then."""
        arrived, self._sums = self._sums, []
        if self._has_told or all(map(are_same, arrived)):
            return
        self._has_told = True
        difference = uniform(self._comm, self._difference)
        if difference and self._comm.rank == 0:
            log_line(logging.WARNING, "distribute: %s", difference)

    def _difference(self) -> str:
        """Tell how ranks differ; empty if only the rounding of weights does.
        Collective."""
        rates: list[list[list[float]]] = self._comm.allgather(list(self._rates.values()))
        for rank, theirs in enumerate(rates):
            if theirs != rates[0]:
                return (
                    f"ranks step with other learning rates ({rates[0]} on rank 0, {theirs} on rank "
                    f"{rank}), so that their weights part: let a value of all ranks decide them"
                )
        worst, rank, name = most_different(self._named(), self._comm)
        if worst < ROUNDING:
            return ""
        return (
            f"the weights of {name} differ between rank 0 and rank {rank} by {worst:.1g} of their "
            f"size after {counted(self._steps, 'step')}: something other than the averaged "
            "gradients changes them on each rank, such as its own samples or random numbers"
        )


def line_of_script() -> str:
    """Return where the script has called, or that it has ended."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame is None:
        return " its end"
    return f" {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def bits_of_parts(ranks: int) -> int:
    """Return how many bits a part of a digest may have, so that sums of squares are exact."""
    return max(1, (EXACT_BITS - math.ceil(math.log2(max(1, ranks)))) // 2)


def parts_of(digest: int, bits: int) -> list[int]:
    """Return `PARTS` of a digest, each with its square; `are_same` tells from their sums."""
    mask = (1 << bits) - 1
    low, high = digest & mask, digest >> bits & mask
    return [low, low * low, high, high * high]


def are_same(sums: Sequence[float]) -> bool:
    """True if sums of ones, and of `parts_of` digests, are those of ranks with the same digest."""
    ranks, *parts = map(round, sums)
    # By Cauchy and Schwarz equal only if all are.
    return all(ranks * parts[k + 1] == parts[k] ** 2 for k in range(0, len(parts), 2))


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of values, bit by bit; never 0."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.intdigest() or 1


def most_different(
    named: Sequence[tuple[str, torch.Tensor]], comm: Communicator
) -> tuple[float, int, str]:
    """Return by how much of its size the tensor that differs most from rank 0's does, on which
    rank, and its name. Collective."""
    distances = [0.0]
    for _, tensor in named:
        theirs = tensor.detach().clone()
        broadcast_tensors([theirs], comm)
        gap = 0.0
        if not tensor.equal(theirs):
            # That type holds numbers of all types.
            own, theirs = (each.detach().to(torch.complex128) for each in (tensor, theirs))
            size = max(float(theirs.abs().max()), 1e-12)
            gap = float((own - theirs).abs().max()) / size
        distances.append(1.0 if math.isnan(gap) else gap)
    most, place = max((each, place) for place, each in enumerate(distances))
    everyone: list[list[float]] = comm.allgather([most, place])
    worst, rank = max((each[0], rank) for rank, each in enumerate(everyone))
    place = int(everyone[rank][1]) - 1
    return worst, rank, named[place][0] if place >= 0 else ""
