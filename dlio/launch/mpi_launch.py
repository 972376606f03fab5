"""The launcher: starts ranks of any program on this machine, under mpirun."""

import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from dlio.errors import UsageError
from dlio.launch.job_folder import begin_job, open_job_folder
from dlio.launch.rank_environment import rank_environment, root_permission
from dlio.launch.rank_log import logged
from dlio.launch.rank_output import ErrorFilter, RankOutput
from dlio.util.child_processes import end_groups, printed_by
from dlio.util.cores import available_cores
from dlio.util.extras import how_to_install
from dlio.util.input_files import MOST_SETTINGS, read_text
from dlio.util.live_line import LiveLine
from dlio.util.settings import DONE, FAILURES, LAUNCHER, MIN_RANKS, SPARES
from dlio.util.shared_folders import SHARED_MEMORY, SharedFolder
from dlio.util.signals import receiving
from dlio.util.trusted_files import closing_descriptor, open_new
from dlio.util.units import counted, format_bytes
from dlio.util.user_folders import make_folders, open_folder
from dlio.util.whole_files import check_folder, unwritable

_END_TIMEOUT_S = 10.0
_SHORT_TIMEOUT_S = 30.0
LOOK_S = 0.2
_ALL_LOST = 1
_CRASH = (
    ": Open MPI 5.0 crashes if a rank is lost while the others regroup after another loss; go on "
    "from a checkpoint by --resume, or take --backend torch, which has not this fault"
)
_MPIRUN_FILES, _MPIRUN_BYTES = 8, 4096
"""About the number of files, and the bytes of each, that mpirun makes in the folder of TMPDIR."""
_SESSION, _SESSIONS = "PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"
"""Variables with the folder of files that Open MPI's mpirun keeps while it runs: on its own node,
and on all."""
_SEGMENT_BYTES = 16 << 20
"""Free shared memory without which a rank of Open MPI 5 refuses to start, in 30 lines."""
_STARTS = 5
"""Maximum number of attempts to start mpirun."""
ONE_NODE = {"OMPI_MCA_btl": "^ofi,tcp", "OMPI_MCA_mtl": "^ofi"}
"""Transports of Open MPI that one machine never uses. Those of libfabric take a second to look for
networks; that of TCP listens at all interfaces."""
SURVIVING = (
    "--with-ft ulfm --mca coll ^han,adapt,sm,hcoll,portals4 --mca btl_tcp_flags send,inplace"
).split()
"""Options of Open MPI's mpirun for ranks that survive others. Its collectives of several levels
crash in a communicator that was made after a loss. A rank that was receiving a large message over
TCP by pieces that it asks for (`put`) may spin for ever in MPI_Isend after the sender's death."""
SURVIVING_ENVIRONMENT = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}


