"""A process that has imported torch and dlio, and forks for each command that `client.py` sends.

`python server.py SOCKET` answers at a Unix socket until its standard input ends, then kills the
programs that still run. Each connection is one command. The child takes over arguments,
environment, folder, limits, signals and standard streams of the client, and runs the program to
its end as a fresh interpreter does: module-level code, threads joined, exit handlers, MPI
finalised, exit code. To take down the preloaded modules would cost more than most programs do: only
a program that leaves threads, or fails, ends its interpreter, too. MPI is loaded and started by the
program, never here.

One thread, because a child of a process with threads may inherit a lock that nobody releases.
"""

import atexit
import ctypes
import gc
import io
import marshal
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

_PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.filesystem",
    "mpi4py",
    "fsspec",
    "cyclopts",
    "yaml",
    "rich.progress",
    "lz4.frame",
    "xxhash",
    "simplejpeg",
    "dlio.cli.app",
    "dlio.cli.train_command",
    "dlio.train.callbacks.epoch_figures",
    "dlio.train.callbacks.matrices",
    "dlio.train.callbacks.nan_guard",
    "dlio.train.callbacks.rank_roster",
    "dlio.train.callbacks.slow_rank_guard",
    "dlio.train.callbacks.weight_guard",
    "dlio.train.checkpoint.checkpoint_callback",
    "dlio.train.trainer",
    "dlio.integrations.script.runner",
    "google_crc32c",
    "numpy.ma",
    "rich._emoji_codes",
    "dlio.exchange.asgd",
    "dlio.exchange.local_sgd",
    "dlio.exchange.node_gossip",
    "dlio.exchange.round_commit",
    "dlio.exchange.synchronous_sgd",
    "dlio.launch.torch_launch",
    "dlio_readers.annotations",
    "dlio_readers.mds",
    "cyclopts.completion",
    "encodings.idna",
    "pytest",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "zoneinfo",
)
"""None of them starts a thread or MPI, or is itself a program that tests run with `-m`."""
_NAMESPACES = ("net", "mnt", "pid", "user", "ipc")
_READ_AT_IMPORT = (b"PYTHON", b"TORCH", b"MKL", b"KMP", b"NUMPY", b"OPENCV", b"DLIO_MAX_PIXELS")
"""Prefixes of variables that the interpreter or a preloaded module reads when it starts."""
_TAKEN_OVER = (
    b"PYTHONHASHSEED",  # Their sets have one order per server: scripts of tests do not use it.
    b"PYTHONPATH",
    b"PYTHONUNBUFFERED",
    b"TORCHINDUCTOR_CACHE_DIR",
    b"TORCH_CPP_LOG_LEVEL",
    b"TORCHELASTIC_USE_AGENT_STORE",
    b"TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_ROOMS = ("", "readers", "staging", "bench")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_REQUEST_TIMEOUT_S = 10


@dataclass(frozen=True)
class _Command:
    """A request of a client."""

    client: int
    """Process id of the client."""
    arguments: list[str]
    """As in `sys.argv` of the client: the executable first."""
    environment: dict[bytes, bytes]
    folder: bytes
    umask: int
    streams: dict[int, int]
    """Descriptor to have in the program: descriptor in this process."""


def main(path: str) -> None:
    """Answer at `path` until standard input ends. Returns in children, after their program."""
    filters = len(warnings.filters)
    sys.path[1:1] = [os.path.join(_ROOT, room).rstrip("/") for room in _ROOMS]
    for module in _PRELOADED:
        __import__(module)
    from dlio.image.decoder import opencv
    from dlio.util.plugins import plugins

    for group in ("dlio.features", "dlio.readers"):
        for plugin in plugins(group):
            plugin.load()
    opencv()  # It reads its settings when it is loaded, and dlio has some for it.
    # Finalizers of these modules would take torch's operators down at the end of every program:
    # 35 ms, as long as all else in a short one.
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        finalizer.atexit = False
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a module that the tests' warm interpreter imports starts threads")
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            # Clients look for sockets that end in this: it gets its name when it answers.
            listener.bind(f"{path}.new")
            listener.listen(64)
            os.rename(f"{path}.new", path)
        except FileNotFoundError:
            return  # The session has ended meanwhile: another server has removed its folder.
        command = _serve(listener)
    if command is None:
        # The session's folder, which a session that is killed cannot remove.
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    else:
        _become(command)
        _run_to_the_end(_take_options(command.arguments[1:], filters))


def _serve(listener: socket.socket) -> _Command | None:
    """Fork for each command: returns it in the child, and None in the server at its end."""
    children: dict[socket.socket, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                if source is listener:
                    connection, _ = listener.accept()
                    command = _receive(connection)
                    if command is None:
                        connection.close()
                        continue
                    child = os.fork()
                    if child == 0:
                        _leave(selector, children, connection)
                        return command
                    _close(command.streams)
                    try:
                        connection.sendall(b"A")
                    except OSError:  # The client was killed meanwhile; so is what it asked for.
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                        connection.close()
                        continue
                    watch = os.pidfd_open(child)
                    children[connection] = (child, watch)
                    selector.register(connection, selectors.EVENT_READ)
                    selector.register(watch, selectors.EVENT_READ, connection)
                elif isinstance(source, socket.socket):
                    if source in children:
                        _signal(selector, children[source][0], source)
                elif source == sys.stdin.fileno():
                    for child, _ in children.values():
                        os.kill(child, signal.SIGKILL)
                    return None
                else:
                    _report(selector, children, key.data)


def _receive(connection: socket.socket) -> _Command | None:
    """The command of a new client; None where a child of this process cannot imitate it.

    Why it cannot is added to a file, as tests with new interpreters take several times longer.
    """
    listener = connection.getsockname().removesuffix(".new")
    connection.settimeout(_REQUEST_TIMEOUT_S)
    streams: list[int] = []
    try:
        header, streams, _, _ = socket.recv_fds(connection, 64, 3, socket.MSG_WAITALL)
        length, numbers = marshal.loads(header)
        request = bytearray()
        while len(request) < length:
            piece = connection.recv(length - len(request))
            if not piece:
                raise EOFError("the client is gone")
            request += piece
        client, arguments, environment, folder, umask = marshal.loads(request)
        difference = _difference(client, environment)
        if difference:
            with open(f"{listener}.refused", "a", encoding="utf-8") as refused:
                refused.write(f"{difference}\n")
            raise ValueError(difference)
    except (OSError, EOFError, ValueError, TypeError):
        for descriptor in streams:
            os.close(descriptor)
        return None
    connection.settimeout(None)
    files = dict(zip(numbers, streams, strict=True))
    return _Command(client, arguments, environment, folder, umask, files)


def _difference(client: int, environment: dict[bytes, bytes]) -> str:
    """Why no child of this process can stand in for the client; empty where one can."""
    for kind in _NAMESPACES:
        if os.readlink(f"/proc/{client}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            return f"another {kind} namespace"
    if os.stat(f"/proc/{client}").st_uid != os.geteuid():
        return "another user"
    for name, value in environment.items():
        matters = name.startswith(_READ_AT_IMPORT) and name not in _TAKEN_OVER
        if matters and os.environb.get(name) != value:
            return f"{os.fsdecode(name)} is set"
    return ""


def _close(streams: dict[int, int]) -> None:
    for descriptor in streams.values():
        os.close(descriptor)


def _signal(selector: selectors.BaseSelector, child: int, connection: socket.socket) -> None:
    """Pass on the signals that a client sends; kill its program when it is gone."""
    try:
        numbers = connection.recv(64)
    except OSError:
        numbers = b""
    if not numbers:
        selector.unregister(connection)
        numbers = bytes([signal.SIGKILL])
    for number in numbers:
        # The child is not reaped before its client is told: the number is still its own.
        os.kill(child, number)


def _report(
    selector: selectors.BaseSelector,
    children: dict[socket.socket, tuple[int, int]],
    connection: socket.socket,
) -> None:
    """Tell a client how its program ended."""
    child, watch = children.pop(connection)
    selector.unregister(watch)
    os.close(watch)
    _, status = os.waitpid(child, 0)
    with suppress(KeyError):
        selector.unregister(connection)
    with suppress(OSError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    connection.close()


def _leave(
    selector: selectors.BaseSelector,
    children: dict[socket.socket, tuple[int, int]],
    connection: socket.socket,
) -> None:
    """In a child: close everything that belongs to the server."""
    selector.close()
    connection.close()
    for other, (_, watch) in children.items():
        other.close()
        os.close(watch)


def _become(command: _Command) -> None:
    """Take over everything that a program inherits from the process that starts it."""
    os.setsid()
    client = command.client
    for descriptor in (0, 1, 2):
        if descriptor in command.streams:
            os.dup2(command.streams[descriptor], descriptor)
        else:
            os.close(descriptor)
    _close(command.streams)
    before = os.environ.get("PYTHONPATH", "")
    os.environb.clear()
    os.environb.update(command.environment)
    os.umask(command.umask)
    os.chdir(command.folder)
    _take_limits_and_signals(client)
    sys.executable = command.arguments[0]
    sys.orig_argv[:] = command.arguments
    if "dlio_readers.rehearsal" in command.arguments:
        # It compares its parent, which is this server, with the one that it is told.
        parent = os.getppid()
        with suppress(OSError), open(f"/proc/{client}/stat", encoding="ascii") as stat:
            parent = int(stat.read().rpartition(")")[2].split()[1])
        vars(os)["getppid"] = lambda: parent
    _make_streams()
    _make_path(before, os.environ.get("PYTHONPATH", ""))
    if "OMP_NUM_THREADS" in os.environ:
        # Read from the environment when the library was loaded.
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        # The same: torch's library of C++ has no other way to set it.
        import torch

        library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
        ctypes.CDLL(library)._ZN3c1011initLoggingEv()
    if "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ:
        from coverage.control import process_startup

        process_startup(force=True)


def _take_limits_and_signals(client: int) -> None:
    with suppress(ProcessLookupError, FileNotFoundError):
        for limit in _LIMITS:
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, resource.prlimit(client, limit))
        os.sched_setaffinity(0, os.sched_getaffinity(client))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, client))
        with open(f"/proc/{client}/status", encoding="ascii", errors="replace") as lines:
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        blocked, ignored = int(status["SigBlk"], 16), int(status["SigIgn"], 16)
        signal.pthread_sigmask(
            signal.SIG_SETMASK, {n for n in range(1, 65) if blocked >> (n - 1) & 1}
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if ignored >> (number - 1) & 1:
                signal.signal(number, signal.SIG_IGN)


def _make_streams() -> None:
    """Open standard streams as an interpreter does at its start; None for those that are closed."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _open(0, "r")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _open(1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open(2, "w")  # type: ignore[misc]
    if sys.stdout is not None:
        terminal = sys.stdout.isatty()
        sys.stdout.reconfigure(line_buffering=terminal, write_through=unbuffered)
    if sys.stderr is not None:
        sys.stderr.reconfigure(
            errors="backslashreplace", line_buffering=True, write_through=unbuffered
        )


def _unbuffer() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)


def _open(descriptor: int, mode: Literal["r", "w"]) -> io.TextIOWrapper | None:
    with suppress(OSError):
        return open(descriptor, mode, encoding="utf-8", closefd=False)
    return None


def _make_path(before: str, now: str) -> None:
    """Replace the folders of one PYTHONPATH by those of another."""
    inherited = [folder for folder in before.split(os.pathsep) if folder]
    # First comes the folder of this script, for which _run puts the program's.
    rest = [folder for folder in sys.path[1:] if folder not in inherited]
    added = [folder for folder in now.split(os.pathsep) if folder]
    sys.path[:] = [*added, *(folder for folder in rest if folder not in added)]
    sys.path_importer_cache.clear()


class _SafePath:
    """The interpreter's flags, as `-P` sets them."""

    safe_path = True

    def __init__(self, flags: object) -> None:
        self._flags = flags

    def __getattr__(self, name: str) -> object:
        return getattr(self._flags, name)


def _take_options(arguments: list[str], initial: int) -> list[str]:
    """Act on `-P` and `-u`; put each `-W` where an interpreter has it: before `initial` filters.

    The filters in front of those were added by modules. Returns the other arguments.
    """
    options: list[str] = []
    while arguments[0] in ("-P", "-u", "-W"):
        if arguments[0] == "-P":
            vars(sys)["flags"] = _SafePath(sys.flags)
            arguments = arguments[1:]
        elif arguments[0] == "-u":
            _unbuffer()
            arguments = arguments[1:]
        else:
            options.append(arguments[1])
            arguments = arguments[2:]
    if options:
        sys.warnoptions[:] = options
        filters = vars(warnings)["filters"]
        added = filters[:-initial]
        del filters[:-initial]
        vars(warnings)["_processoptions"](options)
        filters[:0] = added
        vars(warnings)["_filters_mutated"]()
    return arguments


def _run_to_the_end(arguments: list[str]) -> None:
    """Run the program and end the process, as an interpreter that has nothing to take down.

    Returns, or raises, where the interpreter has to end in the ordinary way.
    """
    code = 0
    try:
        _run(arguments)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    if any(thread.daemon for thread in threading.enumerate()):
        sys.exit(code)
    vars(threading)["_shutdown"]()
    vars(atexit)["_run_exitfuncs"]()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI, rc

        if MPI.Is_initialized() and not MPI.Is_finalized() and rc.finalize is not False:
            MPI.Finalize()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)
    ctypes.CDLL(None).fflush(None)
    os._exit(code & 0xFF)


def _run(arguments: list[str]) -> None:
    """Run `script.py ...`, `-m module ...` or `-c text ...` as the main program."""
    program = types.ModuleType("__main__")
    vars(program)["__builtins__"] = __builtins__
    sys.modules["__main__"] = program
    first = arguments[0]
    if first == "-m":
        sys.argv = arguments[1:]
        _put_first_on_path(os.getcwd())
        vars(runpy)["_run_module_as_main"](arguments[1])
        return
    if first == "-c":
        sys.argv = ["-c", *arguments[2:]]
        _put_first_on_path("")
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv = arguments
        _put_first_on_path(os.path.dirname(os.path.realpath(first)))
        program.__file__ = first
        with io.open_code(os.path.abspath(first)) as source:
            code = compile(source.read(), first, "exec")
    exec(code, vars(program))


def _put_first_on_path(folder: str) -> None:
    """Complete the path. A program whose path has another tree of dlio imports that one."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    trees = (each or "." for each in sys.path)
    tree = next((each for each in trees if os.path.isfile(f"{each}/dlio/__init__.py")), _ROOT)
    if not os.path.samefile(tree, _ROOT):
        for name in list(sys.modules):
            if name.partition(".")[0] in ("dlio", "dlio_readers", "dlio_staging", "dlio_bench"):
                del sys.modules[name]


if __name__ == "__main__":
    main(sys.argv[1])
