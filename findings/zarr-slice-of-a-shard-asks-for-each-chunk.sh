#!/bin/sh
# zarr 3.1.6: a slice of one shard is read with a request for each of its inner chunks.
#
# Inner chunks of a shard lie one after another in one object. A slice over 64 of them could be one
# range; zarr asks the store for the index, and then for 64 ranges that touch each other. On object
# storage, where a request takes 20 to 100 ms and costs as much as a megabyte, a shard is read as
# slowly as if it were 64 objects, unless whole shards are asked for: then it is one request.
#
# Output seen:
#   1024 rows of a shard: 1 request for the index, 64 for ranges, 63 of which begin where another ends
#   the whole shard: 1 request
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 zarr==3.1.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import zarr
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.storage import MemoryStore

assert zarr.__version__ == "3.1.6", zarr.__version__


class CountingStore(MemoryStore):
    """Notes the byte range of each request."""

    ranges: list = []

    async def get(self, key, prototype, byte_range=None):
        CountingStore.ranges.append(byte_range)
        return await super().get(key, prototype, byte_range)


rows = np.arange(4096 * 64, dtype="f4").reshape(4096, 64)
array = zarr.create_array(
    CountingStore(), shape=rows.shape, chunks=(16, 64), shards=rows.shape, dtype="f4", compressors=None
)
array[:] = rows
CountingStore.ranges.clear()
assert (array[:1024] == rows[:1024]).all()
index = [each for each in CountingStore.ranges if isinstance(each, SuffixByteRequest)]
parts = [each for each in CountingStore.ranges if isinstance(each, RangeByteRequest)]
ends = {each.end for each in parts}
touching = sum(each.start in ends for each in parts)
print(
    f"1024 rows of a shard: {len(index)} request for the index, {len(parts)} for ranges, "
    f"{touching} of which begin where another ends"
)
CountingStore.ranges.clear()
assert (array[:] == rows).all()
print(f"the whole shard: {len(CountingStore.ranges)} request")
assert (len(index), len(parts), touching) == (1, 64, 63)
assert CountingStore.ranges == [None]
PYTHON
