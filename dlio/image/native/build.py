"""Compile the library of this folder: `python dlio/image/native/build.py [FOLDER]`.

Run by the build hook, before dlio is installed: imports nothing but the standard library.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "_native.so"
_TIMEOUT_S = 300
_FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
_WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-parameter"]
_AVX2 = ["-mavx2", "-mbmi", "-mbmi2"]
"""Instructions of scan.c and resize.c, which are used where the processor has them."""


class BuildError(Exception):
    """The library cannot be built here."""


def compiler() -> list[str] | None:
    """Return the command of a C compiler: `CC`, or one on PATH; None if there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in (chosen, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def build(folder: str = HERE, flags: tuple[str, ...] = ()) -> str:
    """Compile the library into a folder; return its path. `flags` are further ones of the compiler
    and the linker, such as -fsanitize=address.

    Raises BuildError if no compiler is found, or if it fails.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C compiler was found (install gcc or clang, or set CC)")
    machine = [*shlex.split(os.environ.get("ARCHFLAGS", ""))]  # set on macOS by cibuildwheel
    is_x86 = platform.machine().lower() in ("x86_64", "amd64") and "arm64" not in machine
    plain = ("header", "crop", "files", "make", "pieces", "png", "pool", "ring")
    units: dict[str, list[str]] = {name: [] for name in plain}
    shared = [*_FLAGS, *_WARNINGS, *machine, *flags]
    if is_x86 and sysconfig.get_config_var("SIZEOF_VOID_P") == 8:
        units |= {"scan": _AVX2, "resize": _AVX2}
        shared.append("-DDLIO_AVX2")
    with tempfile.TemporaryDirectory(prefix="dlio-build-") as scratch:
        objects = []
        for unit, more in units.items():
            source = os.path.join(HERE, unit + ".c")
            objects.append(os.path.join(scratch, unit + ".o"))
            _run([*command, *shared, *more, "-c", source, "-o", objects[-1]])
        # Linkers remove an old file first: a process may have it mapped.
        path = os.path.join(folder, NAME)
        _run([*command, *shared, "-shared", *objects, "-lm", "-pthread", "-o", path])
    return path


def is_stale() -> bool:
    """True if the library in this folder is missing or older than its sources."""
    path = os.path.join(HERE, NAME)
    sources = [os.path.join(HERE, name) for name in os.listdir(HERE) if name[-2:] in (".c", ".h")]
    return not os.path.exists(path) or os.path.getmtime(path) < max(map(os.path.getmtime, sources))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


if __name__ == "__main__":
    print(build(sys.argv[1] if len(sys.argv) > 1 else HERE))
