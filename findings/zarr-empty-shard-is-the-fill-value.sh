#!/bin/sh
# zarr 3.1.6: a shard file without bytes is read as the fill value, without an error.
#
# A file of length 0 is what a power cut, or a full quota, leaves of one that had been written. For a
# chunk file zarr's codecs raise; in a shard each chunk without bytes counts as one that was never
# written, and the shard itself does, too: 20 samples become zeros. Of one byte, or of half of the
# shard, the checksum of its index does not match, and zarr raises. A shard whose index stands at its
# start can be cut off anywhere behind a chunk: the chunks after that are zeros.
# Way out: compare the sizes of the files, or write with a fill value that no sample has.
#
# Output seen:
#   chunk of 0 bytes: RuntimeError
#   shard of 0 bytes: [0, 0, 0]
#   shard of 1 byte: ValueError
#   shard with its index at the start, cut off behind 2 of its 8 chunks: [0, 0, 0]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 zarr==3.1.6
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import BytesCodec, ShardingCodec

assert zarr.__version__ == "3.1.6", zarr.__version__


def read(kept, rows=slice(None), **options):
    """Return the first numbers, or the error, of rows of a store whose first file is cut off."""
    array = zarr.create_array("a.zarr", shape=(80,), dtype="i8", overwrite=True, **options)
    array[:] = np.arange(1, 81)
    path = Path("a.zarr/c/0")
    path.write_bytes(path.read_bytes()[:kept])
    try:
        return zarr.open_array("a.zarr", mode="r")[rows].tolist()[:3]
    except Exception as error:
        return type(error).__name__


chunk = read(0, chunks=(5,))
empty = read(0, chunks=(5,), shards=(40,))
one = read(1, chunks=(5,), shards=(40,))
index = ShardingCodec(chunk_shape=(5,), codecs=[BytesCodec()], index_location="start")
# 8 entries of 16 bytes and a checksum of 4, then 40 bytes a chunk.
cut = read(132 + 80, slice(35, 40), chunks=(40,), serializer=index, compressors=None)
print(f"chunk of 0 bytes: {chunk}")
print(f"shard of 0 bytes: {empty}")
print(f"shard of 1 byte: {one}")
print(f"shard with its index at the start, cut off behind 2 of its 8 chunks: {cut}")
assert (chunk, empty, one, cut) == ("RuntimeError", [0, 0, 0], "ValueError", [0, 0, 0])
PYTHON
