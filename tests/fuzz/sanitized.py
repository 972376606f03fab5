"""C programs of this folder, built with dlio's decoder and a compiler's sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

from dlio.image.native.build import build, compiler


def build_sanitized(source: str, folder: Path, sanitizers: str) -> Path:
    """Build a program of this folder; skips without a compiler that has the sanitizers."""
    command = compiler()
    if command is None:
        pytest.skip("needs a C compiler")
    flags = ("-g", "-O0", sanitizers, "-fno-sanitize-recover=all")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if run([*command, *flags, str(probe), "-o", str(folder / "probe")]).returncode:
        pytest.skip("needs the compiler's sanitizers")
    library = build(str(folder), flags)
    text, made = str(Path(__file__).with_name(source)), folder / Path(source).stem
    done = run([*command, *flags, text, library, "-lpthread", "-ldl", "-o", str(made)])
    assert done.returncode == 0, done.stderr
    return made


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with more variables in its environment, and return its output."""
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
