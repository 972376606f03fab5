"""Compressors of installed packages, found by their entry points."""

from pathlib import Path

import pytest

from dlio.exchange.compress import make_compressor
from dlio.exchange.compress.half import Bfloat16
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of
from dlio.exchange.exchange_spec import parse_exchange


def test_a_compressor_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "halves-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[dlio.compressors]\nhalves = dlio.exchange.compress.half:Bfloat16\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert parse_exchange("allreduce+halves").compressor == "halves"
    made = make_compressor("halves", pieces_of([("w", (3, 4))]), ChunkScratch())
    assert isinstance(made, Bfloat16)
    assert made.entries == 12
