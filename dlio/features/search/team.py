"""The ranks of one trial that runs: their environment, their ends, and how the trial has ended."""

import contextlib
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Final

from dlio.comm.private_store import StoreServer
from dlio.features.search.forker import Forker
from dlio.features.search.study import TrialRecord
from dlio.launch.node.agent_protocol import pack, receive_exactly
from dlio.util.settings import LAUNCHER, RECORD, SECRET, STORE, TRIAL
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import open_own

OpenFolder = Callable[[], AbstractContextManager[str]]
"""Opens the temporary folder of a job."""
_HOST: Final = "127.0.0.1"
_PROGRAM: Final = "dlio.cli.rank_main"
_FEW_S: Final = 10.0
_OF_LAUNCHERS: Final = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_")
_PLACES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class TrialProgram:
    """The program of a trial's ranks."""

    function: str
    """`module:function`, which is called with the records."""
    records: Sequence[tuple[str, Mapping[str, object]]]
    """Records of options: `module:class`, and fields by name."""

    def as_text(self) -> str:
        """Return the work as `dlio.launch.command_ranks.run_as_rank` reads it."""
        task = {
            "function": self.function,
            "command": ["dlio"],
            "records": [[name, dict(values)] for name, values in self.records],
        }
        return json.dumps(task)


@dataclass(slots=True)
class Team:
    """The ranks of one trial, from their start to the end of the last one."""

    record: TrialRecord
    slots: Sequence[int]
    """Numbers of the search's ranks that it takes."""
    forker: Forker
    link: socket.socket
    """The searcher's end."""
    stack: ExitStack
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of ranks that have ended by themselves."""
    left: set[int] = field(default_factory=set)
    """Ranks that run."""
    was_killed: bool = False
    """True once the searcher has ended it."""
    is_stopped: bool = False
    """True if it ends early, by its results."""
    waits: bool = False
    """True while it waits for an answer."""

    @classmethod
    def start(
        cls,
        record: TrialRecord,
        work: TrialProgram,
        slots: Sequence[int],
        cores: Sequence[Sequence[int]],
        gpus: Sequence[str],
        folder: str,
        forker: Forker,
        open_folder: OpenFolder,
    ) -> "Team":
        """Fork the ranks of a trial.

        Args:
            cores: that each rank may use.
            gpus: as CUDA_VISIBLE_DEVICES names those of all ranks.
            folder: of the trial.

        Raises OSError if the forker is gone.
        """
        mine, its = socket.socketpair()
        with ExitStack() as stack, its:
            stack.callback(mine.close)
            os.close(make_folders(folder))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            log = open_own(os.path.join(folder, "log.txt"), flags, 0o644)
            try:
                common = _environment(work, folder, gpus)
                if len(slots) > 1:
                    job = stack.enter_context(open_folder())
                    stack.enter_context(StoreServer(job))
                    common |= _meeting(job, len(slots))
                team = cls(record, slots, forker, mine, stack)
                for rank in range(len(slots)):
                    own = common
                    if len(slots) > 1:
                        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    key = team.key(rank)
                    forker.fork(key, [_PROGRAM, "trial"], own, cores[rank], log, its.fileno())
                    team.left.add(rank)
            finally:
                os.close(log)
            team.stack = stack.pop_all()
        return team

    def key(self, rank: int) -> str:
        """Return the name of a rank for the forker."""
        return f"{self.record.number}.{rank}.{id(self.link)}"

    def ended(self, key: str, code: int) -> bool:
        """Note the end of a rank; True if it is one of these."""
        for rank in self.left:
            if self.key(rank) == key:
                self.left.remove(rank)
                if not self.was_killed:
                    self.codes[rank] = code
                return True
        return False

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        if number == signal.SIGKILL:
            self.was_killed = True
        for rank in self.left:
            self.forker.signal(self.key(rank), number)

    def receive(self) -> Mapping[str, object] | None:
        """Return the next message of the trial; None if it has ended."""
        self.link.settimeout(_FEW_S)
        try:
            message, _ = receive_exactly(self.link)
        except (EOFError, OSError):
            return None
        return message

    def answer(self, goes_on: bool) -> None:
        """Answer the trial's message."""
        self.waits = False
        with contextlib.suppress(OSError):  # It has ended: seen next.
            self.link.sendall(pack({"goes_on": goes_on}))

    def close(self) -> None:
        """Let go of all that belongs to the trial's ranks."""
        self.stack.close()

    @property
    def code(self) -> int:
        """Exit code of the trial: negative if a signal, not the searcher's, has ended a rank."""
        codes = [code for code in self.codes.values() if code]
        killed = [code for code in codes if code < 0]
        return (killed or codes or [0])[0]


def _environment(work: TrialProgram, folder: str, gpus: Sequence[str]) -> dict[str, str]:
    full = {
        name: value
        for name, value in os.environ.items()
        if name not in _PLACES and not name.startswith(_OF_LAUNCHERS)
    }
    full |= {
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
        RECORD: work.as_text(),
        TRIAL: folder,
    }
    if gpus:
        full["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return full


def _meeting(job: str, ranks: int) -> dict[str, str]:
    """Return the variables by which the ranks of a trial find each other."""
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    return {
        STORE: job,
        SECRET: secrets.token_hex(32),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
