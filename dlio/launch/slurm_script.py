"""`dlio launch --slurm`: its options, as `key=value` in Slurm's own terms, and the job script.

The script is plain bash and sbatch, for people to keep and to change. In order it

1. stages the data to the nodes' disks, if asked to;
2. runs the command in all ranks, and passes Slurm's warning (SIGUSR1 before the time limit or a
   preemption, SIGTERM otherwise) on to them, which write a checkpoint and end with code 75;
3. requeues the job after code 75, unless it was cancelled, or no checkpoint has come of two
   requeues in a row; it goes on from its checkpoint;
4. otherwise evicts the staged data, and ends with the command's exit code.

sbatch rather than submitit: submitit starts pickled Python functions and polls for their results,
while users keep, read and change a script, and need no Python to submit it again.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.input_files import open_text
from dlio.util.whole_files import unwritable, write_whole

_MARK: Final = "# Written by `dlio launch --slurm`"
_VARIABLE: Final = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})")
_SUBMIT_TIMEOUT_S: Final = 60
_WIDTH: Final = 90
_RUN: Final = """
# Bash handles signals while it waits, and not while a command runs: `run` waits for one that runs
# in the background, and passes on $passed at Slurm's warning.
child='' warned='' interrupted='' code=0
pass_on() {
  warned=1 interrupted=1
  [ -z "$child" ] || kill -s "$passed" "$child" 2>/dev/null
}
trap pass_on USR1 TERM
run() {
  [ -z "$warned" ] || return 75
  local status=127 ended
  "$@" &
  child=$!
  [ -z "$warned" ] || pass_on  # The warning came before the child had a number.
  while :; do
    interrupted=''
    wait "$child"
    ended=$?
    [ "$ended" -eq 127 ] || status=$ended
    [ -n "$interrupted" ] || break
  done
  child=''
  # It was warned before it had begun (128 + SIGUSR1), or interrupted while it staged (130).
  [ -n "$warned" ] && case $status in 130 | 138) status=75 ;; esac
  return "$status"
}
"""
_GO_ON: Final = """
# After code 75 there is a checkpoint to go on from, unless the job was cancelled.
if [ "$code" -eq 75 ] &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "dlio: job $SLURM_JOB_ID is requeued, and goes on from its checkpoint"
  scontrol requeue "$SLURM_JOB_ID" && exit 75
fi
"""
_IDLE: Final = """
# The newest checkpoint is that of the last two requeues, too: a third would be like them.
if [ "$code" -eq 75 ] && [ "${{staged:-0}}" -eq 0 ]; then
  now=$(ls -1 {folder} 2>/dev/null | grep '^step-' | sort | tail -n 1) before='' idle=0
  [ -f "{note}" ] && read -r idle before <"{note}" &&
    if [ "$now" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  echo "$idle $now" >"{note}"
  if [ "$idle" -ge 2 ]; then
    echo "dlio: job $SLURM_JOB_ID was requeued twice without a step of training, and stops: each" \\
      "time it was told to end before the first one. {remedy}" >&2
    code=1
  fi
fi
[ "$code" -eq 75 ] || rm -f "{note}"
"""
_WITH_VALUE: Final = ("--backend", "--logs")
"""Options of `dlio launch` before its command in a script."""
_NOTE: Final = ".dlio-$SLURM_JOB_ID.requeued"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_SLURM_TIME: Final = re.compile(r"\d+(:\d\d){1,2}|\d+-\d+(:\d\d){0,2}|infinite", re.IGNORECASE)
_UNITS: Final = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}
_SIGNAL: Final = re.compile(r"(?:USR1@)?(\d+)")
_MOST_WARNING_S: Final = 65535
"""Longest warning that sbatch takes."""
_WARNING_S: Final = 120
_WARNING_SHARE: Final = 4
"""A job is warned in the last quarter of a short time limit; Slurm may do it a minute early."""


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Resources and behaviour of a Slurm job."""

    nodes: int = 1
    ranks_per_node: int = 1
    warning_s: int = _WARNING_S
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


def _seconds(time: str) -> int | None:
    """Return the seconds of a time limit in Slurm's form; None for `infinite`."""
    days, mark, clock = time.rpartition("-")
    if not clock[0].isdigit():
        return None
    figures = [int(figure) for figure in clock.split(":")]
    # Slurm's forms: days-hours[:minutes[:seconds]], hours:minutes:seconds, minutes:seconds.
    units = (3600, 60, 1) if mark or len(figures) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(map(int.__mul__, figures, units))


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
    "cpus-per-rank": ("--cpus-per-task", lambda key, text: str(_number(key, text))),
    "memory": ("--mem", _memory),
    "output": ("--output", _text),
    "dependency": ("--dependency", _text),
}
"""The option of sbatch that a key stands for, and the parser of its value."""
_KEYS: Final = ("nodes", "ranks-per-node", *_DIRECTIVES, "name", "signal", "requeue", "sbatch")
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


