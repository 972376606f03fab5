"""Notices ranks of a script that decide otherwise than others, by values of their own.

Each rank keeps a digest of the script's calls so far: batches that it took, backwards,
steps with their learning rates, saves. It travels with the gradients, as a few numbers whose sums
tell whether all ranks have the same one; where ranks meet otherwise, they compare it first. A rank
that waits for some seconds sends its latest calls to rank 0, which compares them with its own.

The losses travel, too: after `backward` they are the mean over all ranks, as `.grad` is, so that a
script which decides by them, or prints them, does as one process would.
"""

import ctypes
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from threading import get_ident, main_thread
from typing import Any, Final

import numpy as np
import torch
import xxhash

from dlio.comm import Communicator
from dlio.comm.comm_protocol import Request
from dlio.comm.deadlines import leave, looking_on
from dlio.comm.survival.recovery import uniform
from dlio.errors import UsageError
from dlio.exchange.step_watch import (
    PARTS,
    ROUNDING,
    bits_of_parts,
    digest_of,
    most_different,
    parts_of,
)
from dlio.integrations.script.call_site import CallSite
from dlio.integrations.script.script_lines import script_frame
from dlio.integrations.script.script_losses import losses_of

_LOSSES: Final = 4
"""Most losses of a backward that become means."""
_DOUBTS: Final = 2
_OF_SIZES: Final = 3
"""Numbers that tell whether the parts of a batch have the same sizes."""
_KEPT: Final = 60
"""Calls that are kept to find the first one that differs."""
_LOOK_AFTER_S: Final = 3.0
_MESSAGE_BYTES: Final = 16 << 10
_TAG: Final = 7
_WEIGHTLESS: Final = 1e11
"""Factors of means above this are those of ranks whose weights are all 0."""
_BATCH: Final = "the next batch"
_REMEDY: Final = (
    "Each rank sees its share of a batch: let the script decide by values that are the same on all "
    "ranks, such as the loss after backward()"
)
_SLICES: Final = (
    ". If it goes through slices of a batch (split, chunk, x[i:i + n]) with a backward for each, a "
    "rank's share has fewer: take batches of the slice's size from the loader and step after some "
    "of them, or give each rank whole batches by --batch per-rank"
)
_FOLDED: Final = 1000
"""Calls that are kept for the digest at most."""
_NO_WEIGHTS: Final = [0.0] * 2 * PARTS
_Call = tuple[str, str, tuple[str, int, str]]
"""The call, more about it, and its place in the script."""
_Report = tuple[int, str, str]
"""(number, the call, the script's line), as ranks tell each other."""
_numbers_of: Final[Callable[[torch.Tensor], Any]] = torch.Tensor.tolist
"""Without what a run of a script puts around it, and without giving the interpreter's lock away."""
_array_of: Final[Callable[[torch.Tensor], Any]] = torch.Tensor.numpy
_digest_of: Final = xxhash.xxh3_64_intdigest
_C_TYPES: Final = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


class _Backward:
    """The `with` statement around a backward."""

    __slots__ = ("_guard", "_losses")

    def __init__(self, guard: "ScriptGuard", losses: list[torch.Tensor]) -> None:
        self._guard, self._losses = guard, losses

    def __enter__(self) -> Sequence[torch.Tensor]:
        return self._losses

    def __exit__(self, kind: object, *_: object) -> None:
        guard = self._guard
        guard._losses, guard._departing, guard._cells = [], [], []
        if kind is None:
            guard._backward_ends(self._losses)


