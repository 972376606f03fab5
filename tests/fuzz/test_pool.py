"""Native threads read and write within their memory, and share nothing without a lock, whatever the
samples that they are given.

The pool is built with the sanitizers, and runs with jobs of sound and damaged samples that are
given up at random. For longer: `pool SEED ROUNDS FOLDER PICTURE...`.
"""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dlio.image.png_library import libpng_path
from tests.fuzz.sanitized import build_sanitized, run
from tests.image.jpegs import KINDS, drawn

SANITIZERS = {
    "address": "-fsanitize=address,undefined",
    "thread": "-fsanitize=thread",
}


@pytest.mark.parametrize("rounds", ["60", "20000"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.daily("address-60", "thread-60")
def test_native_threads_keep_to_their_memory(
    sanitizer: str, rounds: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(sanitizer)
    program = build_sanitized("pool.c", folder, SANITIZERS[sanitizer])
    generator = np.random.default_rng(8)
    files = [folder / str(k) for k in range(12)]
    for k, path in enumerate(files):
        path.write_bytes(drawn(generator, KINDS[k % 4], 100))
    variables = {}
    if (libpng := libpng_path()) is not None:
        variables["LIBPNG"] = libpng
        for mode in ("RGB", "L", "P"):
            files.append(folder / f"{mode}.png")
            pixels = generator.integers(0, 256, (30, 40, 3), np.uint8)
            Image.fromarray(pixels).convert(mode).save(files[-1])
    (folder / "blocks").mkdir()
    command = [str(program), "1", rounds, str(folder / "blocks"), *map(str, files)]
    done = run(command, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    made, _, refused, *_ = done.stdout.split()
    assert int(made) > int(refused) > 0


def test_the_program_takes_pictures(tmp_path: Path) -> None:
    """Without any it would test less than it says."""
    program = build_sanitized("pool.c", tmp_path, SANITIZERS["address"])
    assert run([str(program), "1", "1", str(tmp_path)]).returncode == 2
