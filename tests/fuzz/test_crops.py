"""dlio's JPEG decoder reads and writes within its memory, whatever it is given.

The decoder is built with the sanitizers for addresses and undefined behaviour, and damaged images
lie in memory of exactly their size. For longer: `crops SEED COUNT FILE...`, or clang's libFuzzer
with -DLIBFUZZER.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from dlio.image.native.build import build, compiler
from tests.image.jpegs import KINDS, drawn

SANITIZED = ("-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sanitized decoder with a main function; skips without sanitizers."""
    command = compiler()
    if command is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("crops")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if _run([*command, *SANITIZED, str(probe), "-o", str(folder / "probe")]).returncode:
        pytest.skip("needs the compiler's sanitizers")
    library = build(str(folder), SANITIZED)
    source = str(Path(__file__).with_name("crops.c"))
    done = _run([*command, *SANITIZED, source, library, "-o", str(folder / "crops")])
    assert done.returncode == 0, done.stderr
    return folder / "crops"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("rounds", ["500", "200000"])
@pytest.mark.daily("500")
def test_damaged_images_are_read_within_their_memory(
    program: Path, rounds: str, tmp_path: Path
) -> None:
    generator = np.random.default_rng(8)
    files = [tmp_path / str(k) for k in range(60)]
    for k, path in enumerate(files):
        path.write_bytes(drawn(generator, KINDS[k % 4], 100))
    done = _run([str(program), "1", rounds, *map(str, files)])
    assert done.returncode == 0, done.stderr[-3000:]
    decoded, _, total, _ = done.stdout.split()
    assert int(decoded) >= int(total) // 10
