"""Environments of other libraries, below dlio's cache folder."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from dlio.data.index import cache_folder
from dlio.errors import UsageError
from dlio.util.input_files import read_json
from dlio.util.options import Option, check
from dlio.util.whole_files import write_json
from dlio_bench.peers.contender_table import ENVIRONMENTS, PeerEnvironment

_TIMEOUT_S: Final = 1800.0
_MARK: Final = "dlio-peer.json"
_CUDA: Final = ("nvidia-cublas", "nvidia-cudnn", "nvidia-nccl", "triton")
"""Packages that only a torch for GPUs brings, gigabytes together."""


def folder(name: str) -> str:
    """Folder of an environment."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.join(cache_folder(), "peers", f"{name}-{version}")


def python_of(name: str) -> str:
    """Path of an environment's interpreter."""
    return os.path.join(folder(name), "bin", "python")


def missing(name: str) -> str | None:
    """Why an environment cannot be used; None if it can."""
    try:
        made: Any = read_json(os.path.join(folder(name), _MARK))
    except (OSError, ValueError):
        made = None
    if made is None:
        return f"not installed: dlio bench peers install {name}"
    if made != _content(ENVIRONMENTS[name]):
        return f"installed for other versions: dlio bench peers install {name}"
    return None


def runner_command(environment: str, contender: str) -> list[str]:
    """Command of a contender's process."""
    about = ENVIRONMENTS[environment]
    module = about.runner or environment
    return [python_of(environment), "-m", "runners", module, contender, about.library]


def runner_environment(workers: int) -> dict[str, str]:
    """Variables of a contender's process in an environment of its own."""
    return {
        "PYTHONPATH": os.path.join(os.path.dirname(__file__), "standalone"),
        "OMP_NUM_THREADS": str(workers),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def shared_environment() -> dict[str, str]:
    """Return variables with which an environment's programs import dlio and dlio's packages too.

    Those of this process come first.
    """
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def install(name: str, archive: str) -> None:
    """Make an environment again, from nothing. The archive, a file or a folder, has the source of a
    library that no registry has; it is empty otherwise.

    Raises UsageError if packages cannot be had or built, and before anything is downloaded if pip
    would bring CUDA's libraries along with torch.
    """
    environment, path = ENVIRONMENTS[name], folder(name)
    if environment.archive and not archive:
        raise UsageError(
            f"{name} is in no registry: download {environment.archive} and give it as "
            "--archive FILE"
        )
    if archive and not os.path.exists(archive):
        raise UsageError(f"--archive {archive}: no such file or folder")
    if os.path.isdir(path):
        shutil.rmtree(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _run([sys.executable, "-m", "venv", path], name)
        _pip(name, ["install", "--no-deps", *_planned(name, environment.packages)])
        if archive:
            _pip(name, ["install", "--no-deps", os.path.abspath(archive)])
        if environment.built:
            _pip(name, ["install", "--no-build-isolation", *environment.built])
    except UsageError as error:
        shutil.rmtree(path, ignore_errors=True)
        needs = f"; it needs {environment.system}" if environment.system else ""
        raise UsageError(f"{error}{needs}") from error
    write_json(os.path.join(path, _MARK), _content(environment))


def _content(environment: PeerEnvironment) -> dict[str, list[str]]:
    made = {"packages": list(environment.packages), "built": list(environment.built)}
    if environment.archive:
        made["archive"] = [environment.archive]
    return made


def _planned(name: str, packages: Sequence[str]) -> list[str]:
    """Requirements of all that pip would install. Raises UsageError if CUDA is among them."""
    report = _pip(name, ["install", "--dry-run", "--report", "-", *packages])
    planned: list[dict[str, Any]] = [each["metadata"] for each in json.loads(report)["install"]]
    names = [str(each["name"]).lower() for each in planned]
    if cuda := [each for each in names if each.startswith(_CUDA)]:
        raise UsageError(
            f"{name} would bring {cuda[0]} and {len(cuda) - 1} more of CUDA's libraries: have "
            "pip find torch's build for CPUs, by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL"
        )
    return [f"{each['name']}=={each['version']}" for each in planned]


def _pip(name: str, arguments: Sequence[str]) -> str:
    command = [python_of(name), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return _run(command, name)


def _run(command: Sequence[str], name: str) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{name}: pip took more than {_TIMEOUT_S:g} s: try again") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or ["no reason given"]
        raise UsageError(f"{name} cannot be installed: {lines[0].strip()[:300]}")
    return done.stdout


# The command


@dataclass(frozen=True, slots=True)
class PeersChoice:
    """Environments to make or to list."""

    action: Annotated[
        Literal["install", "list"],
        Option("install: make the environments. list: show which there are.", positional=True),
    ]
    names: Annotated[
        tuple[str, ...],
        Option(
            f"Environments, of {', '.join(ENVIRONMENTS)}, or all of them if none is named.",
            positional=True,
            metavar="NAME",
        ),
    ] = ()
    archive: Annotated[
        str,
        Option(
            "Source of a library that no registry has, dlio_benchmark: an archive or a checkout.",
            metavar="FILE",
            default_text="none",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.names if name not in ENVIRONMENTS]:
            raise UsageError(f"{unknown[0]}: choose among {', '.join(ENVIRONMENTS)}")
        taking = [name for name, each in ENVIRONMENTS.items() if each.archive]
        if self.archive and (self.action, list(self.names)) not in [
            ("install", [name]) for name in taking
        ]:
            raise UsageError(f"--archive is for: dlio bench peers install {', '.join(taking)}")


def command(peers: PeersChoice) -> None:
    """Install the libraries that `dlio bench loader --peers` measures.

    Each gets an environment of its own in dlio's cache folder; the environment of dlio stays as it
    is. Goes on after a library that cannot be installed, and ends with exit code 2 then.
    """
    failed = []
    installing = peers.action == "install"
    every = [name for name, each in ENVIRONMENTS.items() if not (installing and each.archive)]
    for name in peers.names or every:
        if installing:
            print(f"{name}: installing {ENVIRONMENTS[name].library}", flush=True)
            try:
                install(name, peers.archive)
            except UsageError as error:
                failed.append(name)
                print(f"{name}: {error}")
                continue
        print(f"{name}: {missing(name) or folder(name)}")
    if failed:
        raise UsageError(f"not installed: {', '.join(failed)}; the reasons are above")
