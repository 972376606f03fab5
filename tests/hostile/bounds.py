"""The most that reading a data set may take, by the bytes that are there."""

import subprocess
from pathlib import Path
from typing import Final

FREE_BYTES: Final = 192 << 20
"""Memory that reading anything may take: 128 MiB of them are what nobody has to declare."""
FACTOR: Final = 32
"""Memory for each byte that is there, beyond these, by default."""
FACTORS: Final = {
    **dict.fromkeys(("coco", "coco-masks", "yolo", "lists", "mds"), 20),
    "dicom": 8,
}
"""The same by format, as SECURITY.md has it."""
FREE_SECONDS: Final = 6.0
SECONDS_A_BYTE: Final = 4e-6
"""Of processor time; many times what sound data take, as tests run on slow machines."""


def bytes_there(folder: Path) -> int:
    """Return the bytes that files below a folder take, without their holes."""
    # Not os.walk: some folders are deeper than Python can recurse.
    words = ["find", str(folder), "-type", "f", "-printf", "%s %b\\n"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    pairs = [map(int, line.split()) for line in listed.splitlines()]
    return sum(min(size, 512 * blocks) for size, blocks in pairs)


def most_memory(name: str, there: int) -> int:
    """Return the memory that a case may take at its peak, beyond that of the process."""
    return FREE_BYTES + FACTORS.get(name.partition("/")[0], FACTOR) * there


def most_seconds(there: int) -> float:
    """Return the processor time that a case may take."""
    return FREE_SECONDS + SECONDS_A_BYTE * there
