"""Notices about drawn scripts: which values each one excuses, and whether it is true.

A script is known by its choices, so that each notice, and each reason to stop, can be checked: one
that names another fault than the script's, or another line, is untrue.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from tests.fuzz.training.choices import FEATURES, LOADERS, PAIRS, Choices, decides_by
from tests.fuzz.training.grammar import marked

WEIGHTS: Final = "weights"
"""Excuses the weights, and all that follows from them."""
_PLACE: Final = re.compile(r"train\.py:(\d+)")
_UNLIKE: Final = re.compile(
    r"the ranks of the script do different things: rank \d goes on with (.+?) at (\S+?|the end of "
    r"the script), rank \d with (.+?) at (\S+?|the end of the script)\. Each rank"
)
_AT_CALL: Final = {
    "backward": ("backward", "autograd.grad"),
    "optimizer.step": (".step(",),
    "the next batch": ("for ", "next("),
    "the start of a pass over a loader": ("for ", "list(", "iter(", "next("),
    "the end of a pass over a loader": ("for ",),
    "torch.save": ("torch.save",),
    "eval()": ("eval()",),
    "ReduceLROnPlateau.step": ("scheduler.step",),
    "the making of an optimizer": ("make(", "torch.optim"),
    "its end": ("the end of the script",),
}
"""Texts of which a line of the script that makes a call has one."""


@dataclass(slots=True)
class Said:
    """Notices of one run."""

    excused: set[str] = field(default_factory=set)
    """`WEIGHTS`, and numbers that are told to be those of a rank's part."""
    nearly: set[str] = field(default_factory=set)
    """Numbers that are told to be about right."""
    untrue: list[str] = field(default_factory=list)


def read(notices: Iterable[str], choices: Choices, script: str) -> Said:
    """Judge the notices of a run of `dlio run`, one text each."""
    said = Said()
    for text in notices:
        known = [each for each in _KNOWN if each.pattern.search(text)]
        if len(known) != 1 or not known[0].is_true(choices):
            said.untrue.append(text)
        elif known[0].reads is not None:
            known[0].reads(text, choices, script, said)
        else:
            said.excused.update(known[0].excuses)
    return said


def _read_lines(text: str, choices: Choices, script: str, said: Said) -> None:
    marks = marked(script)
    lines = {int(number) for number in _PLACE.findall(text.partition(": numbers that")[0])}
    follows = choices.get("habit") == "branch by data"
    if follows:
        lines &= marks.keys()  # What follows from the branch differs, too.
    if not (lines or follows) or not lines <= marks.keys():
        said.untrue.append(text)
        return
    numbers = {number for line in lines for number in marks[line]}
    said.excused |= numbers
    if numbers.intersection(decides_by(choices)):
        said.excused.add(WEIGHTS)


def _read_sizes(text: str, choices: Choices, script: str, said: Said) -> None:
    """Take the notice about lines that count by the size of a batch: means over `len(a)` are about
    right, sums over `len(data)` are not."""
    lines = script.splitlines()
    named = text.partition(": the size of")[0]
    numbers = [int(number) for number in _PLACE.findall(named)]
    size = "a.shape[1]" if choices.get("layout") == "time first" else "len(a)"
    if not numbers or not all(size in lines[number - 1] for number in numbers):
        said.untrue.append(text)
        return
    marks = marked(script)
    counted = {each for number in numbers for each in marks.get(number, ())}
    by_samples = choices.get("average", "samples") == "samples"
    if by_samples and "began with whole batches" not in text:
        said.nearly |= counted
        return
    said.excused |= counted
    if counted.intersection(decides_by(choices)):
        said.excused.add(WEIGHTS)


def _read_single(text: str, choices: Choices, script: str, said: Said) -> None:
    """Take the notice that parts of one sample do not show some losses."""
    meets = choices.get("habit") in ("mixed", "centred", "hardest", "mixup")
    if meets or choices.get("loss") in (*PAIRS, "sum", "loop"):
        said.excused |= {WEIGHTS, "train loss", "last loss", "step loss"}


