"""The options of `dlio launch --slurm`: a job's resources as `key=value`, in Slurm's own terms."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dlio.errors import UsageError
from dlio.util.arguments import nearest

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_SLURM_TIME: Final = re.compile(r"\d+(:\d\d){1,2}|\d+-\d+(:\d\d){0,2}|infinite", re.IGNORECASE)
_UNITS: Final = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}
_SIGNAL: Final = re.compile(r"(?:USR1@)?(\d+)")
_MOST_WARNING_S: Final = 65535
"""Longest warning that sbatch takes."""


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Resources and behaviour of a Slurm job."""

    nodes: int = 1
    ranks_per_node: int = 1
    warning_s: int = 120
    """Time before the time limit, or a preemption, at which the ranks are told to end."""
    requeue: bool = True
    name: str | None = None
    directives: tuple[str, ...] = ()
    """More options of sbatch, such as `--account=physics`."""


def _text(key: str, text: str) -> str:
    if not text or not text.isprintable() or any(each in text for each in " '\"\\#`$"):
        raise UsageError(f"--slurm {key}={text}: give a word without spaces and quotes")
    return text


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UsageError(f"--slurm {key}={text}: give a whole number from 1")
    return int(text)


def _count(key: str, text: str) -> str:
    return str(_number(key, text))


def _gpus(key: str, text: str) -> str:
    """A number, or a kind and a number, such as `a100:4`."""
    kind, _, count = text.rpartition(":")
    _number(key, count)
    return f"{_text(key, kind)}:{count}" if kind else count


def _memory(key: str, text: str) -> str:
    match = re.fullmatch(r"(\d+)([KMGT])?(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"--slurm {key}={text}: give a size for each node, such as 64GiB")
    return match[1] + (match[2] or "M").upper()


def parse_time(key: str, text: str) -> str:
    """Return a time limit in Slurm's form: `2h` and `1h30m` become `0-02:00:00`, `0-01:30:00`.

    Forms of Slurm's with a colon or a hyphen stay.

    Raises UsageError for another text.
    """
    if _SLURM_TIME.fullmatch(text):
        return text
    pieces = re.findall(r"(\d+)(d|h|min|m|s)", text)
    seconds = sum(int(count) * _UNITS[unit] for count, unit in pieces)
    if not pieces or "".join(map("".join, pieces)) != text or not seconds:
        raise UsageError(
            f"--slurm {key}={text}: give a time with its units, such as 2h, 90m or 1d12h, or as "
            "Slurm writes it: 2:00:00 or 1-12:00:00"
        )
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{rest:02}"


_DIRECTIVES: Final[Mapping[str, tuple[str, Callable[[str, str], str]]]] = {
    "time": ("--time", parse_time),
    "account": ("--account", _text),
    "partition": ("--partition", _text),
    "qos": ("--qos", _text),
    "constraint": ("--constraint", _text),
    "reservation": ("--reservation", _text),
    "nodelist": ("--nodelist", _text),
    "exclude": ("--exclude", _text),
    "gpus-per-node": ("--gpus-per-node", _gpus),
    "cpus-per-rank": ("--cpus-per-task", _count),
    "memory": ("--mem", _memory),
    "output": ("--output", _text),
    "dependency": ("--dependency", _text),
}
"""The option of sbatch that a key stands for, and the parser of its value."""
KEYS: Final = (
    "nodes",
    "ranks-per-node",
    *_DIRECTIVES,
    "name",
    "signal",
    "requeue",
    "sbatch",
)
"""All keys."""
_OWN: Final = {
    **{flag: key for key, (flag, _) in _DIRECTIVES.items()},
    "--nodes": "nodes",
    "--ntasks-per-node": "ranks-per-node",
    "--job-name": "name",
    "--signal": "signal",
    "--requeue": "requeue",
    "--no-requeue": "requeue",
}
"""Options of sbatch that have a key of their own."""


@dataclass(slots=True)
class _GivenOption:
    values: dict[str, str] = field(default_factory=dict)
    sbatch: list[str] = field(default_factory=list)

    def add(self, key: str, value: str) -> None:
        if key == "sbatch":
            self.sbatch.append(_sbatch(value))
        elif key in self.values:
            raise UsageError(f"--slurm {key}: given twice")
        else:
            self.values[key] = value


def parse_slurm(texts: Sequence[str]) -> SlurmOptions:
    """Parse `nodes=4,ranks-per-node=8,time=2h`, given once or several times.

    A piece without `=` goes on with the value before it: `nodelist=n1,n2`.

    Raises UsageError for an unknown key or an invalid value.
    """
    given = _GivenOption()
    for text in texts:
        for key, value in _pairs(text):
            if key not in KEYS:
                close = nearest(key, KEYS)
                raise UsageError(
                    f"--slurm {key}={value}: no such key{close}; there are {', '.join(KEYS)} "
                    "(sbatch=--key=value passes any other option)"
                )
            given.add(key, value)
    values = given.values
    directives = [
        f"{flag}={parse(key, values[key])}"
        for key, (flag, parse) in _DIRECTIVES.items()
        if key in values
    ]
    name = values.get("name")
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(f"--slurm name={name}: give letters, digits, '.', '_' and '-' alone")
    return SlurmOptions(
        _number("nodes", values.get("nodes", "1")),
        _number("ranks-per-node", values.get("ranks-per-node", "1")),
        _warning(values.get("signal", "120")),
        _yes("requeue", values.get("requeue", "yes")),
        name,
        (*directives, *given.sbatch),
    )


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for piece in text.split(","):
        key, equals, value = piece.partition("=")
        key = key.strip().replace("_", "-")
        if equals:
            pairs.append((key, value.strip()))
        elif pairs and pairs[-1][0] in ("nodelist", "exclude", "sbatch", "partition", "dependency"):
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{piece.strip()}")
        else:
            raise UsageError(f"--slurm {text}: {piece!r} has no value: write key=value")
    return pairs


def _warning(text: str) -> int:
    match = _SIGNAL.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= _MOST_WARNING_S:
        raise UsageError(
            f"--slurm signal={text}: give the seconds before the time limit at which the ranks "
            "are told by SIGUSR1 to write a checkpoint, such as 120 or USR1@120"
        )
    return int(match[1])


def _yes(key: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise UsageError(f"--slurm {key}={text}: give yes or no")
    return text == "yes"


def _sbatch(text: str) -> str:
    flag = text.partition("=")[0]
    if not re.fullmatch(r"--[a-z][a-z0-9-]*", flag) or not text.isprintable():
        raise UsageError(f"--slurm sbatch={text}: give a long option of sbatch, --key=value")
    if flag in _OWN:
        raise UsageError(f"--slurm sbatch={text}: use the key {_OWN[flag]} in its place")
    return text
