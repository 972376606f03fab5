#!/bin/sh
# fsspec 2026.9.0: of a remote file that is read at two places in turn, 81 times the bytes read are
# fetched. The cache of files, `readahead`, keeps one range and fetches `block_size` more behind each
# read, so that every read of the other place throws it away. So it is for a file read backwards.
#
# Two columns of a table, a file and its index, or two threads with one file object do that. Under
# `cache_type="blockcache"` the same reads take two requests; "bytes" is like "readahead".
#
# Output seen (64 reads of 64 KiB, blocks of 5 MiB):
#   readahead: forward 1 requests, 5 MiB; at two places 64 requests, 324 MiB; backward 64 requests, 324 MiB
#   bytes: forward 1 requests, 5 MiB; at two places 64 requests, 324 MiB; backward 64 requests, 324 MiB
#   blockcache: forward 1 requests, 5 MiB; at two places 2 requests, 10 MiB; backward 1 requests, 5 MiB
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check fsspec==2026.9.0
"$folder/venv/bin/python" - <<'PYTHON'
import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

assert fsspec.__version__ == "2026.9.0", fsspec.__version__
SIZE, READ, BLOCK = 64 << 20, 64 << 10, 5 << 20
PLACES = {
    "forward": [READ * i for i in range(64)],
    "at two places": [SIZE // 2 * (i % 2) + READ * (i // 2) for i in range(64)],
    "backward": [READ * (63 - i) for i in range(64)],
}


class Remote(AbstractBufferedFile):
    """A file whose requests are noted."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        requests.append(end - start)
        return bytes(end - start)


for cache in ("readahead", "bytes", "blockcache"):
    seen = {}
    for name, places in PLACES.items():
        requests: list[int] = []
        with Remote(
            AbstractFileSystem(), "file", block_size=BLOCK, cache_type=cache, size=SIZE
        ) as file:
            for place in places:
                file.seek(place)
                assert len(file.read(READ)) == READ
        seen[name] = len(requests), sum(requests) >> 20
    parts = (f"{name} {count} requests, {size} MiB" for name, (count, size) in seen.items())
    print(f"{cache}: {'; '.join(parts)}")
    if cache == "blockcache":
        assert list(seen.values()) == [(1, 5), (2, 10), (1, 5)]
    else:
        assert list(seen.values()) == [(1, 5), (64, 324), (64, 324)]
PYTHON
