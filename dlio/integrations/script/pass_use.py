"""Tells passes that train from passes that evaluate, by the use that is made of their batches.

A pass trains if an optimizer steps after a backward of its batches. Until that is known its batches
are given whole to every rank, which is right for both. A pass trains from its first batch on if the
loop around it says so (its body, or a function of the same file that it calls, calls `backward` in
any case, and `step`), or if an earlier pass of the same place in the script, over the same data,
has trained.
"""

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from types import FrameType
from typing import Final

from torch.utils.weak import WeakIdKeyDictionary

from dlio.integrations.script.loss_plan import LossPlans
from dlio.integrations.script.script_lines import functions_of, line_of, loops_at, script_frames

_FRAMES: Final = 3
"""Callers that tell two passes apart, such as one function's for training and for evaluation."""
_DEPTH: Final = 2
"""Calls of functions, one in another, that are followed from a loop."""
_APART: Final = (ast.FunctionDef, ast.Lambda, ast.For, ast.While, ast.IfExp, ast.BoolOp)
_Place = tuple[tuple[str, int], ...]


class PassUse:
    """Use of one pass over a loader."""

    def __init__(self, memory: "PassMemory", key: tuple[object, ...], where: str) -> None:
        self._memory, self._key, self._where = memory, key, where
        self.trains = key in memory.trained
        """True if its batches are divided among the ranks."""
        self.was_trained = False
        """True if an optimizer has stepped on its batches."""
        self.was_whole = False
        """True if the script has got a whole batch of it."""
        self.is_under_way = False
        """True from its first batch to its end."""
        self._is_begun = self._is_computed = self._is_backward = self._has_steps = False
        self.plans = LossPlans()
        """Of the losses of its batches; all passes of a loader have the same ones."""

    def takes(self) -> None:
        """Note that the script gets a batch."""
        self._is_begun = self.is_under_way = True

    def is_of(self, key: tuple[object, ...]) -> bool:
        """True for a pass of the same place in the script, over the same data."""
        return self._key == key

    def is_like(self, other: "PassUse") -> bool:
        """True for two passes of one place in the script, over the same data."""
        return self._key == other._key

    @property
    def is_over(self) -> bool:
        """True if the script has got batches, and gets no more."""
        return self._is_begun and not self.is_under_way

    def computes(self) -> None:
        """Note that a module computes on a batch, with gradients."""
        self._is_computed = True

    def backward(self) -> None:
        """Note that a backward runs."""
        self._is_backward |= self._is_computed

    def steps(self) -> None:
        """Note that an optimizer steps, or that a scaler skips it."""
        self._has_steps |= self._is_begun
        if self._is_backward:
            self.trains = self.was_trained = True
            self._memory.trained.add(self._key)

    def end(self) -> str | None:
        """Note that no batch of the pass is used any more: a script may take them all before it
        computes on the first. Returns a message if it was taken for one that trains, and did not.
        """
        if not self.trains or self._is_backward or not self._is_begun:
            return None
        self._memory.trained.discard(self._key)
        if self._has_steps:
            # As its samples were changed first, such as by an augmentation, they are not known.
            return (
                f"{self._where}: this pass was divided among the ranks, and an optimizer stepped, "
                "but nothing shows that it trained on these samples: if it did not, the pass's "
                "numbers are those of rank 0's part of the data"
            )
        return (
            f"{self._where}: this pass was divided among the ranks, as an earlier one from there "
            "trained, but it trained nothing: its numbers are those of rank 0's part of the data"
        )


class PassMemory:
    """Places in the script whose passes have trained."""

    def __init__(self) -> None:
        self.trained: set[tuple[object, ...]] = set()
        self._numbers: MutableMapping[object, int] = WeakIdKeyDictionary()
        self._next_number = itertools.count()
        self._open: list[PassUse] = []
        """Passes that may get batches or be computed on still."""

    def begin(
        self, dataset: object, length: int, evaluating: bool, has_optimizer: bool = True
    ) -> tuple[PassUse, str | None]:
        """Return the use of a pass that the script begins, and a message about one before it of
        the same place, over the same data. Passes of two loaders may be under way together."""
        frames = script_frames(_FRAMES)
        place = tuple((each.f_code.co_filename, each.f_lineno) for each in frames)
        where = line_of(frames[0]) if frames else "the script"
        key = (place, self._number_of(dataset), length, evaluating)
        said = None
        for before in [each for each in self._open if each.is_of(key) and each.is_over]:
            self._open.remove(before)
            said = before.end() or said
        use = PassUse(self, key, where)
        self._open.append(use)
        if frames:
            # Without an optimizer, no exchange: the script changes its weights itself.
            use.trains |= has_optimizer and loop_trains(*_place_of(frames[0]))
        return use, said

    def _number_of(self, dataset: object) -> object:
        """Return a number of a data set that no other one gets, and that is the same on all ranks:
        its `id` may be that of one that is gone, on some of them."""
        try:
            number = self._numbers.get(dataset)
            if number is None:
                number = self._numbers[dataset] = next(self._next_number)
        except TypeError:  # It cannot be referred to weakly, such as a list.
            return type(dataset)
        return number

    def end(self) -> Iterator[str]:
        """End all passes. Yields messages about those that were taken for ones that train."""
        for use in self._open:
            if (said := use.end()) is not None:
                yield said


def _place_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


@cache
def loop_trains(file: str, line: int) -> bool:
    """True if the `for` loop whose header is on a line of a file trains in each of its turns, by
    itself or by functions of the file that it calls."""
    body = _Body(functions_of(file))
    return any(
        body.steps(each.body) and body.is_certain(each.body) for each in loops_at(file, line)
    )


class _Body:
    """Statements and the functions of their file that they call, down to some depth."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], depth: int = _DEPTH) -> None:
        self._functions, self._depth = functions, depth

    def steps(self, body: Sequence[ast.stmt]) -> bool:
        """True if a call is of a method `step`, in some case."""
        calls = [node for each in body for node in ast.walk(each) if isinstance(node, ast.Call)]
        names = (each.func.attr for each in calls if isinstance(each.func, ast.Attribute))
        return "step" in names or any(self._of(each, _Body.steps) for each in calls)

    def is_certain(self, body: Sequence[ast.stmt]) -> bool:
        """True if the statements call `backward` in any case."""
        for statement in body:
            is_function = isinstance(statement, ast.FunctionDef)
            own = list(ast.walk(statement) if is_function else _own(statement))
            if isinstance(statement, ast.Return):
                return any(self._is_backward(each) for each in own if isinstance(each, ast.Call))
            if not is_function and any(
                isinstance(each, ast.Continue | ast.Break | ast.Return) for each in own
            ):
                return False
            if isinstance(statement, ast.With | ast.For | ast.Try):
                if self.is_certain(statement.body):
                    return True
            elif not isinstance(statement, ast.If | ast.While | ast.ClassDef) and any(
                self._is_backward(each) for each in own if isinstance(each, ast.Call)
            ):
                return True
        return False

    def _is_backward(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            return True
        return self._of(call, _Body.is_certain)

    def _of(self, call: ast.Call, asks: "Callable[[_Body, Sequence[ast.stmt]], bool]") -> bool:
        """Ask the body of the function that a call is of; False if it is none of the file's."""
        function = self._functions.get(getattr(call.func, "attr", getattr(call.func, "id", "")))
        if function is None or not self._depth:
            return False
        return asks(_Body(self._functions, self._depth - 1), function.body)


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement without those of functions, loops and alternatives in it."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, _APART):
            yield from _own(child)
