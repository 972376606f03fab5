"""The machine that figures were measured on, and their format."""

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from dlio.image import native
from dlio.util.cores import available_cores

__all__ = ["describe_machine", "deviation", "ratio", "spread"]


def describe_machine(packages: Sequence[str]) -> dict[str, object]:
    """Processor, memory, versions and, in a checkout, the commit."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": available_cores(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "decoder": native.name(),
        "versions": {name: _version(name) for name in packages},
        "commit": _commit(),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def deviation(values: Sequence[float]) -> str:
    """Mean, and standard deviation where there are several."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def ratio(values: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """Median, least and largest ratio of paired repeats."""
    return spread([value / other for value, other in zip(values, to, strict=True)])


def _field(path: str, name: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.split(":", 1) for line in file if line.startswith(name)]
    except OSError:
        return None
    return rows[0][1].strip() if rows else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
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