def parse_slurm(texts: Sequence[str]) -> SlurmOptions:
    """Parse `nodes=4,ranks-per-node=8,time=2h`, given once or several times.

    A piece without `=` goes on with the value before it: `nodelist=n1,n2`.

    Raises UsageError for an unknown key or an invalid value.
    """
    values: dict[str, str] = {}
    more: list[str] = []
    for text in texts:
        for key, value in _pairs(text):
            if key not in _KEYS:
                close = nearest(key, _KEYS)
                raise UsageError(
                    f"--slurm {key}={value}: no such key{close}; there are {', '.join(_KEYS)} "
                    "(sbatch=--key=value passes any other option)"
                )
            if key == "sbatch":
                more.append(_sbatch(value))
            elif key in values:
                raise UsageError(f"--slurm {key}: given twice")
            else:
                values[key] = value
    directives = [
        f"{flag}={parse(key, values[key])}"
        for key, (flag, parse) in _DIRECTIVES.items()
        if key in values
    ]
    name = values.get("name")
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(f"--slurm name={name}: give letters, digits, '.', '_' and '-' alone")
    requeue = values.get("requeue", "yes")
    if requeue not in ("yes", "no"):
        raise UsageError(f"--slurm requeue={requeue}: give yes or no")
    return SlurmOptions(
        _number("nodes", values.get("nodes", "1")),
        _number("ranks-per-node", values.get("ranks-per-node", "1")),
        _warning(values.get("signal"), values.get("time")),
        requeue == "yes",
        name,
        (*directives, *more),
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


def _warning(text: str | None, time: str | None) -> int:
    """Return the seconds before the time limit at which a job is warned."""
    limit = None if time is None else _seconds(parse_time("time", time))
    if text is None:
        return _WARNING_S if limit is None else max(1, min(_WARNING_S, limit // _WARNING_SHARE))
    match = _SIGNAL.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= _MOST_WARNING_S:
        raise UsageError(
            f"--slurm signal={text}: give the seconds before the time limit at which the ranks "
            "are told by SIGUSR1 to write a checkpoint, such as 120 or USR1@120"
        )
    if limit is not None and int(match[1]) >= limit:
        raise UsageError(
            f"--slurm time={time},signal={text}: the warning would come as soon as the job begins, "
            "and it would be requeued for ever: give a longer time, or a shorter signal"
        )
    return int(match[1])


def _sbatch(text: str) -> str:
    flag = text.partition("=")[0]
    if not re.fullmatch(r"--[a-z][a-z0-9-]*", flag) or not text.isprintable():
        raise UsageError(f"--slurm sbatch={text}: give a long option of sbatch, --key=value")
    if flag in _OWN:
        raise UsageError(f"--slurm sbatch={text}: use the key {_OWN[flag]} in its place")
    return text


@dataclass(frozen=True, slots=True)
class JobScript:
    """A job script."""

    options: SlurmOptions
    command: tuple[str, ...]
    """The command that all ranks run, with its launcher: `dlio launch train ...`."""
    setup: tuple[str, ...] = ()
    """Lines of shell that prepare the environment, such as `module load cuda`."""
    stage: tuple[tuple[str, ...], ...] = ()
    """Commands that stage the data, one process on each node."""
    evict: tuple[str, ...] | None = None
    """Command that evicts staged data, once on each node; None to leave them."""
    resumes: bool = False
    """True if the command goes on from a checkpoint when it starts again."""
    checkpoint: str | None = None
    """Folder of checkpoints, whose names show whether steps were made."""

    @property
    def name(self) -> str:
        """Name of the job."""
        if self.options.name is not None:
            return self.options.name
        words = list(self.command[2:])
        while words[:1] and words[0] in _WITH_VALUE:
            del words[:2]
        words = [word for word in words if not word.startswith("-")]
        base = os.path.basename(words[0]) if words else "job"
        return "dlio-" + re.sub(r"[^A-Za-z0-9_.-]", "_", base)

    def output(self, job: str) -> str:
        """Return the file of the job's output.

        Raises UsageError for a pattern of sbatch's that only the job's node knows.
        """
        given = [line for line in self.options.directives if line.startswith("--output=")]
        path = given[0].partition("=")[2] if given else "%x-%j.out"
        path = path.replace("%x", self.name).replace("%j", job).replace("%A", job)
        if "%" in path:
            raise UsageError(f"--follow: --slurm output={path}: give a name with %x and %j alone")
        return path

    def text(self) -> str:
        """Return the script."""
        again = self.resumes and self.options.requeue
        parts = ["\n".join(self._head(again)), _RUN]
        if self.stage:
            parts.append(
                "\n# Fill the nodes' disks. Blocks that are in place are not read again.\n"
            )
            parts.append("passed=TERM\n")
            parts += [self._step(command) for command in self.stage]
            parts.append("staged=$code\n")
        parts.append("\npassed=USR1\n" + self._step(self.command))
        if again and self.checkpoint is not None:
            remedy = (
                f"It is warned {self.options.warning_s} s before its time limit: give it more time "
                "(time=) or a later warning (signal=)."
            )
            folder = shell_words([self.checkpoint])
            parts.append(_IDLE.format(folder=folder, note=_NOTE, remedy=remedy))
        if again:
            parts.append(_GO_ON)
        if self.evict is not None:
            each = 'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
            parts.append(f"\n{each} --ntasks-per-node=1 \\\n  {shell_words(self.evict)}\n")
        parts.append('\nexit "$code"\n')
        return "".join(parts)

    def _step(self, command: Sequence[str]) -> str:
        """Return lines that run a command, unless an earlier one has failed."""
        first = command == (self.stage[0] if self.stage else self.command)
        lines = f"{shell_words(('run', *command))}\ncode=$?\n"
        if first:
            return lines
        indented = "".join(f"  {line}\n" for line in lines.splitlines())
        return f'if [ "$code" -eq 0 ]; then\n{indented}fi\n'

    def _head(self, again: bool) -> list[str]:
        options = self.options
        given = [line for line in options.directives if line.startswith("--output")]
        directives = [
            f"--job-name={self.name}",
            f"--nodes={options.nodes}",
            f"--ntasks-per-node={options.ranks_per_node}",
            *(line for line in options.directives if line not in given),
            *(given or ["--output=%x-%j.out"]),
            "--open-mode=append",
            f"--signal=B:USR1@{options.warning_s}",
            "--requeue" if again else "--no-requeue",
        ]
        return [
            "#!/bin/bash",
            f"{_MARK}; submit it again by sbatch.",
            *(f"#SBATCH {line}" for line in directives),
            "set -u",
            *self.setup,
        ]

    def write(self, path: str) -> None:
        """Write the script to a file; replaces scripts that this function wrote, and no others.

        Raises UsageError if the file is another one, or cannot be written.
        """
        try:
            if os.path.lexists(path):
                with open_text(path, errors="replace") as file:
                    if _MARK not in file.read(1000):
                        raise UsageError(
                            f"--script {path}: the file exists, and dlio did not write it: give "
                            "another name"
                        )
            write_whole(path, lambda file: file.write(self.text().encode()))
        except OSError as error:
            raise unwritable(f"--script {path}", error) from error


def shell_words(words: Sequence[str]) -> str:
    """Return words as bash reads them, with variables such as `$TMPDIR` left to the job.

    Lines that would be longer than 90 characters end before an option.
    """
    pieces: list[str] = []
    for word in map(_quoted, words):
        if not pieces or word.startswith("-"):
            pieces.append(word)
        else:
            pieces[-1] += f" {word}"
    lines = pieces[:1]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) > _WIDTH:
            lines.append(piece)
        else:
            lines[-1] += f" {piece}"
    return " \\\n  ".join(lines)


def _quoted(word: str) -> str:
    # Parts that a terminal would obey, such as line ends, are written as bash's $'\\n'.
    return (
        "".join(
            _quoted_part("".join(part)) if shown else f"$'{_octal(''.join(part))}'"
            for shown, part in groupby(word, str.isprintable)
        )
        or "''"
    )


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(text))


def _quoted_part(word: str) -> str:
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    kept = _VARIABLE.sub(lambda match: f"\0{match[0][1:]}\1", word)
    escaped = re.sub(r'([\\"`$])', r"\\\1", kept)
    return '"' + escaped.replace("\0", "$").replace("\1", "") + '"'


def submit(path: str) -> str:
    """Submit a script by sbatch, and return the job's id.

    Raises UsageError if sbatch is missing or refuses it.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            f"sbatch is not on PATH: submit {path} on a login node of the cluster, or show the "
            "script by --print"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"sbatch did not answer within {_SUBMIT_TIMEOUT_S} s: is slurmctld up (scontrol ping)? "
            f"The script is {path}"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UsageError(f"sbatch refuses {path}: {said}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    # Sites wrap sbatch in programs that print more.
    numbers = re.findall(r"^(?:Submitted batch job )?(\d+)(?:;\S*)?$", done.stdout, re.MULTILINE)
    if not numbers:
        said = " ".join(done.stdout.split()) or "nothing"
        raise UsageError(f"sbatch took {path}, but names no job: it printed {said}; see squeue")
    job: str = numbers[-1]
    return job
