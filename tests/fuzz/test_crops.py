"""dlio's JPEG decoder reads and writes within its memory, whatever it is given.

The decoder is built with the sanitizers for addresses and undefined behaviour, and damaged images
lie in memory of exactly their size. For longer: `crops SEED COUNT FILE...`, or clang's libFuzzer
with -DLIBFUZZER.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.sanitized import build_sanitized, run
from tests.image.jpegs import KINDS, drawn


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sanitized decoder with a main function; skips without sanitizers."""
    folder = tmp_path_factory.mktemp("crops")
    return build_sanitized("crops.c", folder, "-fsanitize=address,undefined")


@pytest.mark.parametrize("rounds", ["500", "200000"])
@pytest.mark.daily("500")
def test_damaged_images_are_read_within_their_memory(
    program: Path, rounds: str, tmp_path: Path
) -> None:
    generator = np.random.default_rng(8)
    files = [tmp_path / str(k) for k in range(60)]
    for k, path in enumerate(files):
        path.write_bytes(drawn(generator, KINDS[k % 4], 100))
    done = run([str(program), "1", rounds, *map(str, files)])
    assert done.returncode == 0, done.stderr[-3000:]
    decoded, _, total, _ = done.stdout.split()
    assert int(decoded) >= int(total) // 10
