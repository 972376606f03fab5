"""dlio's JPEG decoder reads and writes within its memory, whatever it is given.

The decoder is built with the sanitizers for addresses and undefined behaviour, and damaged images
lie in memory of exactly their size. For longer: `crops SEED COUNT FILE...`, or clang's libFuzzer
with -DLIBFUZZER.
"""

import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dlio.image.native.build import HERE, compiler
from tests.image.jpegs import KINDS, drawn

SANITIZED = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sanitized decoder with a main function; skips where it cannot be built."""
    command = compiler()
    if command is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("crops")
    avx2 = ["-mavx2", "-mbmi", "-mbmi2"] if os.uname().machine == "x86_64" else []
    sources = [os.path.join(HERE, name) for name in ("header.c", "crop.c", "scan.c")]
    common = [*command, "-std=gnu11", *SANITIZED, *(["-DDLIO_AVX2"] if avx2 else [])]
    steps = [[*common, "-c", *sources, str(Path(__file__).with_name("crops.c"))]]
    if avx2:
        steps.append([*common, *avx2, "-c", sources[2], "-o", "avx2.o"])
    steps.append(
        [*common, "header.o", "crop.o", "scan.o", "crops.o", *(["avx2.o"] if avx2 else [])]
    )
    for step in steps:
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{shlex.join(step)}: {done.stderr[-300:]}")
    return folder / "a.out"


@pytest.mark.parametrize("rounds", ["2000", "200000"])
@pytest.mark.daily("2000")
def test_damaged_images_are_read_within_their_memory(
    program: Path, rounds: str, tmp_path: Path
) -> None:
    generator = np.random.default_rng(8)
    files = [tmp_path / str(k) for k in range(60)]
    for k, path in enumerate(files):
        path.write_bytes(drawn(generator, KINDS[k % 4], 100))
    done = subprocess.run(
        [str(program), "1", rounds, *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    decoded, _, total, _ = done.stdout.split()
    assert int(decoded) >= int(total) // 10
