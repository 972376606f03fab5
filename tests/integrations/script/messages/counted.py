"""Counts the messages of a rank in each step of a script, with the guard of `dlio run` and without.

`counted.py FILE EXCHANGE...`, as ranks of mpirun. Each exchange trains a script thrice:
`guarded`, `unguarded`, and by `distribute` with the same loop. Rank 0 writes to FILE, by exchange
and by these names, the calls of communicators and their bytes: a list of those before and in the
first step, one for each later step, and one for those after the last.
"""

import contextlib
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch.optim.optimizer import register_optimizer_step_post_hook

from dlio.comm import world
from dlio.comm.mpi import MpiCommunicator, MpiMessages
from dlio.exchange.distribute import ExchangeHandle
from dlio.integrations.script import runner
from dlio.integrations.script.guard import ScriptGuard
from dlio.integrations.script.run_options import RunOptions

_SENDS = {
    MpiCommunicator: ("_reduction", "bcast", "allgather", "barrier", "isend"),
    MpiMessages: ("isend",),
}
_SCRIPT = str(Path(__file__).with_name("plain.py"))
_sent: list[list[tuple[str, int]]] = []


def _count(kind: type, name: str) -> None:
    original = getattr(kind, name)

    def counted(comm: Any, *args: Any) -> Any:
        _sent[-1].append((name, getattr(args[0], "nbytes", 0) if args else 0))
        return original(comm, *args)

    setattr(kind, name, counted)


@contextlib.contextmanager
def _unguarded() -> Iterator[None]:
    """Leave out all that the guard sends."""

    def handle(*args: Any, **options: Any) -> ExchangeHandle:
        return ExchangeHandle(*args, **{**options, "values": None})

    def meet(guard: ScriptGuard, call: str, **_: object) -> None:
        guard.note(call)

    with (
        mock.patch.object(runner, "ExchangeHandle", handle),
        mock.patch.object(ScriptGuard, "meet", meet),
    ):
        yield


def main(path: Path, exchanges: Sequence[str]) -> None:
    for kind, names in _SENDS.items():
        for name in names:
            _count(kind, name)
    register_optimizer_step_post_hook(lambda *_: _sent.append([]))
    counts: dict[str, dict[str, object]] = {}
    for exchange in exchanges:
        for way in ("guarded", "unguarded", "distribute"):
            _sent[:] = [[]]
            if way == "distribute":
                with mock.patch.object(sys, "argv", [_SCRIPT, exchange]):
                    runpy.run_path(_SCRIPT)
            else:
                around = _unguarded() if way == "unguarded" else contextlib.nullcontext()
                # Files stay those of a rank until its process ends: one run each.
                with around, mock.patch.object(runner, "keep_files_private"):
                    runner.run_script(_SCRIPT, [], RunOptions(exchange=exchange))
            counts.setdefault(exchange, {})[way] = list(_sent)
    if world().rank == 0:
        path.write_text(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
