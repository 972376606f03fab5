"""Parquet files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files


def sound(folder: Path) -> Ask:
    """Ten rows in two row groups."""
    table = pa.table(
        {
            "image": [bytes([k]) * (k + 1) for k in range(10)],
            "label": list(range(10)),
            "x": [[1.0, 2.0]] * 10,
        }
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=5)
    return Ask("reader", str(folder / "a.parquet"))


def _in_folder(folder: Path) -> Ask:
    (folder / "data").mkdir()
    sound(folder / "data")
    return Ask("reader", str(folder / "data"))


def _table(table: pa.Table, **options: object) -> Make:
    def make(folder: Path) -> Ask:
        pq.write_table(table, folder / "a.parquet", **options)
        return Ask("reader", str(folder / "a.parquet"))

    return make


def _repeated(folder: Path) -> Ask:
    """2 * 10^8 equal numbers, which take a few kilobytes."""
    schema = pa.schema([("label", pa.int64())])
    with pq.ParquetWriter(folder / "a.parquet", schema, compression="zstd") as writer:
        part = pa.table({"label": np.zeros(5_000_000, np.int64)}, schema=schema)
        for _ in range(40):
            writer.write_table(part, row_group_size=1 << 40)
    return Ask("reader", str(folder / "a.parquet"))


def _one_group(folder: Path) -> Ask:
    """10^8 equal numbers in one row group."""
    table = pa.table({"label": pa.array(np.zeros(100_000_000, np.int8))})
    pq.write_table(
        table.cast(pa.schema([("label", pa.int64())])), folder / "a.parquet", row_group_size=1 << 40
    )
    return Ask("reader", str(folder / "a.parquet"))


def _dictionary_bomb(values: Sequence[object], kind: pa.DataType, count: int = 300_000) -> Make:
    """Few large values of a dictionary in many rows."""

    def make(folder: Path) -> Ask:
        indices = pa.array(np.arange(count) % len(values), pa.int32())
        column = pa.DictionaryArray.from_arrays(indices, pa.array(values, kind))
        schema = pa.schema([("label", pa.int64()), ("x", kind)])
        labels = pa.array(np.arange(count))
        # Written as a dictionary; the stored schema does not say so.
        table = pa.table({"label": labels, "x": column})
        with pq.ParquetWriter(
            folder / "a.parquet",
            table.schema,
            store_schema=False,
            dictionary_pagesize_limit=1 << 30,
        ) as writer:
            writer.write_table(table, row_group_size=1 << 40)
        assert pq.read_schema(folder / "a.parquet").equals(schema)
        return Ask("reader", str(folder / "a.parquet"))

    return make


def _wide_bomb(folder: Path) -> Ask:
    """10,000 equal values of 64 KiB."""
    values = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(1 << 16), 10_000, [None, pa.py_buffer(bytes(10_000 << 16))]
    )
    pq.write_table(pa.table({"x": values}), folder / "a.parquet", compression="zstd")
    return Ask("reader", str(folder / "a.parquet"))


def _path_bomb(folder: Path) -> Ask:
    """Images of a byte each with one long path."""
    count = 200_000
    column = pa.StructArray.from_arrays(
        [
            pa.array([b"\xff"] * count),
            pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(count), pa.int32()), pa.array(["p" * (1 << 20)])
            ),
        ],
        ["bytes", "path"],
    )
    pq.write_table(
        pa.table({"image": column}),
        folder / "a.parquet",
        store_schema=False,
        dictionary_pagesize_limit=1 << 30,
    )
    return Ask("reader", str(folder / "a.parquet"))


def _features(value: str) -> Make:
    table = pa.table({"label": [1, 2]}).replace_schema_metadata({"huggingface": value})
    return _table(table)


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("parquet/sound", sound, RIGHT, "10 samples")
    yield from special_files("parquet", sound, "a.parquet", but=("outside",))
    yield from special_files("parquet-folder", _in_folder, "data/a.parquet")
    yield from damaged("parquet", sound, "a.parquet", 36)
    yield Case("parquet/repeated", _repeated)
    yield Case("parquet/one-group", _one_group)
    long = "x" * (1 << 20)
    yield Case("parquet/text-bomb", _dictionary_bomb([long], pa.string()))
    yield Case("parquet/texts-bomb", _dictionary_bomb(["", "a", long], pa.string()))
    yield Case("parquet/bytes-bomb", _dictionary_bomb([b"a", long.encode()], pa.binary()))
    yield Case("parquet/wide-bomb", _wide_bomb)
    yield Case("parquet/path-bomb", _path_bomb)
    words = [f"word {k}" for k in range(1000)]
    yield Case("parquet/words", _dictionary_bomb(words, pa.string()), RIGHT, "300000 samples")
    none = pa.table({"x": pa.array([], pa.int64())})
    yield Case("parquet/empty", _table(none))
    yield Case("parquet/no-columns", _table(pa.table({})))
    yield Case("parquet/nulls", _table(pa.table({"x": [1, None]})), RIGHT, "2 samples")
    yield Case("parquet/all-null", _table(pa.table({"x": pa.nulls(5)})), RIGHT, "5 samples")
    same = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    yield Case("parquet/same-names", _table(same))
    yield Case("parquet/empty-name", _table(pa.table({"": [1]})), ANY)
    yield Case("parquet/escape-name", _table(pa.table({"\x1b[31m\n": [None, b"1"]})))
    yield Case("parquet/list-of-lists", _table(pa.table({"x": [[[1]]]})), RIGHT, "1 samples")
    yield Case("parquet/ragged-lists", _table(pa.table({"x": [[[1], [1, 2]]]})))
    yield Case("parquet/list-nulls", _table(pa.table({"x": [[1, None], [2, 3]]})), RIGHT)
    yield Case(
        "parquet/list-empty", _table(pa.table({"x": pa.array([[], []], pa.list_(pa.int64()))})), ANY
    )
    yield Case(
        "parquet/map",
        _table(pa.table({"x": pa.array([{"a": 1}], pa.map_(pa.string(), pa.int64()))})),
    )
    decimal = pa.table({"x": pa.array([1], pa.decimal128(5, 2))})
    yield Case("parquet/decimal", _table(decimal), RIGHT)
    yield Case("parquet/time", _table(pa.table({"x": pa.array([1], pa.timestamp("ns"))})))
    path_only = pa.array(
        [{"path": "/etc/passwd", "bytes": None}],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    yield Case("parquet/path-only", _table(pa.table({"image": path_only})))
    wide = pa.table({str(k): [1] for k in range(3000)})
    yield Case("parquet/many-columns", _table(wide), ANY)
    for name, value in {
        "number": "5",
        "list": "[]",
        "deep": "[" * 50_000,
        "names-number": '{"info": {"features": {"label": {"names": 5}}}}',
        "names-null": '{"info": {"features": {"label": {"names": [null, {}]}}}}',
        "features-list": '{"info": {"features": []}}',
        "label-text": '{"info": {"features": {"label": "x"}}}',
        "escapes": '{"info": {"features": {"label": {"names": ["\\u001b[31m\\n", "b"]}}}}',
    }.items():
        yield Case(f"parquet/features-{name}", _features(value), RIGHT, "2 samples")
