"""The machine, software and file systems that figures were measured on."""

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from dlio.image import native
from dlio.image.native import pool_library
from dlio.util.cores import available_cores
from dlio.util.machine_memory import control_groups, memory_limit
from dlio_bench.file_systems import file_system_of

PACKAGES: Final = ("dlio", "torch", "numpy", "mpi4py", "simplejpeg", "opencv-python-headless")
"""Packages whose versions every report names."""
_FREQUENCY: Final = "/sys/devices/system/cpu/cpu0/cpufreq"


def describe_machine(packages: Sequence[str]) -> dict[str, object]:
    """Processor, memory, limits, kernel, versions and, in a checkout, the commit.

    Values that this system does not show are None.
    """
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": available_cores(),
        "governor": _read(f"{_FREQUENCY}/scaling_governor"),
        "frequency_mhz": _frequency_mhz(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "cgroup": _cgroup_limits(),
        "system": platform.platform(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "decoder": native.name(),
        "batches": pool_library.name(),
        "versions": {name: _version(name) for name in packages},
        "commit": _commit(),
    }


def describe_file_system(path: str) -> dict[str, object]:
    """Type, device, mount options, size and free bytes of the file system that holds a path.

    For a path that does not exist (any more), that of the nearest folder above it.
    """
    real = os.path.realpath(path)
    while not os.path.exists(real) and os.path.dirname(real) != real:
        real = os.path.dirname(real)
    try:
        held = file_system_of(real)
        sizes = os.statvfs(real)
    except OSError:
        return {"path": path, "type": "unknown"}
    return {
        "path": path,
        "mountpoint": held.mountpoint,
        "type": held.type,
        "device": held.source,
        "options": held.options,
        "size": sizes.f_blocks * sizes.f_frsize,
        "free": sizes.f_bavail * sizes.f_frsize,
    }


def load_average() -> float | None:
    """Return the mean number of processes that ran or waited in the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _frequency_mhz() -> float | None:
    khz = _read(f"{_FREQUENCY}/scaling_cur_freq")
    try:
        return float(khz) / 1000 if khz else float(_field("/proc/cpuinfo", "cpu MHz") or "")
    except ValueError:
        return None


def _cgroup_limits() -> dict[str, object]:
    """Bytes of memory and cores that this process's control groups allow; None without limit."""
    cores: list[float] = []
    for folder in control_groups("cpu"):
        quota, period = [*(_read(f"{folder}/cpu.max") or "").split(), "", ""][:2]
        if not quota:
            quota = _read(f"{folder}/cpu.cfs_quota_us") or ""
            period = _read(f"{folder}/cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores.append(int(quota) / int(period))
    return {"memory": memory_limit(), "cores": min(cores, default=None)}


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _field(path: str, name: str) -> str | None:
    rows = [line.split(":", 1) for line in (_read(path) or "").splitlines()]
    values = [row[1].strip() for row in rows if len(row) == 2 and row[0].startswith(name)]
    return values[0] if values else None


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
