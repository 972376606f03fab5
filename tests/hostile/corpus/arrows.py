"""Arrow files and streams."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.hostile.corpus.case import ANY, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, nonsense, special_files


def _table() -> pa.Table:
    return pa.table(
        {
            "image": [b"\xff\xd8\xff" + bytes([k]) * 50 for k in range(30)],
            "label": list(range(30)),
            "x": [[1.0] * (k % 3) for k in range(30)],
        }
    )


def _encoded(make: Callable[..., Any], table: pa.Table, packed: str = "") -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=packed or None)
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=10)
    return bytes(sink.getvalue().to_pybytes())


def _stream(folder: Path) -> Ask:
    (folder / "x.arrow").write_bytes(_encoded(pa.ipc.new_stream, _table()))
    return Ask("reader", str(folder / "x.arrow"))


def _file(folder: Path) -> Ask:
    (folder / "x.arrow").write_bytes(_encoded(pa.ipc.new_file, _table(), "lz4"))
    return Ask("reader", str(folder / "x.arrow"))


def _saved(folder: Path) -> Ask:
    data = folder / "data"
    data.mkdir()
    (data / "a.arrow").write_bytes(_encoded(pa.ipc.new_stream, _table()))
    (data / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    return Ask("reader", str(data))


def _raw(data: bytes) -> Make:
    def make(folder: Path) -> Ask:
        (folder / "x.arrow").write_bytes(data)
        return Ask("reader", str(folder / "x.arrow"))

    return make


def _bomb(packed: str) -> Make:
    """A batch of 700 MiB of zeros when decompressed."""

    def make(folder: Path) -> Ask:
        table = pa.table({"a": pa.array([bytes(7 << 20)] * 10)})
        data = _encoded(pa.ipc.new_stream, table, packed)
        # The size that each buffer is to have stands before it.
        at = data.rindex(struct.pack("<q", 70 << 20))
        return _raw(data[:at] + struct.pack("<q", 70 << 40) + data[at + 8 :])(folder)

    return make


def cases() -> Cases:
    """Cases of this format."""
    good = _encoded(pa.ipc.new_stream, _table())
    yield Case("arrow/empty", _raw(b""))
    yield Case("arrow/magic-alone", _raw(b"ARROW1\0\0ARROW1"))
    yield Case("arrow/no-schema", _raw(b"\xff\xff\xff\xff\0\0\0\0"))
    yield Case("arrow/no-rows", _raw(_encoded(pa.ipc.new_stream, _table()[:0])))
    for size in (2**31 - 1, -1, 7, 1 << 20):
        yield Case(f"arrow/metadata-{size}", _raw(b"\xff\xff\xff\xff" + struct.pack("<i", size)))
    yield Case("arrow/noise", _raw(b"\xff\xff\xff\xff\x20\0\0\0" + bytes(range(200))))
    yield Case("arrow/twice", _raw(good[:-8] + good))
    for packed in ("lz4", "zstd"):
        yield Case(f"arrow/bomb-{packed}", _bomb(packed), says="claims")
    yield from special_files("arrow", _stream, "x.arrow", but=("outside",))
    yield from damaged("arrow", _stream, "x.arrow", 24)
    yield from damaged("arrow-file", _file, "x.arrow", 16)
    yield from nonsense("arrow", _saved, "data/state.json", 24, ANY)
