import platform
import subprocess
import sys

import pytest

_STEPS = """
import resource, sys
import numpy as np
from dlio.util.heap import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def step():
    pieces = [np.zeros(1 << 20) for _ in range(20)]
    for piece in pieces:
        piece[:] = 1.0

step()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_steps_free_is_used_by_the_next_ones() -> None:
    faults = {
        name: int(
            subprocess.run(
                [sys.executable, "-c", _STEPS, name], check=True, capture_output=True, timeout=400
            ).stdout
        )
        for name in ("keep", "return")
    }
    # 160 MiB in each of ten steps: 40,000 pages each if they are cleared anew.
    assert faults["keep"] < 1_000 < 100_000 < faults["return"]
