"""A real Slurm of two nodes on this machine, in a folder of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "squeue")
_UP_TIMEOUT_S = 30
_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Slurm of the nodes n1 and n2; yields the variables of its commands.

    Skips the test where Slurm or munge is not installed, and for users other than root.
    """
    scripts = sysconfig.get_path("scripts")  # The `dlio` under test, wherever pytest was started.
    path = os.pathsep.join([scripts, os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    if os.geteuid():
        pytest.skip("Slurm's daemons need root")
    environment = {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = folder / f"{os.path.basename(command[0])}.{len(started)}.out"
        with log.open("wb") as output:
            started.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    for name in ("ctld", "n1", "n2"):
        (folder / name).mkdir()
    host = socket.gethostname()
    port, first, second = _ports(3)
    text = _CONFIGURATION.format(host=host, port=port, folder=folder, first=first, second=second)
    (folder / "slurm.conf").write_text(text, encoding="ascii")
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    try:
        own = ("key-file=key", "socket=munge.socket", "pid-file=munge.pid")
        files = [f"--{name}={folder / file}" for name, file in (each.split("=") for each in own)]
        rest = [f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"]
        start("munged", "--foreground", "--force", *files, *rest)
        _until(lambda: (folder / "munge.socket").exists(), "munged", folder)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n1")
        start("slurmd", "-D", "-N", "n2")

        def idle() -> bool:
            done = subprocess.run(
                ["sinfo", "--noheader", "--states=idle", "--format=%D"],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return done.stdout.split() == ["2"]

        _until(idle, "the nodes", folder)
        yield environment
    finally:
        subprocess.run(
            ["scancel", "--user=root", "--signal=KILL", "--full"],
            env={**os.environ, **environment},
            capture_output=True,
            timeout=60,
            check=False,
        )
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def _until(ready: Callable[[], bool], name: str, folder: Path) -> None:
    deadline = time.monotonic() + _UP_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text(errors="replace")[-1500:] for path in folder.glob("*.out")
            )
            pytest.fail(f"{name} did not come up within {_UP_TIMEOUT_S} s:\n{logs}")
        time.sleep(0.1)
