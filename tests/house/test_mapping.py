"""Files are read, not mapped: a mapped file that somebody truncates kills the process.

Indexes are mapped where the file system is this node's own, in a folder that no other user enters.
"""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MAPPING: Final = re.compile(r"\bmmap\.mmap\(|\bmemmap\(|\bmmap_mode=|\bmemory_map=|\bmmap=True")
MEMORY: Final = {
    "dlio/launch/node/snapshot_slots.py": "snapshots",
    "dlio/comm/board.py": "rows of the board",
    "dlio/storage/decoded_tier.py": "slabs",
    "dlio/storage/block_stream.py": "positions",
    "dlio/data/index.py": "indexes",
    "dlio/data/index_memory.py": "indexes that are being built, in files without a name",
    "dlio/util/memory.py": "private memory, of no file",
}
"""Modules that map memory or files of their own, not data sets."""


def test_only_memory_is_mapped() -> None:
    mapping = {
        str(path.relative_to(ROOT))
        for room in ("dlio", "readers", "staging")
        for path in (ROOT / room).rglob("*.py")
        if MAPPING.search(path.read_text())
    }
    assert mapping == set(MEMORY)
