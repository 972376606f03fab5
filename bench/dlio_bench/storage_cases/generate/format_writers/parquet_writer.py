"""The writer of Parquet files with columns `image` and `label`."""

from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from dlio_bench.storage_cases.generate.format_writers.part import FilePart

_GROUP_BYTES: Final = 16 << 20
"""Approximate bytes of a row group."""


def write_parquet(path: str, part: FilePart) -> None:
    """Write a file without compression and dictionaries, row group by row group."""
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    mean = max(1, int(part.sizes.mean()))
    rows = max(1, _GROUP_BYTES // mean)
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        held: list[bytes] = []
        for data in part.payloads():
            held.append(data.tobytes())
            if len(held) == rows:
                writer.write_table(_table(held, part.label, schema))
                held.clear()
        if held:
            writer.write_table(_table(held, part.label, schema))


def _table(rows: list[bytes], label: int, schema: pa.Schema) -> pa.Table:
    return pa.table({"image": rows, "label": [label] * len(rows)}, schema)
