"""Stand-in for `python` in tests: hands its command to a server that has imported torch already.

`WarmPython` installs a copy of this file as an executable, with this environment's interpreter in
its first line, and makes it `sys.executable`. Started as `python script.py`, `python -m module` or
`python -c text`, after `-P`, `-u` or `-W` too, it sends arguments, environment and standard streams
to the server, which forks a process that becomes that program. This process then passes signals on
and ends as the program does. Commands that the server cannot imitate (other options, extra
descriptors, another namespace) run in the real interpreter.

Few modules are imported, and of `signal` and `socket` only the parts in C: this file starts in
12 ms, with their enumerations it would in 20, and `import torch` takes 1.5 s.
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import marshal
import os
import sys

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def main() -> None:
    """Run the command on a server, or in the real interpreter."""
    if "DLIO_TEST_COLD" not in os.environ and _can_be_served(sys.argv[1:]):
        connection = _connect()
        if connection is not None:
            _follow(connection)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def _can_be_served(arguments: list[str]) -> bool:
    """True for `script.py`, `-m`, `-c`, after `-P`, `-u`, `-W`, with no descriptors to inherit."""
    if arguments[:1] == ["-I"]:
        return False  # The reaper: it outlives the program that starts it, and imports little.
    while arguments[:1] in (["-P"], ["-u"], ["-W"]):
        arguments = arguments[2 if arguments[0] == "-W" else 1 :]
    if not arguments or arguments in (["-"], ["-m"], ["-c"]):
        return False
    if arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        return _refuse(f"option {arguments[0]}")
    if arguments[0] == "-m" and not arguments[1].startswith(("dlio.", "dlio_")):
        return False
    # The listing's own descriptor is one of them.
    if any(
        int(name) > 2 and os.get_inheritable(int(name))
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    ):
        return _refuse("extra descriptors")
    return True


def _refuse(reason: str) -> bool:
    """Add the reason to the list that the test session ends with, as `server.py` does; False."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    try:
        with open(f"{folder}/client.refused", "a", encoding="utf-8") as refused:
            refused.write(f"{reason}\n")
    except OSError:
        pass
    return False


def _connect() -> socket.socket | None:
    """Offer the command to a server; None where there is none or it refuses."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    servers = sorted(name for name in os.listdir(folder) if name.endswith(".socket"))
    if not servers:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(folder, servers[os.getpid() % len(servers)]))
        request = marshal.dumps(
            (os.getpid(), sys.argv, dict(os.environb), os.fsencode(os.getcwd()), _umask())
        )
        streams = [fd for fd in (0, 1, 2) if _is_open(fd)]
        header = marshal.dumps((len(request), streams)).ljust(64, b"\0")
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in streams)
        connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        connection.sendall(request)
        if connection.recv(1):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _follow(connection: socket.socket) -> None:
    """Pass signals on until the program ends, then end in the same way."""

    def forward(number: int, _: object) -> None:
        try:  # noqa: SIM105 - contextlib takes as long to import as all else here
            connection.send(bytes([number]))
        except OSError:
            pass

    for number in _FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    # A reader of the program's output waits until nobody holds its other end.
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    ended = connection.recv(4)
    while 0 < len(ended) < 4:
        ended += connection.recv(4 - len(ended))
    # An empty answer: the server is gone, and has killed the program.
    code = int.from_bytes(ended, "little", signed=True) if ended else -signal.SIGKILL
    if code < 0:
        _die_by(-code)
    os._exit(code)


def _die_by(number: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