def _read_assigned(text: str, choices: Choices, script: str, said: Said) -> None:
    """Take the notice that gradients without a backward are of parts: weights follow from it where
    the loss is not a mean over samples, or several batches make a step."""
    if choices.get("gradient") != "autograd.grad":
        said.untrue.append(text)
    means = ("mean", "smooth", "penalty", "two terms", "by hand")
    if choices.get("loss", "mean") not in means or choices.get("accumulate", "1") != "1":
        said.excused.add(WEIGHTS)


def _read_terms(text: str, choices: Choices, script: str, said: Said) -> None:
    """Take the notice that ranks have other terms: a mean over samples is right all the same."""
    if choices.get("loss") in PAIRS:
        said.excused.add(WEIGHTS)


def is_true_stop(text: str, choices: Choices, script: str) -> bool:
    """True if a script is rightly stopped: its ranks decide by numbers of their own parts, and the
    lines that the error names make the calls that it names."""
    unlike = _UNLIKE.search(text)
    if unlike is None or not decides_by(choices):
        return False
    if "is nan" in text and choices.get("skip") != "nan":
        return False
    lines = script.splitlines()
    first, at_first, second, at_second = unlike.groups()
    for call, place in ((first, at_first), (second, at_second)):
        # Such as `backward of mse_loss as a mean`, which each backward of a script's line is.
        name = call.partition(" with learning rate")[0].partition(" (")[0]
        name = name if name in _AT_CALL else name.partition(" of ")[0]
        line = _PLACE.fullmatch(place)
        text = lines[int(line[1]) - 1] if line is not None else place
        if not any(each in text for each in _AT_CALL.get(name, ())):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Notice:
    """A kind of notice."""

    pattern: re.Pattern[str]
    is_true: Callable[[Choices], bool]
    excuses: tuple[str, ...] = ()
    reads: Callable[[str, Choices, str, Said], None] | None = None
    """Takes one that names lines that read numbers of training batches."""


def _is(name: str, *alternatives: str) -> Callable[[Choices], bool]:
    return lambda choices: choices.get(name) in alternatives


def _is_resumed_at_the_end(choices: Choices) -> bool:
    """True if the batch that a resumed pass skips is the only one."""
    chosen = {name: alternatives[0] for name, alternatives in FEATURES.items()} | choices
    batches = int(chosen["samples"]) / int(chosen["batch"])
    is_one = batches < 2 if chosen["drop_last"] == "yes" else batches <= 1
    return is_one and chosen["resume"] == "in the middle"


