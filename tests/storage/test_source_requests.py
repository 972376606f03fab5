"""Requests to a source, and their sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.storage.file_system_kind import FileSystemKind
from dlio.storage.source_requests import SourceRequests, piece_bytes
from dlio_staging.pack_folder import pack


class _Counted:
    """A shard's reader that records the requests to its file."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.asked: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_stored(self, block: int, into: memoryview, at: int = 0) -> None:
        start = self._reader.stored_at(block) + at
        self.asked.append((start, start + len(into)))
        self._reader.read_stored(block, into, at)


@pytest.mark.parametrize("stripe", [0, 1 << 16, 3 << 16, 1 << 20, 4 << 20])
def test_on_lustre_no_request_touches_two_stripes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stripe: int
) -> None:
    np.save(tmp_path / "volumes.npy", np.arange(5 << 19, dtype=np.int32).reshape(2, -1))
    pack(str(tmp_path / "volumes.npy"), str(tmp_path / "shards"), compress="none")
    reader = _Counted(open_reader(str(tmp_path / "shards")))
    place = FileSystemKind(str(tmp_path), "lustre", "lustre", "/", 4, stripe)
    monkeypatch.setattr("dlio.storage.source_requests.file_system_of", lambda _: place)
    with SourceRequests(reader, 4) as intake:
        for block in range(len(reader.block_bytes)):
            with intake.block(block) as (pieces, source_bytes):
                assert sum(len(memoryview(piece)) for piece in pieces) == source_bytes
                reader.check_stored(block, memoryview(pieces[0]))
    # A request is one whole stripe, or several small stripes that are whole.
    unit = stripe if stripe > 1 << 20 else piece_bytes(stripe)
    assert len(reader.asked) > len(reader.block_bytes)
    assert all(start // unit == (end - 1) // unit for start, end in reader.asked)
