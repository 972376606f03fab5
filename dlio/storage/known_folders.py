"""The folders that this user has kept disk tiers in, for `dlio status` and `dlio evict`.

    <cache>/tier-<hash of the path>.json    {"root": path}

The cache is this user's own (`dlio.data.index.open_cache`). A folder that is named there is looked
at as any other: data count only where this user has put them.
"""

import contextlib
import json
import os
import re
from typing import Final

import xxhash

from dlio.data.index import open_cache
from dlio.util.trusted_files import read_small
from dlio.util.whole_files import write_whole_at

_NAME: Final = re.compile(r"tier-[0-9a-f]{16}\.json")
_MOST_BYTES: Final = 1 << 14
_MOST: Final = 1000


def remember_root(root: str) -> None:
    """Note the folder of a disk tier. Nothing happens if the cache cannot be written."""
    name = f"tier-{xxhash.xxh3_64_hexdigest(os.fsencode(root))}.json"
    text = json.dumps({"root": root}).encode()
    with contextlib.suppress(OSError), open_cache() as cache:
        if name not in os.listdir(cache):
            write_whole_at(cache, name, lambda file: file.write(text))


def known_roots() -> list[str]:
    """Return the folders that were noted, sorted; those that are gone too."""
    roots = []
    with contextlib.suppress(OSError), open_cache() as cache:
        names = [name for name in os.listdir(cache) if _NAME.fullmatch(name)]
        for name in sorted(names)[:_MOST]:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                row = json.loads(read_small(cache, name, _MOST_BYTES))
                root = row.get("root") if isinstance(row, dict) else None
                if isinstance(root, str) and os.path.isabs(root):
                    roots.append(root)
    return sorted(roots)