def launch(
    argv: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    capture: bool = False,
    timeout_s: float | None = None,
    wrap: Callable[[list[str]], list[str]] | None = None,
    min_ranks: int | None = None,
    spares: int = 0,
    live: LiveLine | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on `ranks` ranks of this machine, under mpirun, and wait for its end.

    Ctrl-C and SIGTERM end the ranks. If this process is killed, they end themselves (see
    `watch_launcher`). Output of the ranks is passed on immediately, except for Open MPI's banners
    after an error that a rank has reported itself.

    All options that Open MPI needs on one machine are set here: permission to run as root, more
    ranks than cores, no binding of a rank's threads to one core, and shared memory whose files
    disappear with the run. mpirun is started again if it failed before it started any rank.

    Args:
        argv: the program and its arguments, such as `[sys.executable, "script.py"]`.
        environment: variables to set for the ranks, in addition to this process's own. They
            override those that this function sets.
        capture: return standard output and standard error unchanged, instead of passing them on
            without Open MPI's banners.
        timeout_s: seconds after which the ranks are ended; None for no limit.
        wrap: converts the mpirun command into the one to run, such as one in a network namespace.
        min_ranks: fewest ranks that continue when others are lost; None to end with any rank.
        spares: number of ranks beyond `ranks` that wait to take the place of others.
        live: draws the progress that ranks tell of.

    Returns the exit code (128 + N if signal N ended mpirun), and the output if captured.

    Raises UsageError if mpirun is not installed, subprocess.TimeoutExpired after `timeout_s`.
    """
    mpirun, done_file = find_mpirun(), None
    live = live or LiveLine("", shown=False)
    with ExitStack() as stack:
        options, full = _prepared(mpirun, ranks + spares, environment or {}, live, stack)
        folder = stack.enter_context(open_job_folder())
        if min_ranks is None and not capture:
            full = {**full, FAILURES: folder}
        if min_ranks is not None:
            done_file = os.path.join(folder, "done")
            own = {MIN_RANKS: str(min_ranks), DONE: done_file, SPARES: str(spares)}
            name = begin_job(folder, ranks, spares)
            if spares:
                said = (
                    f"job {name}: {counted(spares, 'rank')} in reserve; `dlio join {name}` "
                    "calls one\n"
                )
                live.write(sys.stdout, [said])
            options += SURVIVING
            full = {**SURVIVING_ENVIRONMENT, **full, **own}
        command = [mpirun, *options, "-n", str(ranks + spares), *logged(argv)]
        if wrap is not None:
            command = wrap(command)
        for start in range(_STARTS):
            sorter = ErrorFilter(start + 1 < _STARTS, min_ranks is not None, folder)
            output = RankOutput(1, live, sorter, capture)
            code = relayed(command, full, output, folder, timeout_s, done_file)
            done = subprocess.CompletedProcess(command, code, output.text, output.errors)
            if not sorter.not_started:
                break
        if done_file is not None:
            failure = code_of(done_file)
            if failure is None and not done.returncode:
                # mpirun takes the loss of all ranks for success.
                done.returncode = _ALL_LOST
                why = _CRASH if sorter.has_crashed else ""
                live.write(sys.stderr, [f"dlio: error: all ranks were lost before the end{why}\n"])
            done.returncode = failure or done.returncode
    return done


def code_of(done_file: str) -> int | None:
    """Return the exit code that a rank has left in a file, None if none has."""
    try:
        return int(read_text(done_file, MOST_SETTINGS))
    except FileNotFoundError:
        return None


def _prepared(
    mpirun: str, ranks: int, environment: Mapping[str, str], live: LiveLine, stack: ExitStack
) -> tuple[list[str], dict[str, str]]:
    """Return mpirun's options and the ranks' environment; `stack` removes temporary folders."""
    full = {**rank_environment(ranks, live), LAUNCHER: str(os.getpid())}
    options = []
    if is_open_mpi(mpirun):
        _check_temporary({**full, **environment}.get("TMPDIR"))
        options = ["--bind-to", "none"]
        if ranks > available_cores():
            options.append("--oversubscribe")
        full = {**ONE_NODE, **full, **root_permission()}
        if "OMPI_MCA_btl_sm_backing_directory" not in {**full, **environment}:
            # Files in Open MPI's default folder would stay behind if ranks were killed.
            segments = stack.enter_context(SharedFolder(f"mpi-{secrets.token_hex(8)}"))
            full["OMPI_MCA_btl_sm_backing_directory"] = segments.path
            space = os.statvfs(segments.path)
            if (free := space.f_bavail * space.f_frsize) < _SEGMENT_BYTES:
                raise UsageError(
                    f"{SHARED_MEMORY} has only {format_bytes(free)} free, and Open MPI starts with "
                    f"{format_bytes(_SEGMENT_BYTES)} at least: make room there (in a container: "
                    "--shm-size=1g), or take --backend torch"
                )
    return options, {**full, **environment}


def _check_temporary(folder: str | None) -> None:
    """Make the folder of TMPDIR, as mpirun does. Raises UsageError if it cannot be used: mpirun
    would print six lines that do not say where the name came from."""
    if folder:
        option = "TMPDIR: "
        try:
            os.close(make_folders(folder))
            check_folder(folder, option)
            # Permissions do not tell of a full disk, nor of /proc.
            with (
                tempfile.TemporaryDirectory(prefix="dlio-", dir=folder) as scratch,
                closing_descriptor(open_folder(scratch)) as inside,
            ):
                for number in range(_MPIRUN_FILES):
                    with open_new(inside, str(number)) as file:
                        file.write(bytes(_MPIRUN_BYTES))
        except OSError as error:
            raise unwritable(option + folder, error) from error


def relayed(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: RankOutput,
    folder: str,
    timeout_s: float | None = None,
    done_file: str | None = None,
) -> int:
    """Run mpirun or another launcher, and return its exit code, or that in `done_file`, where ranks
    survive others. `output` is closed at the end; the `folder` is that of the job.
    """
    with output:
        process = started(command, environment, output, folder)

        def ask_to_end() -> None:
            # mpirun passes SIGUSR1 on to its ranks; SIGTERM has it kill them 0.2 s later.
            process.send_signal(signal.SIGUSR1)

        try:
            with receiving(ask_to_end) as order:
                code = _until_end(process, timeout_s, done_file)
            if code < 0 and not output.sorter.interrupted:
                name = signal.Signals(-code).name
                said = f"{os.path.basename(command[0])} was ended by {name}"
                if -code == signal.SIGBUS:
                    said += f": {tempfile.gettempdir()} (TMPDIR) or {SHARED_MEMORY} is full"
                output.sorter.end_of_signal = said
            return output.as_told(128 - code if code < 0 else code, order)
        except BaseException as error:
            output.sorter.interrupted = isinstance(error, KeyboardInterrupt)
            end(process)
            raise


def _until_end(
    process: "subprocess.Popen[bytes]", timeout_s: float | None, done_file: str | None
) -> int:
    """Return mpirun's exit code at its end. A failure that a rank leaves in `done_file` ends all
    ranks. Raises subprocess.TimeoutExpired after `timeout_s`.
    """
    if done_file is None:
        return process.wait(timeout_s)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            return process.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                raise
        if code_of(done_file):
            end(process)


def started(
    command: Sequence[str], environment: Mapping[str, str], output: RankOutput, folder: str
) -> "subprocess.Popen[bytes]":
    """Start a command in a process group of its own, so that `end` reaches all of it.

    Open MPI's mpirun keeps its files in the job's private folder: in TMPDIR it would take a folder
    or a link that anybody has put at a name of its, and empty it at the end.
    """
    stdout, stderr = output.pipes[0]
    process = subprocess.Popen(
        command,
        env=dict(environment) if _SESSIONS in environment else {**environment, _SESSION: folder},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    output.start()
    return process


def find_mpirun() -> str:
    """Return the mpirun of this Python's environment, else the one on PATH.

    Raises UsageError if neither exists.
    """
    own = os.path.join(os.path.dirname(sys.executable), "mpirun")
    mpirun = own if os.access(own, os.X_OK) else shutil.which("mpirun")
    if mpirun is None:
        raise UsageError(
            "-n starts ranks with mpirun, which is not installed: "
            f"{how_to_install('mpi')}, or load your site's MPI module"
        )
    return mpirun


def end(process: "subprocess.Popen[bytes]") -> None:
    """End mpirun and its ranks by SIGTERM, and by SIGKILL if they ignore it."""
    end_groups([process], _END_TIMEOUT_S)


def is_open_mpi(mpirun: str) -> bool:
    """True if an mpirun is Open MPI's."""
    return "Open MPI" in printed_by([mpirun, "--version"], _SHORT_TIMEOUT_S)[0]
