"""The stand-in of a rank: mpirun starts it, and it has the node's zygote fork the rank.

    python -I -S shim.py FOLDER START MODULE ARGUMENTS...

It passes environment, folder and streams to the zygote and signals to the rank, and ends as the
rank does: by the same signal or with the same code. It imports nothing of dlio, so that it starts
within 20 ms. `{node}` in FOLDER stands for this node's name.

Ranks that survive others are told of a death by a signal and never of an exit code, so there a
code other than 0 becomes SIGKILL. A killed shim takes its rank along, and so does a killed zygote
its shims: the connection between them ends.
"""

import array
import json
import os
import resource
import signal
import socket
import stat
import sys
from contextlib import suppress

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_SURVIVES = "OMPI_MCA_mpi_ft_enable"
_TIMEOUT_S = 120.0
"""Seconds until the zygote answers: it may still be importing torch from a busy file system."""


def main(arguments: list[str]) -> None:
    """Have a rank forked, and end as it does."""
    folder, start, *argv = arguments
    connection = _connect(folder.replace("{node}", socket.gethostname()))
    body = json.dumps(
        {"start": int(start), "argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}
    ).encode()
    streams = array.array("i", [0, 1, 2])
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
    connection.sendmsg([len(body).to_bytes(8, "little")], rights)
    connection.sendall(body)
    rank = _number(connection)
    if rank is None:
        _die_by(signal.SIGKILL)
        return
    connection.settimeout(None)

    def forward(number: int, _: object) -> None:
        with suppress(OSError):
            os.kill(rank, number)

    for number in _SIGNALS:
        signal.signal(number, forward)
    # A reader of the rank's output waits until nobody holds its other end.
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    code = _number(connection)
    if code is None:
        code = -signal.SIGKILL
    if code > 0 and os.environ.get(_SURVIVES) == "1":
        code = -signal.SIGKILL
    if code < 0:
        _die_by(-code)
    os._exit(code)


def _connect(folder: str) -> socket.socket:
    """Connect to the zygote; ends this process in one line if that fails."""
    folder = _found(folder)
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        status = os.fstat(inside)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise OSError(f"{folder} belongs to another user")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_TIMEOUT_S)
        connection.connect(f"/proc/self/fd/{inside}/zygote")
    except OSError as error:
        sys.stderr.write(
            f"dlio: error: node {socket.gethostname()} has no agent of this job ({error}): call "
            "it in --nodes by the name that `hostname` prints there\n"
        )
        sys.stderr.flush()
        os._exit(2)
    return connection


def _found(folder: str) -> str:
    """Return where a job's folder is: the name of the user's folder in shared memory has digits
    behind it if somebody else has taken the usual one; see `dlio.util.shared_folders`."""
    memory, name = os.path.split(folder)
    top, usual = os.path.split(memory)
    with suppress(OSError):
        for each in sorted(os.listdir(top)):
            if each == usual or each.startswith(f"{usual}-"):
                place = os.path.join(top, each, name)
                with suppress(OSError):
                    if os.lstat(place).st_uid == os.geteuid():
                        return place
    return folder


def _number(connection: socket.socket) -> int | None:
    """Receive a number; None if the zygote is gone."""
    data = b""
    while len(data) < 8:
        try:
            piece = connection.recv(8 - len(data))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return int.from_bytes(data, "little", signed=True)


def _die_by(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
