"""Worker processes that share nothing but pipes.

Executors and queues of Python's library have named semaphores in shared memory, which stay there
when a whole job is killed at once, as by the memory limit of its control group.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Final, TypeVarTuple

from dlio.errors import SourceError

_SAFE_PATH: Final = "PYTHONSAFEPATH"
Arguments = TypeVarTuple("Arguments")


def in_processes(
    function: Callable[[*Arguments], int], tasks: Sequence[tuple[*Arguments]], workers: int
) -> Iterator[int]:
    """Call `function` in worker processes; yield the results as they come, in any order.

    Args:
        function: of a module, which the workers import.
        tasks: its arguments.
        workers: number of processes.

    Raises what `function` raises, SourceError if a worker dies. No process is left then.
    """
    context = _context()
    left = list(reversed(tasks))
    processes = {}
    try:
        for _ in range(min(workers, len(left))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
            ours.send(left.pop())
        busy = list(processes)
        while busy:
            ready = wait(busy)
            for each in [each for each in busy if each in ready]:
                yield _result(each)
                if left:
                    each.send(left.pop())
                else:
                    busy.remove(each)
                    each.close()
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for ours, process in processes.items():
            ours.close()
            process.join()


def _result(ours: Connection) -> int:
    try:
        error, result = ours.recv()
    except (EOFError, ConnectionError) as lost:
        raise SourceError(
            "a worker process was killed: is there enough memory? Run again with fewer --workers"
        ) from lost
    if error is not None:
        raise error
    return int(result)


def _serve(theirs: Connection, function: Callable[..., int]) -> None:
    """Run in a worker: do one task after another, until the pipe is closed."""
    # The main process handles Ctrl-C, and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = theirs.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer: tuple[Exception | None, int] = (None, function(*task))
        except Exception as error:
            answer = (error, 0)
        try:
            theirs.send(answer)
        except ConnectionError:
            return


def _context() -> ForkServerContext:
    """Return the context of worker processes.

    Their server is started here, such that it imports nothing from the current folder.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
    return multiprocessing.get_context("forkserver")
