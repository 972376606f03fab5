"""The nodes that a batch system has allocated to this job, by its environment variables.

Slurm, PBS (Torque, PBS Pro, OpenPBS) and LSF. Outside of an allocation, and in a step of Slurm's
(`srun`), whose processes are started already, there is none.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dlio.comm.launch_detection import slurm_step, whole_number
from dlio.errors import UsageError
from dlio.util.input_files import open_text
from dlio.util.units import counted

_PART: Final = re.compile(r"([^\[\],]*)\[([0-9,-]+)\]|([^\[\],]+)|(,)")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_HOST: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", re.ASCII)
_MOST: Final = 100_000
"""Largest number of hosts: more are a damaged list."""
_BATCH_HOSTS: Final = ("batch", "login")
"""Beginnings of the names of LSF's hosts that run the script and no rank (CORAL)."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a job."""

    manager: str
    """The batch system: `Slurm`, `PBS` or `LSF`."""
    job: str
    """Id of the job."""
    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    """Ranks that the allocation has room for, on each host."""

    def __post_init__(self) -> None:
        for host in self.hosts:
            check_host(host)

    def counts(self, ranks: int | None, per_node: int | None) -> dict[str, int]:
        """Return the number of ranks on each host; hosts without ranks are left out.

        Without `ranks` there are as many as the slots, or as `per_node` makes; without `per_node`
        as many on each host as its slots, or an even share. Raises UsageError if they do not fit
        so.
        """
        hosts = len(self.hosts)
        if per_node is not None:
            total = per_node * hosts if ranks is None else ranks
            if total > per_node * hosts:
                raise UsageError(
                    f"-n {ranks}: {counted(hosts, 'node')} of {counted(per_node, 'rank')} have "
                    f"{per_node * hosts}: "
                    "give a smaller -n or a larger --ranks-per-node"
                )
            shares = [min(per_node, max(0, total - per_node * k)) for k in range(hosts)]
        elif ranks is None or ranks == sum(self.slots):
            shares = list(self.slots)
        else:
            shares = [ranks // hosts + (k < ranks % hosts) for k in range(hosts)]
        return {h: n for h, n in zip(self.hosts, shares, strict=True) if n}


def check_host(name: str) -> str:
    """Return a name of a host, which becomes a word of a command. Raises UsageError for others."""
    if not _HOST.fullmatch(name):
        raise UsageError(
            f"{name[:100]!r} is not the name of a host: letters, digits, and - . _ within"
        )
    return name


def find_allocation(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the allocation that this process is the first of; None outside of one.

    Raises UsageError for variables that contradict each other.
    """
    return _of_slurm(environment) or _of_pbs(environment) or _of_lsf(environment)


def _of_slurm(environment: Mapping[str, str]) -> Allocation | None:
    job = environment.get("SLURM_JOB_ID", "")
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not job or not nodes or slurm_step(environment) is not None:
        return None
    hosts = expand_hosts(nodes)
    # Without a number of tasks Slurm counts cores here.
    tasks = environment.get("SLURM_NTASKS") and environment.get("SLURM_TASKS_PER_NODE")
    slots = (
        expand_counts(tasks)
        if tasks
        else (max(1, whole_number("SLURM_GPUS_ON_NODE", environment)),) * len(hosts)
    )
    if len(slots) != len(hosts):
        raise UsageError(
            f"SLURM_TASKS_PER_NODE={tasks}: numbers for {counted(len(slots), 'node')}, but the "
            "list of "
            f"nodes {nodes} has {len(hosts)}: unset it, and give --ranks-per-node"
        )
    return Allocation("Slurm", job, hosts, slots)


def _of_pbs(environment: Mapping[str, str]) -> Allocation | None:
    path = environment.get("PBS_NODEFILE")
    if not path:
        return None
    return _counted("PBS", environment.get("PBS_JOBID", "?"), _lines("PBS_NODEFILE", path), path)


def _of_lsf(environment: Mapping[str, str]) -> Allocation | None:
    job, path = environment.get("LSB_JOBID", "?"), environment.get("LSB_DJOB_HOSTFILE")
    if path:
        hosts = _lines("LSB_DJOB_HOSTFILE", path)
        # LSF lists the batch host first, on which the script runs and no rank should.
        if len(set(hosts)) > 1 and hosts[0].startswith(_BATCH_HOSTS):
            hosts = hosts[1:]
        return _counted("LSF", job, hosts, path)
    words = environment.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return None
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(each.isdecimal() for each in counts):
        raise UsageError(f"LSB_MCPU_HOSTS={' '.join(words)}: not pairs of a host and a number")
    if len(names) > 1 and names[0].startswith(_BATCH_HOSTS):
        names, counts = names[1:], counts[1:]
    return Allocation("LSF", job, tuple(names), tuple(map(int, counts)))


def _counted(manager: str, job: str, hosts: Iterable[str], path: str) -> Allocation:
    counts = Counter(hosts)
    if not counts:
        raise UsageError(f"{path}: the list of {manager}'s hosts is empty")
    return Allocation(manager, job, tuple(counts), tuple(counts.values()))


def _lines(variable: str, path: str) -> list[str]:
    try:
        with open_text(path) as file:
            return [line.split()[0] for line in file if line.split()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{variable}={path} cannot be read ({error}): unset it outside of a job"
        ) from error


# Lists of hosts as Slurm writes them: `n[1-3,7],login2` for n1, n2, n3, n7 and login2.


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list, in its order. Raises UsageError for a malformed list."""
    hosts: list[str] = []
    for pieces in _split(text):
        names = list(itertools.islice(map("".join, itertools.product(*pieces)), _MOST + 1))
        hosts += names
        if len(hosts) > _MOST:
            raise _malformed(text)
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `2(x3),1`, for 2, 2, 2 and 1.

    Raises UsageError for a malformed list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MOST:
            raise _malformed(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _split(text: str) -> Iterator[list[list[str]]]:
    """Yield each item of a list: for each of its pieces, the texts that it stands for."""
    at = 0
    item: list[list[str]] = []
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise _malformed(text)
        at = match.end()
        if match[4]:
            if not item:
                raise _malformed(text)
            yield item
            item = []
        elif match[3]:
            item.append([match[3]])
        else:
            item += [[match[1]], list(_numbers(match[2], text))]
    if not item:
        raise _malformed(text)
    yield item


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yield the numbers of ranges such as `01-03,7`, with their leading zeros."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST:
            raise _malformed(text)
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"{text[:200]!r} is not a list of Slurm's, such as n[1-3,7]: is the environment damaged?"
    )