_KNOWN: Final = (
    _Notice(
        re.compile("the loss compares samples of a batch .*another loss than that of one process"),
        lambda choices: choices.get("loss") in PAIRS or choices.get("habit") == "hardest",
        (WEIGHTS,),
    ),
    _Notice(
        re.compile(r"the loss is not a mean over samples \(.*not the gradient of one process"),
        lambda choices: (
            choices.get("loss") in ("root", "dice", "spread", *PAIRS)
            or choices.get("habit") == "hardest"
        ),
        (WEIGHTS,),
    ),
    _Notice(
        # As in parts of one sample and of more.
        re.compile("ranks add up different terms of a loss in one step, as by an `if`, a loop,"),
        lambda choices: choices.get("loss") in PAIRS or choices.get("several") in LOADERS,
        reads=_read_terms,
    ),
    _Notice(
        # Such as a last batch that is short, next to one of another loader.
        re.compile("terms of the loss count other numbers of elements than before, in proportion"),
        _is("several", *LOADERS),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile(r"samples of a batch meet there \(.*not quite that of one process"),
        lambda choices: (
            choices.get("habit") in ("mixed", "centred", "mixup") or choices.get("loss") in PAIRS
        ),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile("the loss comes from square, which nothing sees into: .* each rank's part$"),
        _is("loss", "custom"),
    ),
    _Notice(
        re.compile("the loss comes from square, which nothing sees into: .* of several loaders"),
        lambda choices: choices.get("loss") == "custom" and choices.get("several") in LOADERS,
        (WEIGHTS,),
    ),
    _Notice(
        re.compile("parameters that no optimizer had have gradients of earlier batches there"),
        _is("stage", "optimizer"),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile("batch norm uses the statistics of each rank's share"),
        _is("norm", "batch"),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile("dropout, or another operation that draws random numbers inside, draws others"),
        _is("dropout", "half"),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile(
            "numbers that the script reads there are from rank 0's part of training batches"
        ),
        lambda choices: True,
        reads=_read_lines,
    ),
    _Notice(
        re.compile(
            "a sum is divided there by more than its number of elements: if that is a count"
        ),
        _is("loss", "weighted mean"),
    ),
    _Notice(
        re.compile("the loss adds up a sum over samples there, and each rank has all samples"),
        lambda choices: choices.get("loss") == "sum" and choices.get("several") in LOADERS,
        (WEIGHTS,),
    ),
    _Notice(
        re.compile("a batch leaves one sample to each rank: whether the script compares or mixes"),
        lambda choices: True,
        reads=_read_single,
    ),
    _Notice(
        re.compile("the loss read there, or one that it is a part of, adds up terms that count"),
        lambda choices: (
            choices.get("loss") == "two terms"
            or (choices.get("loss") == "sum" and choices.get("habit") == "learned weight")
            or (choices.get("several") == "centers" and choices.get("loss", "mean") != "mean")
            or choices.get("gradient") in ("penalty", "two backwards", "list")
            or choices.get("several") in ("teacher", *LOADERS)
        ),
        reads=_read_lines,
    ),
    _Notice(
        re.compile(r"the size of a training batch, such as len\(data\), is there that of rank 0's"),
        lambda choices: True,
        reads=_read_sizes,
    ),
    _Notice(
        re.compile("this pass was divided among the ranks, .* but it trained nothing"),
        _is_resumed_at_the_end,
    ),
    _Notice(
        re.compile("this pass was divided among the ranks, and an optimizer stepped, but nothing"),
        _is("several", *LOADERS),
    ),
    _Notice(
        re.compile("LBFGS searches along a line, where rounding decides: from then on every rank"),
        _is("optimizer", "lbfgs with a search"),
    ),
    _Notice(
        re.compile(r"trained without a torch DataLoader or without backward\(\), or had taken all"),
        lambda choices: (
            choices.get("loader") in ("fetch ahead", "slices")
            or choices.get("gradient") == "autograd.grad"
        ),
    ),
    _Notice(
        re.compile("torch.autograd.grad gives the gradient of each rank's part of a batch there"),
        lambda choices: True,
        reads=_read_assigned,
    ),
    _Notice(
        # Each script writes its weights at the end.
        re.compile(r"rank 0 alone wrote the script's files, such as [\w.]+; those of the other"),
        lambda choices: True,
    ),
    _Notice(re.compile("created no torch optimizer"), _is("optimizer", "by hand")),
    _Notice(
        re.compile("a loader without batches gives every rank all samples"),
        _is("loader", "sampler of batches"),
    ),
    _Notice(
        re.compile("backward is given a gradient of each sample there, which is taken as it is"),
        _is("gradient", "outputs", "per sample"),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile(
            "samples of Rows draw random numbers (of torch in the script's process, and each|in "
            "the loader's workers, and those of a rank draw)"
        ),
        _is("data", "augmented"),
        (WEIGHTS,),
    ),
    _Notice(
        re.compile("iterable data set gives every rank all samples"), _is("loader", "iterable")
    ),
    _Notice(
        re.compile("a batch has fewer samples than there are ranks, or is whole on each, next to"),
        _is("several", *LOADERS),
        (WEIGHTS,),
    ),
)