class ScriptGuard:
    """The calls of a script on this rank. One per process; the main thread uses it.

    `active` is False where ranks go their own ways between exchanges of weights: nothing is
    compared.
    """

    count = _LOSSES + 1 + _DOUBTS + 4 * PARTS + _OF_SIZES

    def __init__(self, comm: Communicator, active: bool = True) -> None:
        self._comm = comm
        self.active = active and comm.size > 1
        self._digest, self._made = 0, 0
        self._fresh: list[str] = []
        """Calls, and additions to them, that are not in the digest yet."""
        self._folded: list[str] = []
        """Those that came into it last, and a digest of these alone: in most steps the same."""
        self._of_folded = 0
        self._main = main_thread().ident
        self._calls: deque[_Call] = deque(maxlen=_KEPT)
        self._sites: dict[str, CallSite] = {}
        """By kind of call, the place in the script of the latest one."""
        self._giving: set[object] = set()
        """Passes that have given a batch since the last other call."""
        self._bits = bits_of_parts(comm.size)
        self._mask = (1 << self._bits) - 1
        self._losses: list[torch.Tensor] = []
        """Of the backward that is under way; they become means."""
        self._means: list[torch.Tensor] = []
        """The values that several of them got."""
        self.parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
        """Returns the parameters whose weights are the same on all ranks, with names."""
        self.unowned: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: iter(())
        """Returns the parameters that no optimizer has, with names."""
        self.buffers: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: iter(())
        """Returns the buffers that are the same on all ranks in a script that trains as one
        process does, with names."""
        self.say: Callable[[str], None] = self._keep
        """Tells the user a line at once, each once."""
        self.sizes = 0
        """Digest of the sizes of this rank's part of a batch, but for the number of samples; 0 if
        they do not tell."""
        self._unlike: set[str] = set()
        """Names of buffers that are known to differ between ranks: they are compared no more."""
        self.notes: list[str] = []
        """Lines for the end."""
        self._steps = self._weights = 0
        """Steps of optimizers, and the digest of the weights that is to travel next; 0 for none."""
        self._sums: list[torch.Tensor | Sequence[float]] = []
        """Sums of digests that were not looked at yet, of each exchange."""
        self._of_alike: list[float] = []
        """The sums of the latest numbers that departed, if all ranks have the same ones."""
        self._of_sizes: tuple[int, list[float], list[float]] = (0, [0.0] * 3, [0.0] * 3)
        """The latest digest of sizes, its numbers, and their sums if all ranks have the same."""
        self.of_loss = 1.0
        """Factor of this rank's losses in those of the whole batch, in the present backward."""
        self._views: deque[tuple[torch.Tensor, memoryview[float]]] = deque(maxlen=2)
        """The latest places of the numbers that travel, as an exchange uses the same ones in each
        step: an operation of torch takes 30 us where others have used the caches."""
        self._departing: list[float | torch.Tensor] = []
        """The losses of the present backward as this rank has computed them."""
        self._cells: list[ctypes.c_float | ctypes.c_double | None] = []
        """Their memory, but for those on a device or of a type that C does not know."""
        self._rates: Sequence[float] = ()
        self._latest_step = ""
        """The latest step of an optimizer as a call, and its learning rates."""
        self.doubts = (0, 0)
        """Sent to all ranks with the gradients, until they have arrived."""
        self.doubted: Callable[[bool], None] = lambda _: None
        """Called on all ranks after a backward of which some rank has doubts; True if one of them
        has some of the second kind."""
        self._talk: Communicator | None = None
        self._told = 0
        """Number of calls that rank 0 was told of."""
        self._receives: dict[int, tuple[Request, np.ndarray[Any, np.dtype[np.uint8]]]] = {}
        self._sends: list[tuple[Request, object]] = []

    def _keep(self, text: str) -> None:
        self.notes += [] if text in self.notes else [text]

    @contextmanager
    def watching(self, survives: bool) -> Iterator[None]:
        """Look at ranks that wait for long, within a `with` statement, unless ranks may be lost.
        Collective."""
        if survives or not self.active:
            yield
            return
        self._talk = self._comm.dup()
        try:
            with looking_on(self._look):
                yield
        finally:
            for request, buffer in self._receives.values():
                with suppress(Exception):
                    if not request.cancel():
                        leave(request, buffer)
            leave(*self._sends)
            if sys.exc_info()[0] is None:
                self._talk.close()
            self._talk = None

    def note(self, call: str, more: str = "", kind: str = "") -> CallSite | None:
        """Note a call of the script; all ranks make the same ones in the same order. `more` is told
        if the call is one that differs, and may differ itself. Calls of a `kind` come from few
        places, the calls of one text otherwise. Returns where it was called.

        Calls of other threads than the main one, such as those that take batches ahead, come at
        other moments on each rank: they are not compared.
        """
        # In a step between large operations all of this is out of the caches: each line counts.
        if get_ident() != self._main:
            return None
        site = self._sites.get(kind or call)
        if site is None:
            site = self._sites[kind or call] = CallSite()
        site.look()
        self._calls.append((call, more, site.place))
        self._made += 1
        self._fresh.append(call)
        if len(self._fresh) >= _FOLDED:
            self._fold()
        return site

    def add(self, more: str) -> None:
        """Add something to the latest call, in which ranks may differ."""
        if get_ident() == self._main:
            self._fresh.append(more)
            call, own, place = self._calls[-1]
            self._calls[-1] = call + more, own, place

    def _fold(self) -> None:
        """Bring the digest up to date. All ranks do so after the same calls."""
        if self._fresh != self._folded:
            self._of_folded = _digest_of("\n".join(self._fresh).encode())
        self._folded, self._fresh = self._fresh, self._folded
        self._fresh.clear()
        # Of a tuple of whole numbers the same everywhere, and quicker than other digests.
        self._digest = hash((self._digest, self._of_folded))

    @property
    def line(self) -> str:
        """The script's line of the latest call."""
        return self._calls[-1][2][2]

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the script's latest call."""
        return self._calls[-1][2][:2]

    def _reported(self) -> list[_Report]:
        first = self._made - len(self._calls)
        return [
            (first + k, call + more, place[2]) for k, (call, more, place) in enumerate(self._calls)
        ]

    def took_batch(self, use: object = None) -> None:
        """Note that the script takes its share of a batch of a pass."""
        if not self._calls or self._calls[-1][0] is not _BATCH:
            self._giving.clear()
        skipped = use in self._giving  # Not the first batch of another loader.
        self._giving.add(use)
        self.note(_BATCH, self._strange() if skipped else "")

    def _strange(self) -> str:
        """Name a variable of the script that is not finite, which may be why it skipped a batch."""
        frame = script_frame()
        for name, value in {} if frame is None else frame.f_locals.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                value = value.detach().item()
            if isinstance(value, float) and not math.isfinite(value):
                return f" ({name} is {value})"
        return ""

    def stepped(self, rates: Sequence[float]) -> None:
        """Note a step of an optimizer with some learning rates. After the 1st, 2nd, 4th, 8th and so
        on the weights are compared, too."""
        if rates != self._rates:
            self._rates = rates
            self._latest_step = f"optimizer.step with learning rate {', '.join(map(str, rates))}"
        self.note(self._latest_step, "", "step")
        self._steps += 1
        if self.active and self._steps & (self._steps - 1) == 0:
            self._weights = self._digest_of_weights()

    def _digest_of_weights(self) -> int:
        named = chain(self.parameters(), self.unowned(), self._compared_buffers())
        return digest_of(tensor for _, tensor in named)

    def _compared_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (each for each in self.buffers() if each[0] not in self._unlike)

    def meet(self, call: str, weights: bool = False) -> None:
        """Note a call in which ranks meet, and whose weights are compared if they are to be.
        Collective.

        Raises UsageError if another rank has called something else, or has other weights.
        """
        self.note(call)
        if not self.active or self._comm.size == 1:
            return
        if weights:
            self._weights = self._digest_of_weights()
        self._sums.append(uniform(self._comm, lambda: self._summed(call)))
        self.check()

    def _summed(self, call: str) -> torch.Tensor:
        sums = torch.tensor(self._numbers(), dtype=torch.float64)
        self._comm.wait([self._comm.iallreduce(sums.numpy())], f"others at {call}")
        return sums

    def backward(self, tensors: Any, keeps_graph: bool) -> "_Backward":
        """Note a backward within a `with` statement, which gives its losses, the first of which it
        begins at.

        They become the mean of all ranks', if it ends with their sum, unless their graph is kept:
        autograd may need their values again. Where the first one is given another value within the
        statement, as it is a sum, the others are changed by the same factor.

        Raises UsageError if ranks do different things. Collective then.
        """
        site = self.note("backward")
        losses: list[torch.Tensor] = []
        if self.active and not keeps_graph and site is not None:
            losses = losses_of(tensors, site.frames(), _LOSSES)
        self._losses, self._means = losses, []
        # Read before backward, which clears the caches, and before sums of exchanges change them.
        self._cells = [_memory_of(each) for each in losses]
        self._departing = [
            cell.value if cell is not None else _value_of(each)
            for each, cell in zip(losses, self._cells, strict=True)
        ]
        self.of_loss, self.doubts = 1.0, (0, 0)
        return _Backward(self, losses)

    def _backward_ends(self, losses: Sequence[torch.Tensor]) -> None:
        if self._means:
            ratio = losses[0].detach() / self._means[0]
            ratio = torch.where(ratio.isfinite(), ratio, torch.ones_like(ratio))
            # Of the means: whoever has changed the first may have changed another, too.
            for loss, mean in zip(losses[1:], self._means[1:], strict=True):
                loss.data.copy_((mean * ratio).reshape(loss.shape))
        self.check()

    # Numbers that travel with gradients.

    def depart(self, into: torch.Tensor, factor: float) -> None:
        # On the host as plain numbers: each operation of torch takes some microseconds.
        numbers: list[float] = [0.0] * _LOSSES
        on_device = []
        if factor:  # The loss of a sample of weight 0 may be NaN.
            scale = factor * self.of_loss
            for place, loss in enumerate(self._departing):
                if isinstance(loss, torch.Tensor):
                    on_device.append((place, loss * scale))
                else:
                    numbers[place] = loss * scale
        numbers += self._numbers()
        if into.is_cuda:
            into.copy_(torch.tensor(numbers, dtype=into.dtype))
        else:
            view = self._view(into)
            # Other ways to write them take longer where caches are cold.
            for place, number in enumerate(numbers):
                view[place] = number
        for place, scaled in on_device:
            into[place] = scaled  # Without waiting for the device.

    def arrive(self, sums: torch.Tensor, factor: torch.Tensor | float) -> None:
        is_on_host = not sums.is_cuda and not isinstance(factor, torch.Tensor)
        numbers: Sequence[float] = self._view(sums).tolist() if is_on_host else []
        # Autograd does not have to know: it has computed all gradients of these losses.
        for place, (loss, cell) in enumerate(zip(self._losses, self._cells, strict=True)):
            if cell is not None and isinstance(factor, float) and is_on_host:
                # Of no element at all it is not a number.
                cell.value = math.nan if factor > _WEIGHTLESS else numbers[place] * factor
            else:
                loss.data.copy_((sums[place] * factor).reshape(loss.shape))
        if len(self._losses) > 1:
            self._means = [loss.detach().clone() for loss in self._losses]
        self._sums.append(numbers[_LOSSES:] if is_on_host else sums[_LOSSES:].clone())

    def _view(self, of: torch.Tensor) -> "memoryview[float]":
        """Return the memory of a tensor on the host."""
        for tensor, view in self._views:
            if tensor is of:
                return view
        view = memoryview(_array_of(of))
        self._views.append((of, view))
        return view

    def _numbers(self) -> list[float]:
        """Return numbers whose sums over ranks tell whether all have the same digests."""
        if self._fresh:
            self._fold()
        ranks, bits, mask = self._comm.size, self._bits, self._mask
        low, high = self._digest & mask, self._digest >> bits & mask  # As by `parts_of`.
        least, most = low * low, high * high
        if self.sizes != self._of_sizes[0]:
            sizes = self.sizes & mask
            own: list[float] = [int(self.sizes > 0), sizes, sizes * sizes]
            self._of_sizes = self.sizes, own, [ranks * each for each in own]
        _, own, alike = self._of_sizes
        weights = others = _NO_WEIGHTS
        if self._weights:
            weights = [*parts_of(self._weights, bits)]
            others = [ranks * each for each in weights]
            self._weights = 0
        # Without doubts: those of any rank are looked at.
        self._of_alike = [
            *(ranks, 0, 0, ranks * low, ranks * least, ranks * high, ranks * most),
            *others,
            *alike,
        ]
        return [1, *self.doubts, low, least, high, most, *weights, *own]

    def check(self) -> None:
        """Raise UsageError on all ranks if they have called different things, or have other
        weights. Collective then."""
        arrived, self._sums = self._sums, []
        for sums in arrived:
            numbers = _numbers_of(sums) if isinstance(sums, torch.Tensor) else sums
            if numbers != self._of_alike:
                self._check(*map(round, numbers))

    def _check(self, ranks: int, doubts: int, wrongs: int, *numbers: int) -> None:
        if doubts:
            self.doubts = (0, 0)
            self.doubted(wrongs > 0)
        *digests, parts, size, squares = numbers
        pairs = zip(digests[::2], digests[1::2], strict=True)
        # By Cauchy and Schwarz equal only if all are.
        same = [ranks * square == total * total for total, square in pairs]
        if not all(same[:PARTS]):
            reports = self._comm.allgather(self._reported())
            raise UsageError(
                _difference(reports)
                or "the ranks of the script have done different things for a while: now "
                f"{_latest(reports)}. {_REMEDY}"
            )
        if not all(same[PARTS:]):
            self._compare_weights()
        if parts * squares != size * size:
            batch = next((each for each in reversed(self._calls) if each[0] == _BATCH), None)
            self.say(
                f"{(batch or self._calls[-1])[2][2]}: the ranks' parts of a batch have other "
                "sizes, as where each is padded to its own longest sample: a model that reads "
                "padding, such as a recurrent one without packing or a mean over time, computes "
                "other values than in one process; one that masks padding does not"
            )

    def _compare_weights(self) -> None:
        """Raise UsageError that names the parameter that differs most. Collective."""
        worst, rank, name = most_different(list(self.parameters()), self._comm)
        if worst >= ROUNDING:
            raise UsageError(
                f"after step {self._steps} the weights of {name} differ between rank 0 and rank "
                f"{rank} by {worst:.1g} of their size: something other than the gradients that "
                "ranks have averaged changes them, by each rank's own part of a batch or random "
                "numbers"
            )
        unowned = self._unlike_of(dict(self.unowned()))
        if unowned:
            raise UsageError(
                f"after step {self._steps} the weights of {unowned[0]}, which no optimizer has, "
                "differ between the ranks: the script changes them on each rank by its own part of "
                "a batch, or has drawn them from a seed of its own. Ranks exchange what a torch "
                "optimizer has: let one make these changes"
            )
        buffers = self._compare_buffers()
        if worst and not (buffers or self.notes):
            # Processors of different kinds compute the same step with other rounding.
            self.notes.append(f"the ranks' weights differ by rounding, {worst:.0e} at most")

    def _compare_buffers(self) -> list[str]:
        """Tell of buffers that ranks have changed in other ways, and return their names.
        Collective."""
        unlike = self._unlike_of(dict(self._compared_buffers()))
        self._unlike.update(unlike)
        if unlike:
            more = f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""
            self.say(
                f"{unlike[0]}{more}: the values come from each rank's part of the batches, as in a "
                "queue, a codebook or a running mean; one process makes them of all samples. What "
                "is computed from them, and so the training, is not one process's; rank 0's are "
                "saved"
            )
        return unlike

    def _unlike_of(self, named: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors that differ between ranks, of those that all ranks have.
        Collective."""
        shapes: dict[str, object] = {
            name: [list(each.shape), str(each.dtype)] for name, each in named.items()
        }
        everyone: list[dict[str, object]] = self._comm.allgather(shapes)
        unlike = []
        for name in [name for name in everyone[0] if all(name in each for each in everyone)]:
            alike = all(each[name] == everyone[0][name] for each in everyone)
            if not alike or most_different([(name, named[name])], self._comm)[0] >= ROUNDING:
                unlike.append(name)
        return unlike

    # Ranks that wait.

    def _look(self, waited_s: float) -> None:
        """Compare the calls of ranks that wait, of which rank 0 has to be one."""
        if self._talk is None or waited_s < _LOOK_AFTER_S:
            return
        rank, others = self._comm.rank, range(1, self._comm.size)
        sources = others if rank == 0 else range(1)
        if not self._receives:
            for source in sources:
                self._receive(source)
        if rank and self._told != self._made:
            self._told = self._made
            report = self._reported()
            while len(text := json.dumps(report)) > _MESSAGE_BYTES:
                del report[0]  # The earliest: a step may name a learning rate of each layer.
            self._tell(0, text)
        for source in list(self._receives):
            request, buffer = self._receives[source]
            if not request.done():
                continue
            text = buffer.tobytes().rstrip(b"\0").decode(errors="replace")
            if rank:
                raise UsageError(text)
            reports = [self._reported(), *([] for _ in range(1, source)), json.loads(text)]
            difference = _difference(reports)
            if difference:
                for other in others:
                    self._tell(other, difference)
                raise UsageError(difference)
            # It is behind, or was; it waits no more, or tells its calls again.
            self._receive(source)

    def _receive(self, source: int) -> None:
        assert self._talk is not None
        buffer = np.zeros(_MESSAGE_BYTES, np.uint8)
        self._receives[source] = self._talk.irecv(buffer, source, _TAG), buffer

    def _tell(self, dest: int, text: str) -> None:
        assert self._talk is not None
        message = np.zeros(_MESSAGE_BYTES, np.uint8)
        data = np.frombuffer(text.encode()[:_MESSAGE_BYTES], np.uint8)
        message[: len(data)] = data
        self._sends.append((self._talk.isend(message, dest, _TAG), message))


def _memory_of(loss: torch.Tensor) -> ctypes.c_float | ctypes.c_double | None:
    """Return the memory of a loss as long as that lives; None on a device, or if C does not know
    its type. To read and write it takes a few microseconds less than operations of torch do."""
    kind: Any = _C_TYPES.get(loss.dtype)
    if kind is None or not loss.is_cpu:
        return None
    memory: ctypes.c_float | ctypes.c_double = kind.from_address(loss.data_ptr())
    return memory


def _value_of(loss: torch.Tensor) -> float | torch.Tensor:
    value = loss.detach().reshape(())
    return value.clone() if loss.is_cuda else float(_numbers_of(value))


def _latest(reports: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Name the latest call of each rank, ranks with the same one together."""
    ranks: dict[str, list[str]] = {}
    for rank, report in enumerate(reports):
        text = "before its first call"
        if report:
            number, call, line = report[-1]
            text = f"at {line} with {call}, call {int(number) + 1} of the script"
        ranks.setdefault(text, []).append(str(rank))
    return ", ".join(f"rank {', '.join(each)} is {text}" for text, each in ranks.items())


def _difference(reports: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Name the first calls that differ between the first rank and another one, by the latest calls
    of each; empty if they have called the same, or one has called less so far."""
    mine = {int(number): (call, line) for number, call, line in reports[0]}
    for rank, report in enumerate(reports):
        for number, call, line in report:
            own = mine.get(int(number))
            if own is not None and own[0].partition(" (")[0] != call.partition(" (")[0]:
                is_backward = any(each.startswith("backward") for each in (own[0], call))
                return (
                    f"the ranks of the script do different things: rank 0 goes on with {own[0]} at "
                    f"{own[1]}, rank {rank} with {call} at {line}. {_REMEDY}"
                    f"{_SLICES if is_backward else ''}"
                )
    return ""
